"""Compile what train or serve would run, for a machine that is not here, and read what came of it.

proof = prove(TrainConfig("llama-3.1-8b", mesh="fsdp=64", batch=64, seq=8192), "v5p:4x4x4")
proof.fits, proof.footprint.total
"""

import contextlib
import dataclasses
import functools
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError, explained
from meshwright.interrupt import before_end
from meshwright.launch import cache_folder
from meshwright.machines import CHIPS, Machine, check_slice
from meshwright.ops import switched_on
from meshwright.present import Column, Row, bytes_text, table_html, text_html
from meshwright.proofs.cache import request_key
from meshwright.proofs.footprint import Footprint, OutOfMemory, footprint, out_of_memory
from meshwright.proofs.target import check_extra, child_environment, compiler_versions

Progress = Callable[[str, float], None]  # the stage in words, and seconds since the start


@dataclasses.dataclass(frozen=True, repr=False)
class Proof:
    """What the compiler made of a step."""

    machine: Machine
    mesh: str
    compiler: str
    compiled_on: str  # the architecture of the machine that compiled it: x86_64
    date: str  # when
    times: Mapping[str, float]  # seconds of lowering and compiling
    footprint: Footprint | None  # None: it did not compile
    out_of_memory: OutOfMemory | None
    attention: str | None  # how it is split over sp, and a kernel that is slow, in words
    folder: Path  # program.hlo.gz, memory.txt.gz, message.txt
    cached: bool
    sizes: Mapping[str, int] | None = None  # jax's memory_analysis, in bytes

    @property
    def fits(self) -> bool:
        return self.footprint is not None and self.footprint.fits

    def __repr__(self) -> str:
        """The verdict; every number is a field."""
        used = self.footprint or self.out_of_memory
        needed = "" if used is None else _gib(used) + ", "
        verdict = "fits" if self.fits else "does not fit"
        return f"Proof({self.mesh} on {self.machine}: {verdict}, {needed}by {self.compiler})"

    def _repr_html_(self) -> str:
        used = self.footprint
        if used is None:
            return text_html(repr(self))
        kinds = [Row((kind, bytes_text(size))) for kind, size in used.kinds.items() if size]
        buffers = [Row((buffer.arrays, bytes_text(buffer.bytes))) for buffer in used.buffers[:6]]
        tables = {"of a device": kinds, "largest buffers": buffers}
        return text_html(repr(self)) + "".join(
            table_html([Column(title, right=False), Column("bytes")], lines)
            for title, lines in tables.items() if lines
        )  # fmt: skip

    @functools.cached_property
    def text(self) -> str:
        """The compiled program."""
        return _read(self.folder / "program.hlo.gz")


_EXAMPLE = "mw.prove(mw.TrainConfig('tiny', mesh='fsdp=8', batch=8), on='cpu:8')"


@explained(_EXAMPLE)
def prove(
    config: Any,
    on: Machine | str,
    *,
    model: Any = None,
    cache: Path | bool = True,
    progress: Progress | None = None,
) -> Proof:
    """Compile `config`'s step (a TrainConfig) for a machine; `model` replaces the one it names.

    `cache`: where results are kept, True for the usual place, False not to look there. A step that
    does not fit is a Proof that says so; a mistake or any other failure is a MeshwrightError.
    """
    from meshwright.models import model_config, model_to_dict
    from meshwright.training import TrainConfig, config_to_dict

    if not isinstance(config, TrainConfig):
        raise MeshwrightError(
            f"prove takes a TrainConfig or a function with its arguments, not {config!r:.60}; "
            f"write {_EXAMPLE}"
        )
    machine = Machine.parse(on)
    check_slice(machine.chip, machine.shape, machine.slices, str(machine))
    check_extra(machine)
    model = model_config(config.model) if model is None else model
    _check(config, model, machine)
    settings = config_to_dict(config)
    for name in _WITHOUT_EFFECT:
        settings.pop(name, None)
    request: dict[str, Any] = {
        "config": settings,
        "model": model_to_dict(model),
    }
    return proved(request, machine, config.mesh, cache, progress)


def prove_serving(
    step: Any,
    model: Any,
    on: Machine | str,
    *,
    cache: Path | bool = True,
    progress: Progress | None = None,
) -> dict[str, Proof]:
    """Compile the decode and the prefill step of an engine (a serve.ServedStep) for a machine.

    `model` is a model's config; `cache` and failures are as in `prove`.
    """
    from meshwright.models import model_to_dict

    machine = Machine.parse(on)
    check_slice(machine.chip, machine.shape, machine.slices, str(machine))
    check_extra(machine)
    request = {
        "serve": dataclasses.asdict(step),
        "model": model_to_dict(model),
    }
    return {
        part: proved(request | {"part": part}, machine, step.mesh, cache, progress)
        for part in ("decode", "prefill")
    }


def proved(
    request: dict[str, Any],
    machine: Machine,
    mesh: str,
    cache: Path | bool,
    progress: Progress | None,
    files: Mapping[str, bytes] | None = None,
) -> Proof:
    """What the compiler made of a request, or what is kept of it; `files` go beside the request."""
    is_known = CHIPS.get(machine.chip.name) == machine.chip  # else its figures go with it
    request["machine"] = str(machine) if is_known else dataclasses.asdict(machine)
    if machine.chip.platform == "gpu":
        request["own_kernels"] = switched_on()
    compiler = compiler_versions(machine)
    place = cache if isinstance(cache, Path) else cache_folder("prove")
    folder = place / request_key(request, compiler)
    known = cache is not False and (folder / "result.json").exists()
    if not known:
        _compile(request, machine, folder, progress, files or {})
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    if "mistake" in result:
        raise MeshwrightError(result["mistake"])
    return _proof(result, machine, mesh, compiler, folder, known)


def _check(config: Any, model: Any, machine: Machine) -> None:
    """Sizes against the mesh, before a compiler is started."""
    from meshwright.models import override
    from meshwright.training import accepted_meshes, check_sizes, choose_rules, training_mesh

    model = override(model, config.override, config.seq)
    shape = training_mesh(config, machine, accepts=accepted_meshes(config, model)).shape
    check_sizes(config, model, choose_rules(config, model), shape)


# of a run's settings, those that do not change what is compiled
_WITHOUT_EFFECT = (
    "run", "data", "checkpoint", "eval", "log", "stop_at", "hang_timeout", "coordinator",
    "processes", "process_id", "cpu_devices", "seed", "max_skipped", "init_from",
)  # fmt: skip


def _proof(
    result: dict[str, Any], machine: Machine, mesh: str, compiler: str, folder: Path, cached: bool
) -> Proof:
    if "options" in result:
        compiler += (
            f" ({', '.join(f'{name}={value}' for name, value in result['options'].items())})"
        )
    made = machine, mesh, compiler, result["compiled_on"], result["date"]
    if "failure" in result:
        exhausted = out_of_memory(result["failure"])
        if exhausted is None:
            raise MeshwrightError(
                f"the compiler for '{machine}' failed: {digest(result['failure'])} The whole "
                f"message is in {folder / 'message.txt'}"
            )
        return Proof(*made, result["times"], None, exhausted, result["attention"], folder, cached)
    report = folder / "memory.txt.gz"
    used = footprint(machine, result["sizes"], _read(report) if report.exists() else None)
    return Proof(
        *made, result["times"], used, None, result["attention"], folder, cached, result["sizes"]
    )


def digest(message: str) -> str:
    """The first lines of a compiler's message that say something."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    first = lines[0] if lines else "it said nothing"
    return first[:400] + ("…" if len(first) > 400 else "") + ("" if first.endswith(".") else ".")


def _compile(
    request: dict[str, Any], machine: Machine, folder: Path, progress: Progress | None,
    files: Mapping[str, bytes],
) -> None:  # fmt: skip
    """In a process of its own: its libraries are noisy, and may end it."""
    start = time.perf_counter()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        raise MeshwrightError(
            f"the cache {str(folder.parent)!r} cannot be written: {reason.strerror}; set "
            "MESHWRIGHT_CACHE to a folder that can"
        ) from None
    with contextlib.ExitStack() as stack:
        work = stack.enter_context(tempfile.TemporaryDirectory(dir=folder.parent))
        stack.enter_context(before_end(lambda: shutil.rmtree(work, ignore_errors=True)))
        scratch = Path(work) / "found"
        scratch.mkdir()
        (scratch / "request.json").write_text(json.dumps(request), encoding="utf-8")
        for name, content in files.items():
            (scratch / name).write_bytes(content)
        with (scratch / "noise.txt").open("w") as noise:
            command = [sys.executable, "-m", "meshwright.proofs.child", str(scratch)]
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=noise, text=True,
                env=child_environment(machine),
            ) as child:  # fmt: skip
                stack.enter_context(before_end(child.kill))
                try:
                    assert child.stdout is not None
                    for line in child.stdout:
                        if progress is not None and line.startswith("stage "):
                            progress(line.split(" ", 1)[1].strip(), time.perf_counter() - start)
                    status = child.wait()
                finally:
                    if child.poll() is None:
                        child.kill()
        if status or not (scratch / "result.json").exists():
            kept = folder.parent / f"{folder.name}.failed.txt"
            shutil.copy(scratch / "noise.txt", kept)
            lines = kept.read_text(errors="replace").strip().splitlines()
            message = lines[-1][:300] if lines else f"exit status {status}"
            raise MeshwrightError(
                f"compiling for '{machine}' ended with status {status}: {message}. Its output is "
                f"in {kept}"
            )
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)


def _gib(used: Footprint | OutOfMemory) -> str:
    needed = used.total if isinstance(used, Footprint) else used.needed
    return f"{bytes_text(needed)} of {bytes_text(used.limit)} a device"


def _read(path: Path) -> str:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return file.read()
