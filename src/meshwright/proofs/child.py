"""The process that compiles: `python -m meshwright.proofs.child FOLDER`.

FOLDER/request.json says what; stages are printed one a line, so that the parent can show them. What
is found goes into FOLDER/result.json, with program.hlo.gz and memory.txt.gz beside it.
"""

import contextlib
import datetime
import gzip
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# XLA gives some matmuls to Triton, and on a GPU that is here drops the tilings that fail when it
# times them; for one that is not here nothing is timed, and a tiling that fails ends the compile
WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    result = compiled(request, folder)
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


def compiled(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Lower and compile what the request says; a failure is a result too."""
    _stage("starting")
    import jax

    from meshwright.errors import MeshwrightError
    from meshwright.machines import Machine
    from meshwright.proofs.target import absent_devices

    machine = Machine.parse(request["machine"])
    devices = absent_devices(machine)
    _stage("lowering")
    start = time.perf_counter()
    lower = _served if "serve" in request else _trained
    try:
        lowered, placed, attention = lower(request, machine, devices)
    except MeshwrightError as mistake:
        return {"mistake": str(mistake)}
    lowering = time.perf_counter() - start
    _stage("compiling")
    start = time.perf_counter()
    times = {"lowering": lowering}
    made: dict[str, Any] = {"compiled_on": platform.machine(), "date": str(datetime.date.today())}
    with tempfile.TemporaryDirectory() as dumped:
        options: dict[str, Any] = {"xla_dump_to": dumped} if machine.is_tpu else {}
        try:
            program = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as reason:
            failure = str(reason)
            program = None
            if machine.chip.platform == "gpu" and "INTERNAL" in failure:
                made["options"] = WITHOUT_TRITON
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    program = lowered.compile(compiler_options=WITHOUT_TRITON)
            if program is None:
                times["compiling"] = time.perf_counter() - start
                (folder / "message.txt").write_text(failure, encoding="utf-8")
                return made | {"times": times, "failure": failure, "attention": attention}
        times["compiling"] = time.perf_counter() - start
        _stage("reading")
        report = [path.read_text() for path in Path(dumped).glob("*memory-usage-report.txt")]
    _write(folder / "program.hlo.gz", program.as_text())
    if report:
        _write(folder / "memory.txt.gz", max(report, key=len))
    stats = program.memory_analysis()
    kinds = ("argument", "output", "alias", "temp", "generated_code", "host_temp")
    return made | {
        "times": times,
        "sizes": {kind: getattr(stats, f"{kind}_size_in_bytes") for kind in kinds},
        "attention": attention,
        "devices": len(devices),
        "axes": dict(placed.shape),
    }


def _trained(request: dict[str, Any], machine: Any, devices: list[Any]) -> tuple[Any, Any, Any]:
    from meshwright.models import model_from_dict
    from meshwright.training import abstract_step, config_from_dict, training_mesh

    config = config_from_dict(request["config"], "request")
    placed = training_mesh(config, machine, devices)
    step = abstract_step(config, placed, model_from_dict(request["model"]))
    return step.lower(), placed, step.attention


def _served(request: dict[str, Any], machine: Any, devices: list[Any]) -> tuple[Any, Any, Any]:
    from meshwright.meshes import MeshSpec, mesh
    from meshwright.models import model_from_dict
    from meshwright.serving import ServedStep

    step = ServedStep(**request["serve"])
    spec = MeshSpec.parse(step.mesh).with_standard_axes()
    placed = mesh(spec, machine, devices, axis_types="explicit")
    lowered, kernel = step.lower(model_from_dict(request["model"]), placed, request["part"])
    return lowered, placed, f"paged, by the kernel {kernel}"


def _write(path: Path, text: str) -> None:
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=3) as file:
        file.write(text)


def _stage(name: str) -> None:
    print(f"stage {name}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
