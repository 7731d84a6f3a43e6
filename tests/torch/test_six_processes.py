"""Six processes on every mesh of dp × tp, compared with one process and with JAX."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.torch.conftest import IN_SHORT, SixProcesses

import meshwright as mw
from meshwright.models import BY_TRANSFORMERS

pytest.importorskip("torch")
pytest.importorskip("transformers")

MESHES = ("dp=1,tp=6", "dp=2,tp=3", "dp=3,tp=2", "dp=6,tp=1")


def result(results: SixProcesses, name: str) -> Any:
    found = results[name]
    assert "failed" not in found, found["failed"]
    return found


def _slow_unless_short(*name: Any) -> Any:
    text = " ".join(map(str, name))
    return () if text in IN_SHORT else pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "tied", "mesh"),
    [
        pytest.param(
            kind,
            tied,
            mesh,
            marks=_slow_unless_short("train", kind, *(["tied"] if tied else []), mesh),
            id=f"{kind}-{'tied' if tied else 'untied'}-{mesh}",
        )
        for kind in ("llama", "qwen3", "mistral")
        for tied in (False, True)
        for mesh in MESHES
    ],
)
def test_twenty_steps_are_those_of_one_process(
    on_six: SixProcesses, kind: str, tied: bool, mesh: str
) -> None:
    found = result(on_six, f"train {kind}{' tied' if tied else ''} {mesh}")
    assert found["loss"] <= 1e-6
    assert found["weights"] <= 1e-5
    assert found["shards"] == 6  # of every matrix, all distinct
    assert found["tied"] == tied


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=_slow_unless_short("train", "experts", kind))
        for kind in ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3")
    ],
)
def test_mixtures_of_experts_train_with_fsdp(on_six: SixProcesses, kind: str) -> None:
    found = result(on_six, f"train experts {kind}")
    assert found["loss"] <= 2e-6
    assert found["weights"] <= 1e-5


def test_experts_over_tp_are_refused(on_six: SixProcesses) -> None:
    found = on_six["experts over tp"]
    assert "its tp plan has 'moe_tp_experts' for 'model.layers.*.mlp.experts'" in str(found)


@pytest.mark.parametrize(
    "options",
    ["sequence_parallel", "loss_parallel", "activation_checkpointing+reshard_after_forward"],
)
def test_options_change_no_result(on_six: SixProcesses, options: str) -> None:
    for found in result(on_six, f"option {options}").values():
        assert found["loss"] <= 1e-6
        assert found["weights"] <= 1e-5


@pytest.mark.parametrize("case", ["hybrid sharding", "tensor axis first"])
def test_other_meshes_give_the_same_result(on_six: SixProcesses, case: str) -> None:
    found = result(on_six, case)
    assert found["loss"] <= 1e-6
    assert found["weights"] <= 1e-5


def test_mixed_precision_keeps_weights_in_float32(on_six: SixProcesses) -> None:
    found = result(on_six, "mixed precision")
    assert found["dtypes"] == ["torch.float32"]
    assert 1e-6 < found["loss"] < 0.02  # bfloat16 has three digits


def test_padding_and_eager_attention_are_right_under_sequence_parallelism(
    on_six: SixProcesses,
) -> None:
    found = result(on_six, "padding and eager attention")
    assert max(found["eager"], found["sdpa"]) < 1e-6


@pytest.mark.parametrize("mesh", ["dp=6,tp=1", "dp=3,tp=2", "dp=1,tp=6", "dp=1,fsdp=2,tp=3"])
def test_a_run_resumes_on_another_mesh(on_six: SixProcesses, mesh: str) -> None:
    found = result(on_six, "resume")[mesh]
    assert found["loss"] <= 1e-6
    assert found["weights"] <= 1e-6
    assert found["meta"] == {"data": {"position": 18}}


def test_old_and_damaged_checkpoints(on_six: SixProcesses) -> None:
    found = result(on_six, "resume")
    assert found["steps"] == [1, 3]  # keep_last=1, and the newest healthy one
    assert "is damaged: the file arrays-00002.safetensors does not match" in found["damaged"]
    assert "has no checkpoint of step 7; complete checkpoints there: 1, 3" in found["absent"]


def test_every_rank_holds_the_slice_of_the_same_device_in_jax(on_six: SixProcesses) -> None:
    cases = result(on_six, "slices")
    devices = jax.devices()[:6]
    for case in cases:
        mesh = mw.mesh(case["mesh"], devices=devices)
        rules = mw.PathRules([(pattern, mw.Layout(axes)) for pattern, axes in case["rules"]])
        arrays = {
            name.replace(".", "/"): np.zeros(shape, np.float32)
            for name, shape in case["shapes"].items()
        }
        shardings = mw.shardings(arrays, rules, mesh=mesh)
        for name, shape in case["shapes"].items():
            by_device = shardings[name.replace(".", "/")].devices_indices_map(tuple(shape))
            for rank, device in enumerate(devices):
                slices = [
                    part.indices(size)[:2]
                    for part, size in zip(by_device[device], shape, strict=True)
                ]
                corner, local, contiguous = case["ranks"][rank][name]
                assert contiguous, (case["mesh"], name)
                assert corner == [start for start, _ in slices], (case["mesh"], name, rank)
                assert local == [stop - start for start, stop in slices], (case["mesh"], name, rank)


def test_weights_come_from_and_go_to_hugging_face_folders(on_six: SixProcesses) -> None:
    found = result(on_six, "load")
    for kind in ("llama", "qwen3", "gemma3_text"):
        assert found[kind]["logits"] < 1e-5
        assert found[kind]["written"] == 0
    assert found["llama"]["tied"]
    assert not found["qwen3"]["tied"]


def test_initial_weights_do_not_depend_on_the_mesh(on_six: SixProcesses) -> None:
    found = result(on_six, "load")["initialize"]
    assert found["same"]
    assert 0.019 < found["std"] < 0.021


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("weights", "the ranks have different weights"),
        ("length", "sequence length 10 is not divisible by tp=3"),
        ("length", "pad to 12"),
        ("generate", "parallelize a model without sequence_parallel"),
        ("twice", "has been through fully_shard already"),
        ("devices", "'dp=2,tp=3', 'dp=1,tp=6' or 'dp=3,tp=2' would fit"),
        ("forward", "calls the `forward` of a block itself"),
        ("heads", "tp=3 would fit"),
    ],
)
def test_mistakes_are_named(on_six: SixProcesses, case: str, words: str) -> None:
    assert words in result(on_six, "errors")[case]


def test_an_audit_lists_every_collective_of_a_step(on_six: SixProcesses) -> None:
    found = result(on_six, "audit")
    rows = [tuple(row[:3]) for row in found["rows"]]
    # by hand: a layer all-gathers twice and reduce-scatters once, the root gathers once; per layer
    # two sums forward and two backward, one of the embedding and one of the LM head's input
    assert rows.count(("all-gather", "dp", "forward")) == 3
    assert rows.count(("all-gather", "dp", "backward")) == 2
    assert rows.count(("reduce-scatter", "dp", "backward")) == 3
    assert rows.count(("all-reduce", "tp", "forward")) == 5
    assert rows.count(("all-reduce", "tp", "backward")) == 5
    assert rows.count(("all-gather", "tp", "forward")) == 1
    assert rows.count(("all-reduce", "dp", "optimizer")) == 1  # the gradient norm
    assert found["surprises"] == 0
    assert "model.layers.1.mlp" in found["text"]
    layer = 48 * (48 + 24 + 24 + 48 + 3 * 72) * 4 // 3 + 2 * 48 * 4
    assert ["all-gather", "dp", "forward", "model.layers.0", layer] in found["rows"]
    assert "over dp only all-gather is expected" in found["wrong"]
    assert "nothing is expected over tp" in found["wrong"]


def architectures() -> list[str]:
    text = (Path(__file__).parent / "worker.py").read_text()
    names = text.partition("ARCHITECTURES = (")[2].partition(")")[0]
    return [name.strip().strip('"') for name in names.replace("\n", "").split(",") if name.strip()]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=_slow_unless_short("architecture", kind))
        for kind in architectures()
    ],
)
def test_an_architecture_is_split_by_its_own_plan(on_six: SixProcesses, kind: str) -> None:
    found = result(on_six, f"architecture {kind}")
    assert found["logits"] < 1e-6
    assert found["gradients"] < 1e-4  # of the largest of a weight
    assert found["split"] == 1  # every matrix of the layers


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=_slow_unless_short("train by command", kind))
        for kind in BY_TRANSFORMERS
    ],
)
def test_a_step_on_packed_documents_is_that_of_transformers(
    on_six: SixProcesses, kind: str
) -> None:
    found = result(on_six, f"train by command {kind}")
    assert found["loss"] < 1e-5
    assert found["gradient_norm"] < 1e-4
    assert found["resumed"]
