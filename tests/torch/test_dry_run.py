"""What stays split over tp: right in any module tree, and kept where it can be."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.torch.conftest import SixProcesses

import meshwright as mw

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.torch.models import tiny  # noqa: E402

import meshwright.torch as mt  # noqa: E402
from meshwright.torch.checks import check_model  # noqa: E402
from meshwright.torch.placement import place  # noqa: E402
from meshwright.torch.styles import styles  # noqa: E402

HERE = Path(__file__).parent
TREES = 240


def check_trees(found: list[dict[str, Any]], *kept: str) -> None:
    wrong = [tree for tree in found if tree["wrong"]]
    assert not wrong, wrong[:3]
    assert not [tree for tree in found if "refused" in tree]
    # it would be right, and of no use, to keep nothing split
    for kind in kept:
        assert sum(tree.get(kind, 0) > 0 for tree in found) >= len(found) // 12, kind
    for kind in ("random", "lost in training", "evaluation only"):
        assert any(tree.get(kind, 0) for tree in found), kind


def test_random_trees_have_the_gradients_of_one_process(on_six: SixProcesses) -> None:
    check_trees(on_six["random trees"], "layers", "parameters")
    check_decoders(on_six["random decoders"])


def check_decoders(found: list[dict[str, Any]]) -> None:
    wrong = [decoder for decoder in found if decoder["wrong"]]
    assert not wrong, wrong[:3]
    refused = [decoder for decoder in found if "refused" in decoder]
    assert 0 < len(refused) < len(found) / 2
    assert all(decoder["refused"].startswith("sequence_parallel=True: ") for decoder in refused)
    assert any(decoder.get("evaluation only") for decoder in found)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 3])
def test_many_random_trees_have_the_gradients_of_one_process(tp: int, tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(HERE.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tp),
         str(HERE / "tree_worker.py"), str(tmp_path / "out.json"), str(TREES)],
        env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["trees"]) == len(found["decoders"]) == TREES
    check_trees(found["trees"], "layers", "parameters", "blocks")
    check_decoders(found["decoders"])


@pytest.mark.parametrize(
    ("case", "layers"),
    [
        ("opt mlp", 4),
        ("opt attention and mlp", 4),  # its attention names the number of heads
        ("falcon mlp", 4),
        ("bert", 12),
        ("bert on dp", 0),
        ("mamba reads weights of its children", 0),
        ("fused gate and up", 0),
    ],
)
def test_rules_give_the_gradients_of_one_process(
    on_six: SixProcesses, case: str, layers: int
) -> None:
    found = on_six[f"rules {case}"]
    assert "failed" not in found, found["failed"]
    assert found["logits"] < 1e-5
    assert found["gradients"] < 1e-4, found["of"]
    assert len(found["layers"]) == layers


@pytest.mark.parametrize(("case", "layers"), [("bert", 4), ("opt mlp", 4)])
def test_dropout_of_published_models_is_that_of_one_process(
    on_six: SixProcesses, case: str, layers: int
) -> None:
    """The attention of BERT drops probabilities, so its heads are all-gathered."""
    found = on_six[f"dropout {case}"]
    assert "failed" not in found, found["failed"]
    assert found["logits"] < 1e-5
    assert found["gradients"] < 1e-4, found["of"]
    assert len(found["layers"]) == layers


@pytest.mark.parametrize("options", ["", " activation_checkpointing"])
def test_ranks_of_a_tp_group_drop_the_same_whatever_their_seeds(
    on_six: SixProcesses, options: str
) -> None:
    found = on_six[f"dropout{options}"]
    assert "failed" not in found, found["failed"]
    assert found["same as rank 0"] == [True, True, False, False, False, False]  # tp=2
    assert found["output"] < 1e-12
    assert found["gradients"] < 1e-9
    assert found["layers"] == 6


class Pair(torch.nn.Module):
    """Two layers, and a function between them and behind that may know whether it trains."""

    def __init__(self, between: Any, behind: Any = lambda x, training: x) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 12), torch.nn.Linear(12, 6)
        self.between, self.behind = between, behind

    def forward(self, x: Any) -> Any:
        h = self.between(self.up(x), self.training)
        return self.behind(self.down(h), self.training)


PAIR_RULES = mw.PathRules([("up/weight", "o i -> o@tp i"), ("up/bias", "o -> o@tp"),
                           ("down/weight", "o i -> o i@tp"), (".*", ())])  # fmt: skip


def split_of(model: Any, rules: Any = PAIR_RULES) -> Any:
    _, split = styles(model, place(model, "dp=1,tp=2", rules), example=torch.ones(2, 6))
    return split


def centered(x: Any, training: bool) -> Any:
    return x - x.mean(-1, keepdim=True) if training else x


def dropped(x: Any, training: bool) -> Any:
    return torch.nn.functional.dropout(x, 0.5, training)


def unlabelled(x: Any, training: bool) -> Any:
    if training:
        raise ValueError("no labels")
    return x


@pytest.mark.parametrize("between", [centered, dropped])
def test_layers_that_are_right_in_evaluation_alone_are_all_gathered(between: Any) -> None:
    split = split_of(Pair(between))
    assert not split.layers
    needs = "the code between them needs complete activations in training mode, as dropout does"
    assert split.note == f"activations are all-gathered around down, up: {needs} unless its p is 0"
    assert split.why_not_train is None


def test_a_model_in_evaluation_stays_split_and_is_not_trained() -> None:
    split = split_of(Pair(centered).eval())
    assert split.layers == {"up", "down"}
    assert split.note is None
    assert split.why_not_train == (
        "this model was parallelized in evaluation mode, and in training mode the code around "
        "down, up needs complete activations, as dropout does unless its p is 0; call "
        "model.train() before parallelize"
    )
    split = split_of(Pair(unlabelled).eval())
    assert split.layers == {"up", "down"}
    assert "in training mode a dry run failed with ValueError: no labels; call " in str(
        split.why_not_train
    )
    assert str(split_of(Pair(unlabelled)).note).endswith("no labels, in training mode")


def test_code_that_is_right_in_training_alone_is_all_gathered() -> None:
    split = split_of(Pair(lambda x, training: centered(x, not training)))
    assert not split.layers
    assert str(split.note).endswith("the code between them needs complete activations")


def test_dropout_of_complete_activations_and_of_none_keeps_them_split() -> None:
    split = split_of(Pair(lambda x, training: x, dropped))
    assert split.layers == {"up", "down"}
    assert split.random == {True}
    no_dropout = torch.nn.functional.dropout
    split = split_of(Pair(lambda x, training: no_dropout(x, 0.0, training)))
    assert split.layers == {"up", "down"}
    assert not split.random


def test_a_frozen_part_is_compared_as_it_is() -> None:
    """Neither all in training nor all in evaluation is wrong: what the two do together is."""

    class Parts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair, self.frozen = Pair(self.between), torch.nn.Identity()

        def between(self, x: Any, training: bool) -> Any:
            return centered(x, training != self.frozen.training)

        def forward(self, x: Any) -> Any:
            return self.pair(x)

    model = Parts()
    assert split_of(model).layers == {"pair.up", "pair.down"}
    model.frozen.eval()
    assert not split_of(model).layers


def test_a_dry_run_leaves_buffers_and_random_states(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the seeds of GPUs were set")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", refuse)
    norm = torch.nn.BatchNorm1d(6)
    model = torch.nn.Sequential(Pair(lambda x, training: x, dropped), norm)
    state = torch.get_rng_state()
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    assert split_of(model).layers == {"0.up", "0.down"}
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(buffers[name], value) for name, value in model.named_buffers())


def test_running_statistics_begin_anew_in_every_run() -> None:
    """Else evaluation would be compared with other statistics than its own."""

    class Moving(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(1))

        def forward(self, x: Any) -> Any:
            if self.training:
                self.mean = self.mean + 1
            return x + self.mean

    model = torch.nn.Sequential(Pair(lambda x, training: x), Moving())
    assert split_of(model).layers == {"0.up", "0.down"}


def test_gradient_checkpointing_of_transformers_stays_split() -> None:
    model = tiny("llama", num_hidden_layers=1).train()
    model.gradient_checkpointing_enable()
    _, split = styles(model, place(model, "dp=1,tp=2", None))
    assert split.note is None
    assert len(split.layers) == 7
    assert model.model.layers[0].gradient_checkpointing


class Layer(torch.nn.Module):
    def __init__(self, before: Any) -> None:
        super().__init__()
        self.before, self.norm = before, torch.nn.LayerNorm(6)
        self.mlp = Pair(lambda x, training: x)

    def forward(self, x: Any) -> Any:
        x = self.before(x, self.training)
        return x + self.mlp(self.norm(x))


class Decoder(torch.nn.Module):
    """The least that sequence parallelism splits, with a function before each MLP."""

    def __init__(self, before: Any, first_norm: Any = None) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(8, 6), torch.nn.Linear(6, 8, bias=False)
        self.layers = torch.nn.ModuleList(Layer(before) for _ in range(2))
        self.norm = torch.nn.LayerNorm(6)
        self.first_norm = self.norm if first_norm is None else first_norm

    def get_input_embeddings(self) -> Any:
        return self.embed

    def get_output_embeddings(self) -> Any:
        return self.head

    def forward(self, tokens: Any) -> Any:
        x = self.first_norm(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def sequence_parallel(model: Any, length: int = 4) -> Any:
    """Styles and split activations under sequence parallelism over tp=2."""
    rules = mw.PathRules([("head", "v e -> v@tp e"),
                          ("up/weight", "o i -> o@tp i"), ("up/bias", "o -> o@tp"),
                          ("down/weight", "o i -> o i@tp"), (".*", ())])  # fmt: skip
    tokens = torch.ones(2, length, dtype=torch.int64)
    return styles(model, place(model, "dp=1,tp=2", rules), sequence_parallel=True, example=tokens)


def summed(x: Any, training: bool) -> Any:
    return x + x.cumsum(1)


def numbered(x: Any, training: bool) -> Any:
    return x * torch.arange(x.shape[1]).view(1, -1, 1)


@pytest.mark.parametrize(
    ("before", "mode"),
    [
        (summed, ""),
        (numbered, ""),
        (lambda x, training: x * 2 if training else summed(x, training), ""),
        (dropped, " in training mode, as dropout does unless its p is 0"),
    ],
)
def test_sequence_parallelism_is_refused_where_code_needs_the_sequence(
    before: Any, mode: str
) -> None:
    with pytest.raises(mw.MeshwrightError) as refused:
        sequence_parallel(Decoder(before, torch.nn.LayerNorm(6)))
    where = "sequence_parallel=True: the code around layers.{}.mlp needs the complete sequence"
    wanted = [
        f"{where.format(i)}{mode}; leave sequence_parallel out for this model" for i in (0, 1)
    ]
    assert str(refused.value) in wanted
    if mode:
        _, split = sequence_parallel(Decoder(before, torch.nn.LayerNorm(6)).eval())
        assert "leave sequence_parallel out to train this model" in str(split.why_not_train)


def test_norms_before_the_first_block_have_complete_gradients() -> None:
    plan, split = sequence_parallel(Decoder(lambda x, training: x, torch.nn.LayerNorm(6)))
    assert plan["first_norm"].partial == set()
    assert plan["norm"].partial == plan["layers.1.norm"].partial == {"weight", "bias"}
    assert split.why_not_train is None
    with pytest.raises(
        mw.MeshwrightError, match=r"norm\.bias is used on the complete sequence and"
    ):
        sequence_parallel(Decoder(lambda x, training: x))


def test_an_example_that_tp_does_not_divide_is_refused_with_sequence_parallelism() -> None:
    with pytest.raises(mw.MeshwrightError, match="sequence length 3 is not divisible by tp=2"):
        sequence_parallel(Decoder(lambda x, training: x, torch.nn.LayerNorm(6)), length=3)


class Reads(torch.nn.Module):
    """Uses the weight of a layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return x @ self.layer.weight


def test_a_split_weight_that_other_code_reads_is_refused() -> None:
    rules = mw.PathRules([("weight", "out in -> out@tp in"), ("bias", "out -> out@tp")])
    model = Reads()
    with pytest.raises(mw.MeshwrightError, match=r"'layer\.weight' is split over tp, and code out"):
        styles(model, place(model, "dp=1,tp=2", rules), example=torch.ones(2, 6))


def test_a_model_that_cannot_run_alone_says_why() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Linear(12, 6))
    rules = mw.PathRules([("0/weight", "o i -> o@tp i"), ("0/bias", "o -> o@tp"),
                          ("1/weight", "o i -> o i@tp"), (".*", ())])  # fmt: skip
    placements = place(model, "dp=1,tp=2", rules)
    _, split = styles(model, placements)
    assert split.note == (
        "activations are all-gathered around 0, 1: no input of the model is known; give "
        "parallelize(…, example=…)"
    )
    _, split = styles(model, placements, example="text")
    assert split.problem is not None
    assert "TypeError" in split.problem
    _, split = styles(model, placements, example=torch.ones(2, 6))
    assert split.note is None
    assert split.layers == {"0", "1"}


class GeluLinear(torch.nn.Linear):
    """Right on a part of its outputs, wrong as a sum over parts of its inputs."""

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.gelu(super().forward(x))


class SoftmaxLinear(torch.nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x).softmax(-1)


class HalfLinear(torch.nn.Linear):
    """Scales its bias too."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) / 2


class Positions(torch.nn.Embedding):
    """Looks up positions, not what it is given, as OPT does."""

    def forward(self, mask: Any) -> Any:
        return super().forward(mask.clamp(max=1).cumsum(-1) - 1)


class DroppedLinear(torch.nn.Linear):
    """Drops inputs, which are complete where the outputs are split."""

    def forward(self, x: Any) -> Any:
        return super().forward(torch.nn.functional.dropout(x, 0.5, self.training))


class ScaledEmbedding(torch.nn.Embedding):
    def forward(self, tokens: Any) -> Any:
        return super().forward(tokens) * 3


@pytest.mark.parametrize(
    ("kind", "rule", "is_right"),
    [
        (GeluLinear, "o i -> o@tp i", True),
        (GeluLinear, "o i -> o i@tp", False),
        (SoftmaxLinear, "o i -> o@tp i", False),
        (HalfLinear, "o i -> o@tp i", True),
        (HalfLinear, "o i -> o i@tp", False),
        (DroppedLinear, "o i -> o@tp i", True),
        (DroppedLinear, "o i -> o i@tp", False),
        (Positions, "v e -> v@tp e", False),
        (Positions, "v e -> v e@tp", True),
        (ScaledEmbedding, "v e -> v@tp e", True),
    ],
)
def test_a_layer_with_a_forward_of_its_own_is_split_where_its_parts_are_right(
    kind: Any, rule: str, is_right: bool
) -> None:
    model = torch.nn.Sequential(kind(12, 12))
    bias = [("bias", "o -> o@tp")] if rule.endswith("o@tp i") else []
    rules = mw.PathRules([("weight", rule), *bias, (".*", ())])
    placements = place(model, "dp=1,tp=3", rules)
    if is_right:
        _, split = styles(model, placements, example=torch.ones(2, 12))
        assert (True in split.random) == (kind is DroppedLinear)
        return
    with pytest.raises(
        mw.MeshwrightError, match=rf"'0': the forward of {kind.__name__} (computes|cannot)"
    ):
        styles(model, placements)


class NoFirst(torch.nn.Embedding):
    """Zeros for token 0, by its number in the whole table."""

    def forward(self, tokens: Any) -> Any:
        return super().forward(tokens) * (tokens != 0).unsqueeze(-1)


class TwoInputs(torch.nn.Linear):
    def forward(self, x: Any, scale: Any) -> Any:
        return super().forward(x) * scale


class WithBias(torch.nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x), self.bias


class LearnedActivation(torch.nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.act = torch.nn.PReLU()

    def forward(self, x: Any) -> Any:
        return self.act(super().forward(x))


@pytest.mark.parametrize(
    ("layer", "rule", "why"),
    [
        (NoFirst(50_000, 4), "v e -> v@tp e", "computes something else on a part"),
        (TwoInputs(6, 6), "o i -> o@tp i", "cannot be checked on parts: with one input it raises "),
        (WithBias(6, 6), "o i -> o@tp i", "cannot be checked on parts: it returns a tuple"),
        (LearnedActivation(6, 6), "o i -> o@tp i", None),
        (LearnedActivation(6, 6), "o i -> o i@tp", "computes something else on a part"),
    ],
)
def test_a_layer_that_is_not_right_on_parts_has_a_reason(layer: Any, rule: str, why: Any) -> None:
    model = torch.nn.Sequential(layer).to("meta")
    bias = [("bias", "o -> o@tp")] if rule == "o i -> o@tp i" else []
    rules = mw.PathRules([("0/weight", rule), *bias, (".*", ())])
    placements = place(model, "dp=1,tp=2", rules)
    if why is None:
        assert styles(model, placements)
        return
    with pytest.raises(mw.MeshwrightError, match=why):
        styles(model, placements)


class WithScale(torch.nn.Linear):
    """A Linear with a third parameter."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.scale = torch.nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    "layer", [WithScale(), torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(6, 6))]
)
def test_a_split_layer_has_a_weight_and_a_bias_only(layer: Any) -> None:
    rules = mw.PathRules([("weight", "o i -> o@tp i"), ("bias", "o -> o@tp"), (".*", ())])
    model = torch.nn.Sequential(layer)
    with pytest.raises(mw.MeshwrightError, match="only Linear and Embedding weights can be"):
        styles(model, place(model, "dp=1,tp=2", rules))


@pytest.mark.parametrize("option", ["max_norm", "scale_grad_by_freq", "sparse"])
def test_an_embedding_that_needs_the_full_batch_or_table_is_refused(option: str) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(6, 6, **{option: True}))
    with pytest.raises(mw.MeshwrightError, match=f"'0' is an Embedding with {option}=True"):
        check_model(model, place(model, "dp=2"))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_model_that_recomputes_itself_is_all_gathered(use_reentrant: bool) -> None:
    class Recomputes(torch.nn.Sequential):
        def forward(self, x: Any) -> Any:
            recomputed = torch.utils.checkpoint.checkpoint
            return recomputed(super().forward, x, use_reentrant=use_reentrant)

    model = Recomputes(torch.nn.Linear(6, 12), torch.nn.GELU(), torch.nn.Linear(12, 6))
    rules = mw.PathRules([("0/weight", "o i -> o@tp i"), ("0/bias", "o -> o@tp"),
                          ("2/weight", "o i -> o i@tp"), (".*", ())])  # fmt: skip
    _, split = styles(model, place(model, "dp=1,tp=2", rules), example=torch.ones(2, 6))
    assert not split.layers
    assert "activations are all-gathered around 0, 2" in str(split.note)


def test_initial_weights_set_no_seeds_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the seeds of GPUs were set")

    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    try:
        mt.parallelize(model, mt.mesh("dp=1,tp=1", device="cpu"))
        monkeypatch.setattr(torch.cuda, "manual_seed_all", refuse)
        state = torch.get_rng_state()
        mt.initialize(model, seed=3)
        assert torch.equal(state, torch.get_rng_state())
    finally:
        torch.distributed.destroy_process_group()
