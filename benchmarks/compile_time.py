"""How long the step takes to compile, and a run to start, on this machine's CPU.

    python benchmarks/compile_time.py            # prints a table
    python benchmarks/compile_time.py --write    # and puts it into RESULTS.md

The 8B step (scan over layers) is lowered and compiled for 8 simulated devices: arrays are
described, none is made. The start of `meshwright train tiny` is from the command to the end of the
first step. The plan of a 405B model on 4,096 chips is `mw.plan` alone, jax and meshwright loaded:
the best of three.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import here, write_section

COMPILE_LIMIT, START_LIMIT, PLAN_LIMIT = 30.0, 15.0, 1.0  # seconds

COMPILE = """
import time
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
from pathlib import Path
from meshwright.training.config import ComputeConfig, TrainConfig
from meshwright.training.abstract_step import abstract_step

step = abstract_step(TrainConfig(
    "llama-3.1-8b", mesh="fsdp=4,tp=2", batch=8, seq=2048,
    compute=ComputeConfig(dtype="bfloat16", remat="full", attention="blockwise"),
))
start = time.perf_counter()
lowered = step.lower()
lowering = time.perf_counter() - start
lowered.compile()
print(lowering, time.perf_counter() - start - lowering)
"""


def compile_seconds() -> tuple[float, float]:
    """Lowering and compiling the step of llama-3.1-8b."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, check=True
    )
    lowering, compiling = map(float, done.stdout.split())
    return lowering, compiling


def start_seconds() -> float:
    """`meshwright train tiny` on 8 simulated devices, until the first loss is there."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "meshwright.cli.main", "train", "tiny", "--cpu-devices", "8",
            "--mesh", "fsdp=4,tp=2", "--batch", "8", "--seq", "128", "--steps", "100000",
            "--run", folder,
        ]  # fmt: skip
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step "):
                break
        seconds = time.perf_counter() - start
        process.terminate()
        process.communicate()
        assert (Path(folder) / "metrics.jsonl").exists()
        return seconds


def plan_seconds() -> float:
    """Every mesh of llama-3.1-405b on v5p:16x16x16; where axes lie is worked out anew each time."""
    from meshwright.planner import plan
    from meshwright.planner.links import placement_of

    taken = []
    for _ in range(3):
        placement_of.cache_clear()
        start = time.perf_counter()
        plan("llama-3.1-405b", "v5p:16x16x16", 2048, 8192)
        taken.append(time.perf_counter() - start)
    return min(taken)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    lowering, compiling = compile_seconds()
    start, planning = start_seconds(), plan_seconds()
    lines = [
        "| what | measured | limit |",
        "|---|---|---|",
        f"| step of llama-3.1-8b, 8 devices: lowering and compiling | {lowering:.1f} s + "
        f"{compiling:.1f} s | {COMPILE_LIMIT:.0f} s |",
        f"| `meshwright train tiny`, command to first loss | {start:.1f} s | {START_LIMIT:.0f} s |",
        f"| plan of llama-3.1-405b on 4,096 chips, 455 meshes | {planning:.2f} s | "
        f"{PLAN_LIMIT:.0f} s |",
    ]
    print("\n".join(lines))
    if options.write:
        conditions = f"`python benchmarks/compile_time.py --write`, {here()}."
        write_section("Compile and start", conditions, lines)
    if lowering + compiling > COMPILE_LIMIT or start > START_LIMIT or planning > PLAN_LIMIT:
        raise SystemExit("over the limit")


if __name__ == "__main__":
    main()
