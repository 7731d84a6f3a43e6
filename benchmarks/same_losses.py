"""Losses of five short runs, to the bit: what a change of the code must leave as it is.

    python benchmarks/same_losses.py --write before.json     # at one revision
    python benchmarks/same_losses.py --against before.json   # at another, on the same machine

Each run trains a small model for a few steps on simulated devices, with a fixed seed. Exits with 1
if a loss or a gradient norm differs in any bit.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 6
# name → arguments of `meshwright train`
RUNS = {
    "fsdp and tp": "tiny --mesh fsdp=4,tp=2 --batch 8 --seq 64",
    "context parallelism": "tiny --mesh fsdp=2,sp=4 --batch 4 --seq 128 --context-parallel ring",
    "micro-batches, remat, sequence parallelism": (
        "tiny --mesh dp=2,fsdp=2,tp=2 --batch 16 --seq 64 --accumulation 2 --compute.remat full "
        "--compute.sequence-parallel"
    ),
    "muon, unrolled, padded vocabulary": (
        "tiny --mesh fsdp=2,tp=4 --batch 8 --seq 64 --optimizer.name muon --compute.layers unroll "
        "--override vocab=321"
    ),
    "t5": "t5-tiny --mesh fsdp=4,tp=2 --batch 8 --seq 64",
}


def losses(arguments: str, folder: Path) -> list[list[str]]:
    """The loss and the gradient norm of each step, in hexadecimal."""
    words = [*arguments.split(), "--steps", str(STEPS), "--cpu-devices", "8", "--run", str(folder)]
    subprocess.run(
        [sys.executable, "-m", "meshwright.cli.main", "train", *words],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [
        [float(one[name]).hex() for name in ("loss", "grad_norm")]
        for one in records
        if "loss" in one
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, arguments) in enumerate(RUNS.items()):
            found[name] = losses(arguments, Path(folder) / str(number))
            print(
                f"{name}: {float.fromhex(found[name][-1][0]):.6f} after {STEPS} steps", flush=True
            )
    if options.write is not None:
        options.write.write_text(json.dumps(found, indent=1))
    if options.against is None:
        return 0
    before = json.loads(options.against.read_text())
    differ = [name for name in RUNS if found[name] != before.get(name)]
    print(
        f"bit-equal: {len(RUNS) - len(differ)} of {len(RUNS)}{f'; not {differ}' if differ else ''}"
    )
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
