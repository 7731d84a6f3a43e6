"""Seconds that plans take, from command to answer, with all CPUs and with one.

    python benchmarks/plan_seconds.py --write       # a section of RESULTS.md

Wall time, so nothing else should run. Medians of five runs, after one that is not counted.
"""

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import time

from results import here, write_section
from start_time import HERE, command, environment

COMMANDS = (
    "plan llama-3.1-8b --on h100:8x8 --batch 512 --seq 8192",
    "plan llama-3.1-8b --on any --tokens 1T --within 30d",
    "plan qwen3-30b-a3b --on any --tokens 1T --within 30d",
    "plan llama-3.1-8b --on any --serve --requests 10 --prompt 1000 --output 200",
)
RUNS = 5


def seconds(words: list[str], cpus: set[int]) -> float:
    found = []
    for _ in range(RUNS + 1):
        start = time.monotonic()
        subprocess.run(
            command(words), env=environment(HERE.parent / "src"), capture_output=True, check=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        )  # fmt: skip
        found.append(time.monotonic() - start)
    return statistics.median(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    every = os.sched_getaffinity(0)
    lines = [f"| command | {len(every)} CPUs, s | one, s |", "|---|---|---|"]
    for text in COMMANDS:
        with_all, with_one = (seconds(shlex.split(text), cpus) for cpus in (every, {min(every)}))
        lines.append(f"| meshwright {text} | {with_all:.1f} | {with_one:.1f} |")
        print(lines[-1], file=sys.stderr)
    print("\n".join(lines))
    if options.write:
        conditions = f"`python benchmarks/plan_seconds.py`, {here()}; wall time, medians of {RUNS}."
        write_section("Seconds of a plan", conditions, lines)


if __name__ == "__main__":
    main()
