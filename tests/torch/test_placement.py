"""Placements, checks and the table, without a process group."""

import math
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw
from meshwright.checkpoint import sums_of_bits
from meshwright.meshes import MeshSpec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import meshwright.torch as mt  # noqa: E402
from meshwright.torch.dims import dims_of  # noqa: E402


def meta(config: Any) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def llama(**changes: Any) -> Any:
    sizes = {
        "vocab_size": 96, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2,
        "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4,
    }  # fmt: skip
    return meta(transformers.LlamaConfig(**sizes | changes))


def test_the_table_is_that_of_the_guide() -> None:
    table = mt.explain(llama(), "dp=2,tp=3")
    layouts = {row.path: str(row.layout) for row in table.rows}
    assert layouts["model/layers/0/self_attn/q_proj/weight"] == "heads embed -> heads@tp+dp embed"
    assert layouts["model/layers/0/self_attn/o_proj/weight"] == "embed heads -> embed@dp heads@tp"
    assert layouts["model/embed_tokens/weight"] == "vocab embed -> vocab@tp+dp embed"
    assert layouts["model/norm/weight"] == "norm -> norm@dp"
    shards = table.shards("model.layers.0.self_attn.q_proj.weight")
    assert [shard[0].start for shard in shards.values()] == [0, 16, 32, 8, 24, 40]
    text = str(table)
    assert "rank 5" in text
    assert "[24:48, 32:48]" in text


def test_logical_rules_of_jax_give_the_layouts_of_jax() -> None:
    from meshwright.models import decoder_rules

    table = mt.explain(llama(), "dp=1,fsdp=2,tp=3", decoder_rules())
    layouts = {row.path: str(row.layout) for row in table.rows}
    assert layouts["model/layers/0/self_attn/q_proj/weight"] == "heads embed -> heads@tp embed@fsdp"
    assert layouts["model/layers/1/mlp/down_proj/weight"] == "embed mlp -> embed@fsdp mlp@tp"
    assert layouts["lm_head/weight"] == "vocab embed -> vocab@tp embed@fsdp"


def test_rules_may_place_activations_which_follow_from_the_styles() -> None:
    text = "batch -> dp\nlength -> none\nvocab -> tp\nheads -> tp\nkv_heads -> tp\nmlp -> tp\n"
    rules = mw.Rules.parse(text + "embed -> dp\nnorm -> none\nhead_dim -> none\nlayers -> none")
    layouts = {row.path: str(row.layout) for row in mt.explain(llama(), "dp=2,tp=3", rules).rows}
    assert layouts["model/layers/0/mlp/up_proj/weight"] == "mlp embed -> mlp@tp embed@dp"


@st.composite
def split_matrices(draw: Any) -> tuple[str, tuple[int, int], list[tuple[str, ...]]]:
    """A mesh, the shape of a matrix, and the axes of each dim, the sharded axis last."""
    sizes = {axis: draw(st.sampled_from([1, 2, 3, 4])) for axis in ("dp", "tp")}
    while math.prod(sizes.values()) > 16:
        sizes[draw(st.sampled_from(sorted(sizes)))] = 1
    names = draw(st.permutations(sorted(sizes)))
    axes: list[tuple[str, ...]] = [(), ()]
    tensor = draw(st.sampled_from([None, 0, 1]))
    if tensor is not None:
        axes[tensor] = ("tp",)
    data = draw(st.sampled_from([0, 1]))
    axes[data] = (*axes[data], "dp")
    parts = [math.prod(sizes[axis] for axis in own) for own in axes]
    shape = tuple(part * draw(st.integers(1, 5)) for part in parts)
    return ",".join(f"{name}={sizes[name]}" for name in names), shape, axes  # type: ignore[return-value]


@given(split_matrices())
def test_every_rank_has_the_slice_of_the_same_device_in_jax(case: Any) -> None:
    text, shape, axes = case
    model = torch.nn.Linear(shape[1], shape[0], bias=False, device="meta")
    rules = mw.PathRules([("weight", mw.Layout(tuple(axes)))])
    found = mt.explain(model, text, rules).shards("weight")
    spec = MeshSpec.parse(text)
    devices = np.array(jax.devices()[: spec.size]).reshape(spec.sizes)
    sharding = jax.sharding.NamedSharding(
        jax.sharding.Mesh(devices, spec.names), jax.sharding.PartitionSpec(*axes)
    )
    by_device = sharding.devices_indices_map(shape)
    for rank, device in enumerate(devices.flat):
        wanted = [
            part.indices(size)[:2] for part, size in zip(by_device[device], shape, strict=True)
        ]
        assert [(part.start, part.stop) for part in found[rank]] == wanted


def test_dims_are_those_of_the_jax_models() -> None:
    from meshwright.models.decoder.architectures.llama import TENSORS

    for name, dims in TENSORS.values():
        merged = dims.replace("(heads head_dim)", "heads").replace(
            "(kv_heads head_dim)", "kv_heads"
        )
        assert dims_of(name.format(layer=3)) == merged, name


@pytest.mark.parametrize(
    ("changes", "mesh", "words"),
    [
        ({}, "dp=1,tp=4", "kv_heads=6 cannot be split in tp=4; tp=3 would fit"),
        ({"num_attention_heads": 8, "num_key_value_heads": 4}, "dp=1,tp=3",
         "heads=8 cannot be split in tp=3; tp=2 would fit"),
        ({"intermediate_size": 74}, "dp=1,tp=6", "dim 'mlp' of size 74 cannot be split in tp=6; tp=2 would fit, or make it 72 or 78"),
        ({"vocab_size": 2}, "dp=1,tp=3", "dim 'vocab' of size 2 cannot be split in tp=3; tp=2 would fit"),
        ({}, "tp=3", "has no data axis, which fully_shard needs; write 'dp=1,tp=3'"),
        ({}, "dp=2,tp=3,sp=2", "sp=2 is a sp axis, which the PyTorch backend does not have"),
        ({}, "dp=-1,tp=3", "leaves a size open"),
        ({}, "dp=2,pt=3", "did you mean 'tp'?"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused(changes: Any, mesh: str, words: str) -> None:
    with pytest.raises(mw.MeshwrightError) as error:
        mt.explain(llama(**changes), mesh)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([("embed_tokens", ("tp", "dp")), (".*", ())], "are one tied weight, and the rules give them two"),
        ([("q_proj", ("tp", "dp")), ("lm_head|embed", ("tp",)), (".*", ())], "queries without their keys"),
        ([("norm", ("tp",)), (".*", ())], "only Linear and Embedding weights can be"),
        ([("mlp", (("dp", "tp"), None)), (".*", ())], "fully_shard cuts what tensor parallelism left"),
        ([("nothing", ("tp",)), (".*", ())], "path rule 'nothing' matches no array"),
    ],
)  # fmt: skip
def test_rules_that_contradict_the_model_are_refused(rules: Any, words: str) -> None:
    from meshwright.torch.checks import check_model
    from meshwright.torch.placement import place
    from meshwright.torch.styles import styles

    model = llama(tie_word_embeddings=True)
    with torch.device("meta"):
        model.tie_weights()

    def decide() -> None:
        placements = place(model, "dp=2,tp=3", mw.PathRules(rules))
        check_model(model, placements)
        styles(model, placements)

    with pytest.raises(mw.MeshwrightError) as error:
        decide()
    assert words in str(error.value)


def test_uneven_parts_are_those_of_fully_shard() -> None:
    table = mt.explain(
        llama(hidden_size=50, num_attention_heads=10, num_key_value_heads=5), "dp=4,tp=1"
    )
    shards = table.shards("model/norm/weight").values()
    assert [(shard[0].start, shard[0].stop) for shard in shards] == [
        (0, 13),
        (13, 26),
        (26, 39),
        (39, 50),
    ]


def test_8b_on_64_ranks_is_explained_as_it_is_placed() -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8,
    )  # fmt: skip
    model = meta(config)
    config.num_hidden_layers = 2  # layers are alike: two are parallelized
    part = meta(config)
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=64)
    try:
        mesh = mt.mesh("dp=-1,tp=8", device="cpu")
        table = mt.explain(model, mesh)
        text = str(table)
        mt.parallelize(part, mesh, sequence_parallel=True)
        held = {name: param.to_local().shape for name, param in part.named_parameters()}
        placed = {name: table.shards(name)[5] for name in held}
    finally:
        dist.destroy_process_group()
    assert "8,030,261,248 elements" in text
    assert held["model.layers.1.mlp.up_proj.weight"] == (14336 // 64, 4096)
    assert held["model.layers.0.self_attn.o_proj.weight"] == (512, 512)
    for name, slices in placed.items():
        assert held[name] == tuple(part.stop - part.start for part in slices), name


def test_a_model_without_a_plan_needs_rules_or_no_tensor_parallelism() -> None:
    model = meta(transformers.GPT2Config(n_embd=48, n_layer=2, n_head=6, vocab_size=96))
    with pytest.raises(mw.MeshwrightError, match="has no tp plan of its own"):
        mt.explain(model, "dp=2,tp=3")
    assert mt.explain(model, "dp=6,tp=1").bytes_per_device > 0


def test_biases_go_with_their_weights() -> None:
    model = meta(transformers.Qwen2Config(vocab_size=96, hidden_size=48, intermediate_size=72,
        num_hidden_layers=1, num_attention_heads=12, num_key_value_heads=6))  # fmt: skip
    rows = {row.path: str(row.layout) for row in mt.explain(model, "dp=2,tp=3").rows}
    assert rows["model/layers/0/self_attn/q_proj/bias"] == "heads -> heads@tp+dp"


def test_a_fingerprint_is_that_of_jax() -> None:
    import jax.numpy as jnp
    import numpy as np

    from meshwright.checkpoint.fingerprint import fingerprint, fingerprint_text

    rng = np.random.default_rng(0)
    whole = rng.normal(size=(6, 4, 3)).astype(np.float32)
    parts = [(whole[:2], (0, 0, 0)), (whole[2:, :1], (2, 0, 0)), (whole[2:, 1:], (2, 1, 0))]
    sums = [
        sums_of_bits(np.ascontiguousarray(part).view(np.uint32), start, whole.shape)
        for part, start in parts
    ]
    totals = [sum(both) % 2**32 for both in zip(*sums, strict=True)]
    assert "".join(f"{total:08x}" for total in totals) == fingerprint_text(
        fingerprint(jnp.asarray(whole))
    )
    halves = whole.astype(jnp.bfloat16)
    first, second = sums_of_bits(halves.view(np.uint16), (0, 0, 0), whole.shape)
    assert f"{first:08x}{second:08x}" == fingerprint_text(fingerprint(jnp.asarray(halves)))


def test_it_works_where_jax_is_not_installed() -> None:
    code = """
import sys
for name in ("jax", "jaxlib", "ml_dtypes", "orbax", "optax", "rich", "tyro"):
    sys.modules[name] = None
import torch
from torch import nn
import meshwright as mw
mesh = mw.torch.mesh("dp=1,tp=1", device="cpu")
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
rules = mw.PathRules([("0/weight", ("tp", "dp")), (".*", ())])
print(mw.torch.explain(model, "dp=2,tp=2", rules))
mw.torch.parallelize(model, mesh, rules)
optimizer = torch.optim.AdamW(model.parameters())
def step():
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print(mw.torch.audit(step, model=model))
checkpoints = mw.torch.Checkpoints(sys.argv[1])
checkpoints.save(1, model, optimizer)
checkpoints.restore(1, model, optimizer)
"""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "a@tp b@dp" in done.stdout
