"""`meshwright doctor`: what is here, what is missing, and the command that fixes it."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import sys
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from meshwright.errors import MeshwrightError, install_command
from meshwright.files import status_of
from meshwright.launch import cache_folder
from meshwright.machines import chip_of_kind, free_host_memory
from meshwright.present import GIB, Column, Row, aligned, bytes_text

_PATIENCE_S = 3.0
# packages, one of which shows that an extra is installed, and what it is for
_EXTRAS = {
    "serve": ("starlette", "meshwright serve"),
    "hub": ("huggingface_hub", "models and datasets by their names on the Hub"),
    "parquet": ("pyarrow", "Parquet and Arrow files"),
    "torch": ("torch", "--backend torch and mw.torch"),
    "eval": ("lm_eval", "eval --tasks"),
    "track": ("wandb", "--log.wandb and --log.tensorboard"),
    "tpu": ("libtpu", "proofs for TPUs, and runs on them"),
    "cuda": ("jax_cuda13_plugin jax_cuda12_plugin", "proofs for GPUs, and runs on them"),
}
_GPU_FILES = ("/dev/nvidia0", "/proc/driver/nvidia/version")
_TPU_FILES = ("/dev/accel0", "/dev/vfio/0")


@dataclasses.dataclass(frozen=True)
class DoctorSettings:
    network: bool = True
    """Ask whether the Hugging Face Hub can be reached."""
    json: bool = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `fix` says what to do where it is not as it should be."""

    subject: str
    found: str
    fix: str = ""
    must: bool = False  # without it, meshwright does not work here


def _note(finding: Finding) -> str:
    return f"{'fix' if finding.must else 'optional'}: {finding.fix}" if finding.fix else ""


def doctor(settings: DoctorSettings) -> None:
    """Check versions, devices, memory, kernels and network, and say what to fix.

      meshwright doctor

    The exit status is 1 if something must be fixed; what is only not installed is not that.
    """
    findings = list(examine(settings.network))
    broken = any(finding.must for finding in findings)
    with status_of(failed=broken):
        if settings.json:
            print(json.dumps([dataclasses.asdict(finding) for finding in findings]))
        else:
            console = Console()
            columns = [Column("", right=False), Column("found", right=False, least=30)]
            rows = [
                Row((one.subject, one.found), note=_note(one), style="bold red" if one.must else "")
                for one in findings
            ]
            console.print(*aligned(columns, rows, console.width), sep="\n")
            fixes = sum(finding.must for finding in findings)
            console.print(f"{fixes} to fix" if broken else "nothing must be fixed")


def examine(network: bool = True) -> Iterator[Finding]:
    """Everything that is looked at, in the order of the report."""
    yield from _versions()
    checks: list[Callable[[], Iterator[Finding]]] = [_devices, _memory, _kernels, _extras, _folders]
    for check in [*checks, *([_network] if network else [])]:
        try:
            yield from check()
        except Exception as reason:  # a broken installation fails anywhere: that is the finding
            name = check.__name__.strip("_")
            text = f"{type(reason).__name__}: {str(reason).strip().partition(chr(10))[0]}"
            yield Finding(name, text, "install the versions of constraints.txt", must=True)


def _versions() -> Iterator[Finding]:
    version = platform.python_version()
    old = sys.version_info < (3, 11)
    system = f"{platform.system()} on {platform.machine()}"
    yield Finding("python", f"{version}, {system}", "install Python 3.11 or newer" * old, old)
    packages = ("jax", "jaxlib", "numpy", "optax", "orbax")
    versions = {name: _version(name) for name in packages}
    missing = [name for name, version in versions.items() if version is None]
    texts = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    unlike = versions["jax"] != versions["jaxlib"]
    fix = "pip install -U jax jaxlib" if unlike else "pip install -e ." if missing else ""
    yield Finding("packages", texts, fix, bool(missing or unlike))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version({"orbax": "orbax-checkpoint"}.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> Iterator[Finding]:
    import jax

    devices = jax.devices()
    kinds = {device.device_kind for device in devices}
    text = f"{len(devices)} × {', '.join(sorted(kinds))}"
    chosen = os.environ.get("JAX_PLATFORMS")
    text += f" (JAX_PLATFORMS={chosen})" if chosen else ""
    fix = ""
    if devices[0].platform == "cpu":
        for extra, files in {"cuda": _GPU_FILES, "tpu": _TPU_FILES}.items():
            if any(Path(file).exists() for file in files):
                unset = "unset JAX_PLATFORMS, or " if chosen else ""
                fix = (
                    f"an accelerator is here that jax does not see: {unset}{install_command(extra)}"
                )
    else:
        try:
            chip_of_kind(devices[0].device_kind, devices[0].platform)
        except MeshwrightError as unknown:
            fix = f"{unknown}; without, MFU is not shown and --mesh auto cannot plan"
    yield Finding("devices", text, fix, must="does not see" in fix)


def _memory() -> Iterator[Finding]:
    import jax

    free, cores = free_host_memory(), os.cpu_count()
    short = free is not None and free < 4 * GIB
    yield Finding(
        "host", f"{cores} cores, {'unknown' if free is None else bytes_text(free)} of memory free",
        "end other programs: a first training run needs about 2 GiB" * short,
    )  # fmt: skip
    device = jax.devices()[0]
    stats: Any = device.memory_stats() if device.platform != "cpu" else None
    if stats:
        limit, used = stats.get("bytes_limit", 0), stats.get("bytes_in_use", 0)
        busy = used > limit / 2
        text = f"{bytes_text(limit - used)} of {bytes_text(limit)} free on each device"
        yield Finding("device memory", text, "end the process that holds it (nvidia-smi)" * busy)


def _kernels() -> Iterator[Finding]:
    import jax

    from meshwright.ops.attention import Call, Mask, explain_kernel

    where = jax.devices()[0].platform
    dtype = "float32" if where == "cpu" else "bfloat16"
    name, why = explain_kernel(Call(where, dtype, 4096, 4096, 128, Mask(), segmented=True))
    text = f"attention of 4,096 tokens in {dtype}: {name}" + (f" ({why})" if why else "")
    yield Finding("kernels", text)
    with jax.default_device(jax.local_devices()[0]):
        total = float(jax.numpy.ones((128, 128)).sum())
    yield Finding(
        "compiler", "a program compiles and runs" if total == 128 * 128 else f"1+…+1 is {total}",
        "" if total == 128 * 128 else "reinstall jaxlib", total != 128 * 128,
    )  # fmt: skip


def _extras() -> Iterator[Finding]:
    for extra, (modules, use) in _EXTRAS.items():
        there = any(importlib.util.find_spec(module) for module in modules.split())
        fix = "" if there else f"for {use}: {install_command(extra)}"
        yield Finding(f"extra {extra}", "installed" if there else "not installed", fix)


def _folders() -> Iterator[Finding]:
    folder = cache_folder("programs")
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    writable = os.access(there, os.W_OK)
    free = shutil.disk_usage(there).free
    fix = "" if writable else "set MESHWRIGHT_CACHE to a folder that can be written"
    if writable and free < 5 * GIB:
        fix = "make room, or set MESHWRIGHT_CACHE to a folder on a larger disk"
    yield Finding("cache", f"{folder}, {bytes_text(free)} free", fix, not writable)


def _network() -> Iterator[Finding]:
    own = socket.gethostname()
    try:
        address = socket.gethostbyname(own)
        yield Finding("own address", f"{own} is {address}")
    except OSError:
        fix = f"add {own} to /etc/hosts; several processes of a run need it"
        yield Finding("own address", f"{own} has no address", fix)
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    parts = urllib.parse.urlsplit(hub)
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    if proxy:
        through = urllib.parse.urlsplit(proxy).hostname or "a proxy"  # without its password
        yield Finding("hub", f"{hub} through {through}: not asked")
        return
    try:
        with socket.create_connection((str(parts.hostname), parts.port or 443), _PATIENCE_S):
            yield Finding("hub", f"{hub} can be reached")
    except OSError as reason:
        fix = "set HTTPS_PROXY; or copy models here and give their folders, with HF_HUB_OFFLINE=1"
        yield Finding("hub", f"{hub} cannot be reached: {reason}", fix)
