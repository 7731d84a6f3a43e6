"""How long the steps of a server take under load, by what they compute.

    python benchmarks/serve_steps.py steps.json serve /tmp/random-8b --engine.max-batch 64 &
    python benchmarks/serve_online.py http://127.0.0.1:8000 --rate 20
    python benchmarks/serve_steps.py steps.json        # a table, once the server has been stopped

The first command runs `meshwright` with the words after the file, and notes when the tokens of each
step were read. A step that follows another takes from the end of that to its own.
"""

import atexit
import itertools
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

BUSY_S = 0.02  # a step that is waited for later than this after the one before did not follow it


def trace(file: str, words: list[str]) -> None:
    """Run a command, and write what its engine read: decode tokens, prompts, tokens, from, to."""
    from meshwright.cli.commands import run
    from meshwright.serving import engine

    rows: list[tuple[int, int, int, float, float]] = []
    read = engine.Engine._read

    def noted(self: Any, flight: Any) -> None:
        started = time.perf_counter()
        read(self, flight)
        prompts, tokens = flight.step.shape if flight.step.chunks else (0, 0)
        rows.append((len(flight.step.decode), prompts, tokens, started, time.perf_counter()))

    engine.Engine._read = noted  # type: ignore[method-assign]
    atexit.register(lambda: Path(file).write_text(json.dumps(rows)))
    run(words)


def table(rows: list[list[float]]) -> list[str]:
    """Markdown: milliseconds of each kind of step."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for (*_, before), (decode, prompts, tokens, started, ended) in itertools.pairwise(rows):
        kind = f"with a chunk of {prompts:.0f} × {tokens:.0f}"
        if not prompts:
            kind = f"decode of up to {2 ** max(1, int(np.ceil(np.log2(decode or 1))))}"
        if started < before + BUSY_S:
            seconds[kind].append(ended - before)
    lines = ["| step | number | p50, ms | p90, ms |", "|---|---|---|---|"]
    for kind, values in sorted(seconds.items()):
        half, most = (1000 * float(np.percentile(values, p)) for p in (50, 90))
        lines.append(f"| {kind} | {len(values):,} | {half:.2f} | {most:.2f} |")
    return lines


def main() -> None:
    file, *words = sys.argv[1:] or ["--help"]
    if file.startswith("-"):
        print(__doc__)
    elif words:
        trace(file, words)
    else:
        print("\n".join(table(json.loads(Path(file).read_text()))))


if __name__ == "__main__":
    main()
