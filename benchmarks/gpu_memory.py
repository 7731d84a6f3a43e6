"""Memory of a training step on one GPU: planned, compiled, and measured.

    python benchmarks/gpu_memory.py                  # on the GPU: prints a table
    python benchmarks/gpu_memory.py --write          # and puts it into RESULTS.md
    python benchmarks/gpu_memory.py --absent         # without a GPU: what its compiler says here
    python benchmarks/gpu_memory.py --largest        # without a GPU: the largest batches of 8B

Each case is the step that `meshwright train` would run. *Planned* is the closed form of
meshwright.plan, *compiled* what the compiler counts (arguments + temporaries + outputs - aliases),
*measured* the allocator's peak over nine steps. Each case runs in its own process.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from results import write_section

GIB = 2**30
RECORD = Path(__file__).with_name("gpu_memory.json")
CASES: list[dict[str, Any]] = [
    {"model": "llama-3.2-1b", "batch": 8, "seq": 2048, "remat": "none"},
    {"model": "llama-3.2-1b", "batch": 4, "seq": 8192, "remat": "none"},
    {"model": "llama-3.2-1b", "batch": 16, "seq": 2048, "remat": "full"},
    {"model": "llama-3.2-1b", "batch": 32, "seq": 2048, "remat": "mlp", "accumulation": 2},
    {"model": "llama-3.2-3b", "batch": 4, "seq": 4096, "remat": "elementwise"},
    {"model": "qwen3-1.7b", "batch": 8, "seq": 4096, "remat": "mlp"},
    {"model": "qwen2.5-1.5b", "batch": 16, "seq": 2048, "remat": "full", "optimizer": "lion"},
    {"model": "llama-3.1-8b", "batch": 2, "seq": 4096, "remat": "full", "param_dtype": "bfloat16"},
    {"model": "llama-3.1-8b", "batch": 8, "seq": 4096, "remat": "full", "param_dtype": "bfloat16"},
    {"model": "llama-3.1-8b", "batch": 8, "seq": 4096, "remat": "full"},
]

LARGEST = {"model": "llama-3.1-8b", "seq": 4096}


def config_of(case: dict[str, Any]) -> Any:
    from meshwright.training.config import ComputeConfig, TrainConfig
    from meshwright.training.optimizer import OptimizerConfig

    return TrainConfig(
        case["model"], mesh="dp=1", batch=case["batch"], seq=case["seq"],
        accumulation=case.get("accumulation", 1),
        optimizer=OptimizerConfig(
            name=case.get("optimizer", "adamw"), moments=case.get("moments", "auto")
        ),
        compute=ComputeConfig(
            remat=case["remat"], param_dtype=case.get("param_dtype", "float32"),
            layers=case.get("layers", "auto"),
        ),
    )  # fmt: skip


def planned(case: dict[str, Any], machine: str) -> dict[str, float]:
    """Bytes and seconds by the plan."""
    from meshwright.machines import Machine
    from meshwright.planner import StepModel, Workload, memory
    from meshwright.planner.time import step_time

    on, config = Machine.parse(machine), config_of(case)
    step = StepModel(Workload.of(config, on))
    return {"planned": memory(step).total, "planned_seconds": step_time(step).step}


def measured(case: dict[str, Any]) -> dict[str, Any]:
    """On the GPU that is here."""
    import jax
    import numpy as np

    from meshwright.machines import Machine
    from meshwright.training.abstract_step import abstract_step
    from meshwright.training.optimizer import make_optimizer
    from meshwright.training.state import new_state

    config = config_of(case)
    step = abstract_step(config)
    compiled = step.lower().compile()
    stats = compiled.memory_analysis()
    counted = (
        stats.argument_size_in_bytes
        + stats.temp_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
    )
    optimizer, _ = make_optimizer(config.optimizer, config.steps, step.arrays)
    state = new_state(step.arrays, step.state, optimizer, step.mesh)
    rng = np.random.default_rng(0)
    batch = {
        name: jax.device_put(rng.integers(1, 1000, one.shape, dtype=np.int32), one.sharding)
        for name, one in step.batch.items()
    }
    batch["segments"] = jax.device_put(
        np.ones(step.batch["segments"].shape, np.int32), step.batch["segments"].sharding
    )
    making = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    seconds = []
    for _ in range(9):
        start = time.perf_counter()
        state, report = compiled(state, batch)
        float(report["loss"])
        seconds.append(time.perf_counter() - start)
    peak = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    machine = str(Machine.here())
    return {
        "compiled": counted, "measured": peak, "making": making, "machine": machine,
        "seconds": statistics.median(seconds[3:]),
        "device": jax.devices()[0].device_kind, "jax": jax.__version__,
        **planned(case, machine),
    }  # fmt: skip


def absent(case: dict[str, Any], machine: str) -> Any:
    """What the GPU's compiler counts here, without it: a Footprint."""
    from meshwright.proofs import prove

    proof = prove(config_of(case), machine)
    assert proof.footprint is not None
    return proof.footprint


def words(case: dict[str, Any]) -> str:
    extras = [
        f"{name} {case[name]}"
        for name in ("accumulation", "optimizer", "param_dtype")
        if name in case
    ]
    return ", ".join(
        [f"{case['model']} {case['batch']}×{case['seq']}, remat {case['remat']}", *extras]
    )


def on_gpu(options: argparse.Namespace) -> None:
    """Every case measured on the GPU that is here; the numbers into a file, if one is named."""
    found = []
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
    for number, case in enumerate(CASES):
        command = [sys.executable, __file__, "--case", str(number)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            print(f"{words(case)}: failed: {done.stderr[-1500:]}", flush=True)
            continue
        found.append({"case": case, **json.loads(done.stdout.splitlines()[-1])})
        print(row(found[-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(found))
    if options.write and found:
        write(found)


def without_gpu(options: argparse.Namespace) -> None:
    """Every case compiled for a GPU that is not here, beside what the plan says."""
    import jax

    found = []
    for case in CASES:
        one = {"case": case, "absent": absent(case, "h200:1").total, **planned(case, "h200:1")}
        found.append(one)
        print(absent_row(one), flush=True)
    if options.write:
        kept = [{"case": one["case"], "compiled": one["absent"]} for one in found]
        RECORD.write_text(json.dumps({"jax": jax.__version__, "steps": kept}, indent=1) + "\n")
        conditions = (
            f"`python benchmarks/gpu_memory.py --absent --write`, {datetime.date.today()}, jax "
            f"{jax.__version__}, no GPU: the steps that `train` runs on one H200 by default, whose "
            "layers are unrolled, as XLA for an H200 compiles them."
        )
        lines = ["| case | planned | compiled | planned over compiled |", "|---|---|---|---|"]
        lines += map(absent_row, found)
        write_section("Memory of unrolled layers on one GPU", conditions, lines)


def absent_row(one: dict[str, Any]) -> str:
    sizes = [f"{one[kind] / GIB:.2f} GiB" for kind in ("planned", "absent")]
    ratio = one["planned"] / one["absent"]
    return f"| {words(one['case'])} | {' | '.join(sizes)} | {ratio:.3f} |"


def largest(options: argparse.Namespace) -> None:
    """The largest batch of 8B in one micro-batch on one H200, planned and compiled."""
    import jax

    from meshwright.machines import Machine

    limit = Machine.parse("h200:1").usable_memory
    lines = [
        "| remat | layers | moments | planned | compiled | memory then | on the host |",
        "|---|---|---|---|---|---|---|",
    ]
    for remat, layers in (("full", "scan"), ("offload", "scan"), ("full", "unroll")):
        for moments in ("float32", "bfloat16", "int8"):
            case = {**LARGEST, "moments": moments, "remat": remat, "layers": layers}

            def compiled(batch: int, case: dict[str, Any] = case) -> Any:
                return absent({**case, "batch": batch}, "h200:1")

            def count(batch: int, case: dict[str, Any] = case) -> float:
                return planned({**case, "batch": batch}, "h200:1")["planned"]

            by_plan = most(lambda batch: count(batch) <= limit)
            by_compiler = most(lambda batch: compiled(batch).total <= limit, start=by_plan)
            found = compiled(by_compiler)
            host = found.kinds.get("beside it, in the host's memory", 0)
            lines.append(
                f"| {remat} | {layers} | {moments} | {by_plan} | {by_compiler} | "
                f"{found.total / GIB:.1f} GiB | {host / GIB:.0f} GiB |"
            )
            print(lines[-1], flush=True)
    if options.write:
        conditions = (
            f"`python benchmarks/gpu_memory.py --largest --write`, {datetime.date.today()}, jax "
            f"{jax.__version__}, no GPU: {LARGEST['model']}, sequences of {LARGEST['seq']:,} "
            f"tokens, AdamW, one micro-batch, parameters in float32, {limit / GIB:.1f} GiB. "
            "*Compiled*: the largest batch whose step XLA for an H200 puts into that, found by "
            "bisection; no step was run. `train` unrolls these 32 layers by default, and has a "
            "loop with offload. Near the limit XLA computes more activations again by itself, "
            "which the plan does not count with."
        )
        write_section("Largest batch of 8B on one H200", conditions, lines)


def most(fits: Callable[[int], bool], start: int = 8) -> int:
    """The largest batch up to which all fit: from a guess, by doubled steps, then bisection."""
    step, low, high = 1, 0, start
    if fits(start):
        low = start
        while fits(low + step):
            low, step = low + step, 2 * step
        high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def row(one: dict[str, Any]) -> str:
    kinds = ("planned", "compiled", "measured")
    sizes = [f"{one[kind] / GIB:.3f} GiB" if kind in one else "" for kind in kinds]
    ratios = [
        f"{one[kind] / one['measured']:.4f}" if {kind, "measured"} <= one.keys() else ""
        for kind in ("planned", "compiled")
    ]
    if "seconds" in one:
        ratios.append(f"{1e3 * one['seconds']:.0f} ms")
        ratios.append(f"{one['planned_seconds'] / one['seconds']:.2f}")
    return f"| {words(one['case'])} | {' | '.join(sizes + ratios)} |"


def write(found: list[dict[str, Any]]) -> None:
    conditions = (
        f"`python benchmarks/gpu_memory.py --write`, {datetime.date.today()}, one "
        f"{found[0]['device']}, jax {found[0]['jax']}. Memory, then two columns of it "
        "over the measured peak; the time of a step, and planned over measured."
    )
    lines = [
        "| case | planned | compiled | measured | planned | compiled | step | planned |",
        "|---|---|---|---|---|---|---|---|",
        *map(row, found),
    ]
    write_section("Memory of a step on one GPU", conditions, lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--absent", action="store_true")
    parser.add_argument("--largest", action="store_true")
    parser.add_argument("--out", type=Path, help="a file for the numbers")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(measured(CASES[options.case])))
    elif options.largest:
        largest(options)
    elif options.absent:
        without_gpu(options)
    else:
        on_gpu(options)


if __name__ == "__main__":
    main()
