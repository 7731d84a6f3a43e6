"""All-gathers by the TPU compiler: it runs without a TPU, where libtpu is installed."""

import importlib.util
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.audits import collectives
from meshwright.planner.compilers import LARGEST_PADDED, pads_shards
from meshwright.proofs.target import absent_devices

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install jax[tpu]"
    ),
]


@pytest.fixture(scope="module", autouse=True)
def absent() -> Iterator[None]:
    """Without these words libtpu looks for a TPU that is here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        patch.setenv("TPU_ACCELERATOR_TYPE", "v5p-8")
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        yield


@pytest.mark.parametrize(
    ("on", "mesh"),
    [
        ("v5e:8x8", "fsdp=64"),
        ("v6e:8x8", "fsdp=64"),
        ("v6e:8x8", "dp=2,fsdp=32"),
        ("v6e:8x16", "fsdp=128"),
        ("v6e:16x16", "fsdp=256"),
        ("v6e:4x8", "fsdp=32"),
        ("v6e:4x4", "fsdp=16"),
        ("2*v5e:8x8", "dp=2,fsdp=64"),
        ("v5p:4x4x4", "fsdp=64"),
        ("v5p:2x4x4", "fsdp=32"),
    ],
)
def test_small_arrays_are_all_reduced_where_the_plan_has_it(on: str, mesh: str) -> None:
    machine = mw.Machine.parse(on)
    devices = mw.mesh(mesh, machine, absent_devices(machine), axis_types="explicit")

    def sent(columns: int) -> tuple[str, int]:
        """The operation, and its bytes."""
        local = jax.shard_map(
            lambda part: lax.all_gather(part, "fsdp", tiled=True, to="reduced"),
            in_specs=P("fsdp"),
            out_specs=P(reduced={"fsdp"}),
        )
        with jax.set_mesh(devices):
            sharding = jax.NamedSharding(devices, P("fsdp"))
            array = jax.ShapeDtypeStruct((8192, columns), jnp.bfloat16, sharding=sharding)
            program = jax.jit(local).lower(array).compile().as_text()
        (only,) = collectives(program, devices)
        return only.operation, only.bytes

    pads = pads_shards(devices.shape["fsdp"], machine)
    columns = LARGEST_PADDED // (8192 * 2)
    assert sent(columns) == ("all-reduce" if pads else "all-gather", LARGEST_PADDED)
    assert sent(columns + 64)[0] == "all-gather"
