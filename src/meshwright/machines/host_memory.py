"""Compare the memory of this host with what CPU devices are about to allocate.

Linux lets a process allocate more memory than exists, and kills it without a message when it runs
out of memory. So known needs are checked before the allocation.
"""

import os
import re
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.present import bytes_text

MEMINFO, OWN_CGROUPS, CGROUPS = "proc/meminfo", "proc/self/cgroup", "sys/fs/cgroup"
# of a memory cgroup: the limit, what is used, and the page cache in memory.stat; version 2, then 1
_FILES = (
    ("memory.max", "memory.current", "file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
)


def check_host_memory(needed: int, what: str, remedy: str) -> None:
    """Raise a MeshwrightError if `needed` bytes exceed the free memory of this host.

    `what` begins the message ("tiny with batch=64"), `remedy` ends it.
    """
    free = free_host_memory()
    if free is not None and needed > free:
        raise MeshwrightError(
            f"{what} needs {bytes_text(needed)} of this host's memory, which has "
            f"{bytes_text(free)} free; {remedy}"
        )


def free_host_memory(root: Path = Path("/")) -> int | None:
    """Bytes that can still be allocated here, container limits included; None if not known.

    Page cache counts as free, and so does swap. `root` is where /proc and /sys are looked for.
    """
    found = [_machine(root), *(_cgroup(folder) for folder in _cgroup_folders(root))]
    known = [size for size in found if size is not None]
    return max(min(known), 0) if known else None


def _machine(root: Path) -> int | None:
    text = _read(root / MEMINFO)
    kib = {name: int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
    if "MemAvailable" in kib:
        return 1024 * (kib["MemAvailable"] + kib.get("SwapFree", 0))
    try:  # not Linux: all of it
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _cgroup_folders(root: Path) -> list[Path]:
    """This process's memory cgroups and those above them; inside a container, what is mounted."""
    folders = [root / CGROUPS, root / CGROUPS / "memory"]
    for line in _read(root / OWN_CGROUPS).splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        top = root / CGROUPS if number == "0" else root / CGROUPS / "memory"
        below = Path(path.lstrip("/"))
        folders += [top / part for part in (below, *below.parents)]
    return list(dict.fromkeys(folders))


def _cgroup(folder: Path) -> int | None:
    for limit_file, used_file, cache_name in _FILES:
        limit, used = _read(folder / limit_file).strip(), _read(folder / used_file).strip()
        if limit.isdigit() and used.isdigit():
            cache = re.search(rf"^{cache_name} (\d+)", _read(folder / "memory.stat"), re.M)
            return int(limit) - int(used) + (int(cache[1]) if cache else 0)
    return None  # no limit ("max"), or no such cgroup


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
