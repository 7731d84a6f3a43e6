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

# a plan takes what the partitioner made; what follows need not be fast
PARTITIONED = {
    "xla_dump_hlo_pass_re": "spmd-partitioning",
    "xla_backend_optimization_level": 0,
}


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    result = compiled(request, folder)
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


def compiled(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Lower and compile what the request says; a failure is a result too."""
    _stage("starting")
    import jax

    from meshwright.errors import MeshwrightError
    from meshwright.proofs.target import absent_devices

    machine = _machine(request["machine"])
    devices = absent_devices(machine)
    _stage("lowering")
    start = time.perf_counter()
    try:
        if "program" in request:
            lowered, placed, attention = _any_program(request, machine, devices, folder)
        else:
            lower = _served if "serve" in request else _trained
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
        if request.get("partitioned"):
            options = PARTITIONED | {"xla_dump_to": dumped}
            jax.config.update("jax_enable_compilation_cache", False)  # which would dump nothing
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
        text = _partitioned(Path(dumped)) if request.get("partitioned") else program.as_text()
    _write(folder / "program.hlo.gz", text)
    if report:
        _write(folder / "memory.txt.gz", max(report, key=len))
    stats = program.memory_analysis()
    kinds = ("argument", "output", "alias", "temp", "generated_code", "host_temp")
    return made | {
        "times": times,
        "sizes": {kind: getattr(stats, f"{kind}_size_in_bytes") for kind in kinds},
        "attention": attention,
        "devices": len(devices),
        "axes": {} if placed is None else dict(placed.shape),
    }


def _machine(said: Any) -> Any:
    """In text, or the figures of one whose chip is not the catalogue's."""
    import msgspec

    from meshwright.machines import Machine

    return Machine.parse(said) if isinstance(said, str) else msgspec.convert(said, Machine)


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


def _any_program(
    request: dict[str, Any], machine: Any, devices: list[Any], folder: Path
) -> tuple[Any, Any, None]:
    """A program that jax.export made, with its arguments on the machine's mesh."""
    import pickle

    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from meshwright.meshes import mesh

    exported = pickle.loads((folder / "program.pickle").read_bytes())  # by the parent, just now
    (folder / "program.pickle").unlink()
    placed = None
    shardings: list[Any] = [jax.sharding.SingleDeviceSharding(devices[0])] * len(request["specs"])
    if request["mesh"]:
        placed = mesh(request["mesh"], machine, devices, axis_types=request["axis_types"])
        shardings = [
            NamedSharding(
                placed,
                PartitionSpec(*(tuple(axes) if isinstance(axes, list) else axes for axes in spec)),
            )
            for spec in request["specs"]
        ]
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, shardings, strict=True)
    ]
    jitted = jax.jit(exported.call, donate_argnums=tuple(request["donated"]))
    lowered = jitted.trace(*arguments).lower(lowering_platforms=tuple(exported.platforms))
    return lowered, placed, None


def _partitioned(dumped: Path) -> str:
    """What the partitioner made; for one device there is nothing to partition."""
    for which in ("*.after_spmd-partitioning*.txt", "*.before_optimizations.txt"):
        texts = [path.read_text() for path in dumped.glob(which)]
        if texts:
            return max(texts, key=len)
    raise RuntimeError(f"no partitioned program among {sorted(dumped.iterdir())}")


def _write(path: Path, text: str) -> None:
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=3) as file:
        file.write(text)


def _stage(name: str) -> None:
    print(f"stage {name}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
