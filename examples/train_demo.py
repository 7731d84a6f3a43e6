"""Train, stop, go on on another mesh, and write text: `python examples/train_demo.py`.

A model of a million parameters learns from the stories in the package, on 8 simulated devices.
After two thirds of the steps the run is stopped; the same command with another mesh goes on.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

SETTINGS = [
    "tiny", "--data", "embedded", "--batch", "8", "--seq", "128", "--cpu-devices", "8",
    "--optimizer.name", "muon", "--optimizer.learning-rate", "1e-2",
    "--optimizer.warmup-steps", "10",
    "--eval.sequences", "32", "--eval.every", "1000",
]  # fmt: skip


def meshwright(*arguments: str) -> None:
    print(f"\n$ meshwright {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "meshwright.cli.main", *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", default="demo-run", help="the run's folder")
    parser.add_argument("--steps", type=int, default=240)
    options = parser.parse_args()
    if (Path(options.run) / "checkpoints").exists():
        raise SystemExit(f"{options.run} holds a run already; remove it, or give --run another")
    start = time.monotonic()
    run = [*SETTINGS, "--steps", str(options.steps), "--run", options.run]
    meshwright("train", *run, "--mesh", "fsdp=4,tp=2", "--stop-at", str(options.steps * 2 // 3))
    meshwright("train", *run, "--mesh", "dp=2,fsdp=2,tp=2")
    meshwright(
        "generate", options.run, "--prompt", "The old ", "--max-new", "200",
        "--temperature", "0.5", "--seed", "1",
    )  # fmt: skip
    print(f"\n{time.monotonic() - start:.0f} s in all; the curves: {options.run}/run.html")


if __name__ == "__main__":
    main()
