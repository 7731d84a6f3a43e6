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
from meshwright.ops.attention import Mask, attention

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
        out = attention(q, k, v, mask=Mask(), strategy="ring", order="zigzag")
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
    """Each computation's hops and the names of its kernels, in the order they run in.

    A choice between two kernels stands for the one that comes last in its first branch.
    """
    assert "is_scheduled=true" in program.partition("\n")[0]
    found: dict[str, list[str]] = {}
    for line in program.splitlines():
        if opened := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            found[opened[1]] = lines = []
        elif named := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line):
            lines.append(line.strip() if "collective-permute" in line else named[1])
    return found


def meanwhile(instructions: list[str]) -> list[tuple[str, list[str]]]:
    """Of each hop of keys or their gradients: its type, and the kernels that run during it."""
    hops = []
    for place, start in enumerate(instructions):
        sent = re.match(r"%?(collective-permute-start[\w.\-]*) = \((\w+)\[2,", start)
        if sent is None:
            continue
        done = next(
            i for i, line in enumerate(instructions)
            if re.search(rf"collective-permute-done\(.*%?{re.escape(sent[1])}\)", line)
        )  # fmt: skip
        kernels = [name for name in instructions[place:done] if name.startswith("splash")]
        hops.append((sent[2], [re.sub(r"_(no_)?residuals.*", "", name) for name in kernels]))
    return sorted(hops)


FORWARD, BACKWARD = ["splash_mqa_fwd"], ["splash_mqa_dkv"]


def test_keys_and_their_gradients_travel_while_the_kernels_run(program: str) -> None:
    loops = {
        name: found for name, lines in schedule(program).items() if (found := meanwhile(lines))
    }
    entry = loops.pop(next(name for name in loops if name.startswith("main")))
    # 6 of the 7 hops of keys are in a loop, and of those of gradients, which come a turn later
    assert sorted(loops.values()) == [
        [("bf16", BACKWARD), ("f32", BACKWARD)],
        [("bf16", FORWARD)],
    ]
    # the first hop of keys serves both passes; the gradients' last one takes them home
    assert entry == [("bf16", []), ("bf16", FORWARD), ("f32", BACKWARD)]


def test_nothing_is_gathered_and_nothing_is_summed_but_the_loss(program: str) -> None:
    assert not re.findall(r" (all-gather|all-to-all|reduce-scatter)(-start)?\(", program)


def test_memory_is_linear_in_the_part_of_a_row(program: str) -> None:
    """No scores: the largest array has a part's tokens by 128 for each head, not by keys."""
    part = LENGTH // 8
    sizes = {
        tuple(map(int, dims.split(","))) for dims in re.findall(r" = \(?\w+\[([\d,]+)\]", program)
    }
    assert max(jnp.prod(jnp.array(size)).item() for size in sizes) <= 2 * part * HEADS * 128 * 4
