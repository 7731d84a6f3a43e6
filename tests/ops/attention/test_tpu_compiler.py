"""What the TPU compiler makes of a ring: it runs without a TPU, where libtpu is installed."""

import importlib.util
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.ops.attention import ContextParallel, Mask, attention

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install jax[tpu]"
    ),
]

LENGTH, HEADS, KV_HEADS, HEAD_DIM = 65536, 8, 2, 128


@pytest.fixture(scope="module")
def devices() -> Iterator[list[jax.Device]]:
    """Of a machine that is not here; without these words libtpu looks for one that is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        patch.setenv("TPU_ACCELERATOR_TYPE", "v5p-8")
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        found = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x2")
        yield list(found.devices)


@pytest.fixture(scope="module")
def program(devices: list[jax.Device]) -> str:
    """A causal ring over 8 chips and its gradient, as they will run."""
    mesh = mw.mesh("sp=8", devices=devices, axis_types="explicit")

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = attention(q, k, v, mask=Mask(), context=ContextParallel("ring", "zigzag"))
        return jnp.sum(out.astype(jnp.float32) ** 2)

    with jax.set_mesh(mesh):
        q, k = (
            jax.ShapeDtypeStruct(
                (1, LENGTH, heads, HEAD_DIM),
                jnp.bfloat16,
                sharding=jax.NamedSharding(mesh, P(None, "sp")),
            )
            for heads in (HEADS, KV_HEADS)
        )
        lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, k)
        return str(lowered.compile().as_text())


def schedule(program: str) -> dict[str, list[str]]:
    """Each computation's instructions, in the order they run in."""
    assert "is_scheduled=true" in program.partition("\n")[0]
    found: dict[str, list[str]] = {}
    for line in program.splitlines():
        if opened := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            found[opened[1]] = lines = []
        elif re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = ", line):
            lines.append(line.strip().removeprefix("ROOT ").removeprefix("%"))
    return found


def kernels(lines: list[str], computations: dict[str, list[str]]) -> set[str]:
    """The kernels that run in any case: of a choice, those in both branches."""
    found = {re.split(r"_(?:no_)?residuals", line)[0] for line in lines if line[:6] == "splash"}
    for line in lines:
        if chosen := re.search(r"branch_computations=\{(.*?)\}", line):
            branches = [name.strip(" %") for name in chosen[1].split(",")]
            found |= set.intersection(*(kernels(computations[b], computations) for b in branches))
    return found


def hops(program: str) -> dict[str, list[tuple[str, set[str]]]]:
    """Where keys or their gradients hop: the type that is sent, and what runs meanwhile."""
    computations = schedule(program)
    found: dict[str, list[tuple[str, set[str]]]] = {}
    for name, lines in computations.items():
        for place, start in enumerate(lines):
            sent = re.match(r"(collective-permute-start[\w.\-]*) = \((\w+)\[2,", start)
            if sent is None:
                continue
            ends = re.compile(rf"collective-permute-done\(.*%?{re.escape(sent[1])}\)")
            done = next(i for i, line in enumerate(lines) if ends.search(line))
            during = kernels(lines[place:done], computations)
            found.setdefault(name, []).append((sent[2], during))
    return {name: sorted(several, key=str) for name, several in found.items()}


FORWARD, BACKWARD = {"splash_mqa_fwd"}, {"splash_mqa_dkv"}


def test_keys_and_their_gradients_travel_while_the_kernels_run(program: str) -> None:
    found = hops(program)
    entry = found.pop(next(name for name in found if name.startswith("main")))
    # 6 of the 7 hops of keys are in a loop, and of those of gradients, which come a turn later
    assert sorted(found.values(), key=len) == [
        [("bf16", FORWARD)],
        [("bf16", BACKWARD), ("f32", BACKWARD)],
    ]
    # the first hop of keys serves both passes; the gradients' last one takes them home
    assert entry == [("bf16", set()), ("bf16", FORWARD), ("f32", BACKWARD)]


def test_nothing_is_gathered_and_nothing_is_summed_but_the_loss(program: str) -> None:
    assert not re.findall(r" (all-gather|all-to-all|reduce-scatter)(-start)?\(", program)


def test_memory_is_linear_in_the_part_of_a_row(program: str) -> None:
    """No scores: the largest array has a gradient of all queries for each of 8 blocks of keys."""
    part = LENGTH // 8
    sizes = {
        tuple(map(int, dims.split(","))) for dims in re.findall(r" = \(?\w+\[([\d,]+)\]", program)
    }
    assert max(jnp.prod(jnp.array(size)).item() for size in sizes) <= 8 * part * HEADS * HEAD_DIM


@pytest.mark.parametrize("length", [1000, 3648, 4000])
@pytest.mark.parametrize("packed", [False, True])
def test_lengths_that_are_no_multiple_of_128_run_in_the_fused_kernels(
    devices: list[jax.Device], length: int, packed: bool
) -> None:
    mesh = mw.mesh("dp=8", devices=devices, axis_types="explicit")

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> jax.Array:
        return jnp.sum(attention(q, k, v, *segments).astype(jnp.float32) ** 2)

    def described(*rest: int, dtype: type = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        sharding = jax.NamedSharding(mesh, P("dp"))
        return jax.ShapeDtypeStruct((8, length, *rest), dtype, sharding=sharding)

    with jax.set_mesh(mesh):
        q, k = (described(heads, HEAD_DIM) for heads in (HEADS, KV_HEADS))
        segments = (described(dtype=jnp.int32),) * packed
        lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, k, *segments)
        program = str(lowered.compile().as_text())
    for name in ("splash_mqa_fwd", "splash_mqa_dkv"):
        assert name in program


@pytest.mark.parametrize("head_dim", [128, 192, 256])
@pytest.mark.parametrize("length", [4096, 32768])
def test_heads_of_any_width_fit_into_vector_memory(
    devices: list[jax.Device], length: int, head_dim: int
) -> None:
    """Packed documents, forward and backward, with one kernel or two: 192 are DeepSeek-V3's."""
    mesh = mw.mesh("dp=8", devices=devices, axis_types="explicit")

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        return jnp.sum(attention(q, k, v, segments, Mask()).astype(jnp.float32) ** 2)

    with jax.set_mesh(mesh):
        by_device = jax.NamedSharding(mesh, P("dp"))
        shape = (8, length, 2, head_dim)
        q = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=by_device)
        segments = jax.ShapeDtypeStruct((8, length), jnp.int32, sharding=by_device)
        program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, q, q, segments).compile()
    assert "splash" in program.as_text()
