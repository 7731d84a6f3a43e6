"""The process that compiles: `python -m meshwright.proofs.child FOLDER`.

FOLDER/request.json says what; stages are printed one a line, so that the parent can show them. What
is found goes into FOLDER/result.json, with program.hlo.gz and memory.txt.gz beside it.
"""

import gzip
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


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
    from meshwright.models import model_from_dict
    from meshwright.proofs.target import absent_devices
    from meshwright.train import abstract_step, config_from_dict, training_mesh

    machine = Machine.parse(request["machine"])
    config = config_from_dict(request["config"], "request")
    devices = absent_devices(machine)
    try:
        placed = training_mesh(config, machine, devices)
        _stage("lowering")
        start = time.perf_counter()
        step = abstract_step(config, placed, model_from_dict(request["model"]))
        lowered = step.lower()
    except MeshwrightError as mistake:
        return {"mistake": str(mistake)}
    lowering = time.perf_counter() - start
    _stage("compiling")
    start = time.perf_counter()
    times = {"lowering": lowering}
    with tempfile.TemporaryDirectory() as dumped:
        options = {"xla_dump_to": dumped} if machine.is_tpu else {}
        try:
            program = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as reason:
            times["compiling"] = time.perf_counter() - start
            (folder / "message.txt").write_text(str(reason), encoding="utf-8")
            return {"times": times, "failure": str(reason), "attention": step.attention}
        times["compiling"] = time.perf_counter() - start
        _stage("reading")
        report = [path.read_text() for path in Path(dumped).glob("*memory-usage-report.txt")]
    _write(folder / "program.hlo.gz", program.as_text())
    if report:
        _write(folder / "memory.txt.gz", max(report, key=len))
    stats = program.memory_analysis()
    kinds = ("argument", "output", "alias", "temp", "generated_code")
    return {
        "times": times,
        "sizes": {kind: getattr(stats, f"{kind}_size_in_bytes") for kind in kinds},
        "attention": step.attention,
        "devices": len(devices),
        "axes": dict(placed.shape),
    }


def _write(path: Path, text: str) -> None:
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=3) as file:
        file.write(text)


def _stage(name: str) -> None:
    print(f"stage {name}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
