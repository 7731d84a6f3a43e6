"""What a run needs is compared with the memory of the host, containers included."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.machines import host_bytes, host_memory
from meshwright.machines.host_memory import check_host_memory, free_host_memory

GIB = 2**30


def host(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nSwapFree: 1048576 kB\n"


def test_available_memory_and_swap_are_free(tmp_path: Path) -> None:
    assert free_host_memory(host(tmp_path, {"proc/meminfo": MEMINFO})) == 9 * GIB


@pytest.mark.parametrize("where", ["sys/fs/cgroup", "sys/fs/cgroup/pod"])
def test_a_limit_of_a_container_counts_without_its_page_cache(tmp_path: Path, where: str) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/pod/one\n",
        f"{where}/memory.max": str(4 * GIB),
        f"{where}/memory.current": str(3 * GIB),
        f"{where}/memory.stat": f"anon {GIB}\nfile {2 * GIB}\n",
    }
    assert free_host_memory(host(tmp_path, files)) == 3 * GIB


def test_a_limit_of_the_first_kind_of_cgroup_counts_too(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "4:memory:/job\n2:cpu:/\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(GIB),
    }
    assert free_host_memory(host(tmp_path, files)) == GIB


def test_a_container_without_a_limit_has_the_host_s_memory(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/memory.current": str(GIB),
    }
    assert free_host_memory(host(tmp_path, files)) == 9 * GIB


def test_copies_on_every_simulated_device_are_counted() -> None:
    mesh = mw.mesh("dp=2,fsdp=4", devices=jax.devices()[:8])
    whole = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=jax.NamedSharding(mesh, P()))
    split = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=jax.NamedSharding(mesh, P("fsdp")))
    assert host_bytes([whole]) == 8 * 256
    assert host_bytes({"a": split}) == 2 * 256


def test_what_does_not_fit_is_refused_with_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "free_host_memory", lambda: 2 * GIB)
    check_host_memory(2 * GIB, "a run", "wait")
    with pytest.raises(
        mw.MeshwrightError,
        match=r"a run needs 3\.0 GiB of this host's memory, which has 2\.0 GiB free; use less",
    ):
        check_host_memory(3 * GIB, "a run", "use less")
    monkeypatch.setattr(host_memory, "free_host_memory", lambda: None)
    check_host_memory(3 * GIB, "a run", "nothing is known of the host")
