"""CPU seconds of the first minutes: the command line, and `train tiny` from command to first loss.

    python benchmarks/start_time.py                 # tables, and start_time.json beside this file
    python benchmarks/start_time.py --label before --source ../older/src

CPU seconds are those of the process and its threads, user and system, read from /proc when a line
arrives: unlike wall time they hardly depend on what else the machine does. jax's compilation cache
is off, as on a first start.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax

HERE = Path(__file__).parent
RECORD = HERE / "start_time.json"
SHORT = [["--version"], ["--help"], ["trian"], ["plan", "--help"], ["train", "--help"]]
TRAIN = [
    "train", "tiny", "--mesh", "fsdp=4,tp=2", "--cpu-devices", "8", "--steps", "3", "--batch", "8",
    "--seq", "64",
]  # fmt: skip
TICKS = os.sysconf("SC_CLK_TCK")


def environment(source: Path) -> dict[str, str]:
    own = ("JAX_", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return kept | {"PYTHONPATH": str(source), "PYTHONUNBUFFERED": "1"}


def command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "meshwright.cli.main", *arguments]


def cpu_of_process(pid: int) -> float:
    """CPU seconds of a process that runs, from Linux."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / TICKS


def cpu_of_command(arguments: list[str], source: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command(arguments), env=environment(source), capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def lines_of_training(source: Path) -> Iterator[tuple[float, float, str]]:
    """(CPU seconds, wall seconds, line) until the first loss."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        process = subprocess.Popen(
            command([*TRAIN, "--run", f"{folder}/run"]), env=environment(source),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            yield cpu_of_process(process.pid), time.monotonic() - start, line.rstrip()
            if line.startswith("step"):
                break
        process.stdout.read()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, default=HERE.parent / "src")
    parser.add_argument("--label", default="now", help="name of this column in the record")
    options = parser.parse_args()
    source = options.source.resolve()
    for _ in range(2):  # the first time, Python compiles its files
        short = {" ".join(words): round(cpu_of_command(words, source), 2) for words in SHORT}
    for words, seconds in short.items():
        print(f"{seconds:6.2f} s  meshwright {words}", flush=True)
    lines = []
    for cpu, wall, line in lines_of_training(source):
        print(f"{cpu:6.2f} s  ({wall:.1f} s of wall time)  {line}", flush=True)
        lines.append((cpu, line))
    gaps = [after[0] - before[0] for before, after in zip([(0.0, ""), *lines], lines, strict=False)]
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record[options.label] = {
        "cpu_seconds": short | {"train tiny, to the first loss": round(lines[-1][0], 1)},
        "longest_silence_cpu_seconds": round(max(gaps), 1),
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "machine": os.uname().machine,
    }
    RECORD.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
