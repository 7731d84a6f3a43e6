"""Inject faults into real training runs of the PyTorch backend, as faults.py does for JAX.

    python benchmarks/torch_faults.py              # every fault
    python benchmarks/torch_faults.py --only kill
    python benchmarks/torch_faults.py --write      # and put the table into RESULTS.md

Two processes (dp=1,tp=2), which the command starts as torchrun does. What is checked after each
fault is what faults.py checks: exit codes, messages, intact checkpoints, the loss after resuming.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import faults
from fault_stage import Command, End, FaultError, Stage, damage, flip
from faults import GOOD, INTERRUPTED, MISTAKE, RETRY, Fault, Result
from results import here, write_section

LAYOUT = ("--backend", "torch", "--processes", "2", "--mesh", "dp=1,tp=2")
SIGTERM_CODE = 128 + signal.SIGTERM


def process(command: Command, rank: int) -> int:
    """The process id of a rank that a command started."""
    parent = command.process.pid
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in variables:
            return int(child)
    raise FaultError(f"there is no process of rank {rank}")


def signal_rank(number: int, rank: int, *more: str) -> Callable[[Stage], list[End]]:
    def inject(stage: Stage) -> list[End]:
        command = stage.start(*more, steps=10_000)
        faults._steps_done(stage, command)
        command.began = time.monotonic()
        os.kill(process(command, rank), number)
        return [command.end()]

    return inject


def signal_command(number: int) -> Callable[[Stage], list[End]]:
    def inject(stage: Stage) -> list[End]:
        command = stage.start(steps=10_000)
        faults._steps_done(stage, command)
        command.signal(number)
        return [command.end()]

    return inject


def torchrun(stage: Stage, *more: str) -> list[End]:
    """The command under torchrun, by way of a shell that knows its RANK."""
    plain = tuple(word for word in LAYOUT if word not in ("--processes", "2"))
    words = " ".join(stage.train(*more, layout=plain))
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    own = f"{sys.executable} -m meshwright.cli.main {words}"
    return [
        Command([*launch, "--no-python", "--", "sh", "-c", own], command=(sys.executable,)).end()
    ]


def damaged(change: Callable[[Stage], None]) -> Callable[[Stage], list[End]]:
    def inject(stage: Stage) -> list[End]:
        change(stage)
        return [stage.start().end()]

    return inject


def two_at_once(stage: Stage) -> list[End]:
    first = stage.start(steps=10_000)
    faults._steps_done(stage, first)
    found = stage.start(steps=10_000).end()
    first.signal(signal.SIGTERM)
    first.end()
    return [found]


def other_mesh(stage: Stage) -> list[End]:
    return [stage.start("--mesh", "dp=2,tp=1").end()]


HANG = ("--hang-timeout", "20")
FAULTS = [
    *(Fault("kill", f"SIGKILL process {rank} of 2", signal_rank(signal.SIGKILL, rank), (RETRY,),
            says=f"process {rank} (") for rank in (0, 1)),
    *(Fault("stop", f"SIGSTOP process {rank} of 2", signal_rank(signal.SIGSTOP, rank, *HANG),
            (RETRY,), says=f"process {rank} (") for rank in (0, 1)),
    Fault("stop", "SIGTERM to one process of 2", signal_rank(signal.SIGTERM, 1), (GOOD,),
          says="saved step"),
    Fault("stop", "SIGTERM to the command", signal_command(signal.SIGTERM), (SIGTERM_CODE,),
          says="saved step"),
    Fault("stop", "Ctrl-C to the command", signal_command(signal.SIGINT), (INTERRUPTED,),
          says="saved step"),
    Fault("stop", "a second command on the same run", two_at_once, (MISTAKE,),
          says="another run is writing"),
    *(Fault("corruption", f"checkpoint: {name}", damaged(change), (MISTAKE,), damaged=(4,),
            resume=("--resume-from", "2"), says="--resume-from 2")
      for name, change in {
          "a flipped bit in an array": lambda stage: damage(stage.array_file(4), flip),
          "an array cut in half": lambda stage: damage(
              stage.array_file(4), lambda b: b[: len(b) // 2]),
          "a file is missing": lambda stage: stage.array_file(4).unlink(),
          "checkpoint.json is empty": lambda stage: damage(
              faults._record(stage), lambda b: b""),
      }.items()),
    *(Fault("disagreement", f"{flag} of one process of 2",
            lambda stage, flag=flag, values=values: torchrun(stage, flag, values), (1,), says=flag)
      for flag, values in {
          "--batch": "$((4 + 4 * RANK))", "--seed": "$RANK",
          "--optimizer.learning-rate": "1e-$((3 + RANK))",
      }.items()),
    Fault("mesh", "resumed on another mesh", other_mesh, (GOOD,)),
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a word of the kind or name")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen = [one for one in FAULTS if options.only in one.title]
    results: list[Result] = []
    if not all(faults.try_faults(chosen, LAYOUT, results.append)):
        return 1
    failed = sum(bool(one.problems or one.lost) for one in results)
    said = (
        f"`python benchmarks/torch_faults.py --write`, {here()}, torch {version('torch')}: "
        f"{len(results)} faults of two processes; {len(results) - failed} ended as they must, and "
        "resumed with the loss of an undisturbed run."
    )
    print(said)
    if options.write:
        write_section("Injected faults, PyTorch", said, faults.table(results))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
