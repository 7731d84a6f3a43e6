"""Inject faults into real training runs; report what was lost and the time until the error.

    python benchmarks/faults.py              # every fault
    python benchmarks/faults.py --only disk  # those whose kind or name contains a word
    python benchmarks/faults.py --write      # and put the table into RESULTS.md

What happened at each fault is kept in faults.json, so that some of them can be tried again.

Each fault works on a copy of a run with checkpoints of steps 2 and 4. It must end with the
expected exit code and without a traceback. Afterwards the newest checkpoint that was ever complete,
and every other one that is there, must be intact (each array is read and compared with its
fingerprint), except those that the fault itself damaged. Then the run is resumed, and its loss at
step 6 must be that of an undisturbed run.
"""

import argparse
import contextlib
import dataclasses
import json
import shutil
import signal
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from fault_stage import (
    ONE,
    Command,
    End,
    FaultError,
    Stage,
    damage,
    fill,
    flip,
    intact,
    small_disk,
)
from results import origin, origins, write_section

GOOD, MISTAKE, RETRY, INTERRUPTED = 0, 2, 75, 130
KILLED = -signal.SIGKILL
SAVED = (2, 4)  # steps of the checkpoints that a stage begins with
RECORD = Path(__file__).with_name("faults.json")


@dataclasses.dataclass(frozen=True)
class Fault:
    kind: str
    name: str
    inject: Callable[[Stage], list[End]]
    codes: tuple[int, ...]  # how a command may end
    damaged: tuple[int, ...] = ()  # checkpoints that the fault itself destroys
    resume: tuple[str, ...] | None = ()  # settings to resume with; None: nothing to resume
    says: str = ""  # what the message must contain
    once: bool = False  # one of the processes says it, for all
    signalled: tuple[int, ...] = ()  # how the process that got the signal may end

    @property
    def title(self) -> str:
        return f"{self.kind}: {self.name}"


FAULTS: list[Fault] = []


def fault(kind: str, name: str, *codes: int, **more: object) -> Callable[..., object]:
    def add(inject: Callable[[Stage], list[End]]) -> Callable[[Stage], list[End]]:
        FAULTS.append(Fault(kind, name, inject, codes, **more))  # type: ignore[arg-type]
        return inject

    return add


# ---- kill


def _kill_when(
    condition: Callable[[Stage, Command], None], cached: bool = True
) -> Callable[[Stage], list[End]]:
    def inject(stage: Stage) -> list[End]:
        command = stage.start(steps=10_000, cached=cached)
        condition(stage, command)
        command.signal(signal.SIGKILL)
        return [command.end()]

    return inject


def _while_saving(delay: float) -> Callable[[Stage, Command], None]:
    def condition(stage: Stage, command: Command) -> None:
        command.wait_for(lambda: max(stage.complete()) >= 8)
        command.wait_for(lambda: any(stage.checkpoints.glob(".saving-*")))
        time.sleep(delay)

    return condition


def _steps_done(stage: Stage, command: Command, wanted: int = 9) -> None:
    def there() -> bool:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            return max(stage.losses(), default=0) >= wanted
        return False

    command.wait_for(there)


for moment, condition in {
    "after 0.3 s": lambda stage, command: time.sleep(0.3),
    "while it compiles": lambda stage, command: command.wait_for_text("batch 4"),
    "between steps": _steps_done,
    "while it saves": _while_saving(0.0),
    "20 ms into a save": _while_saving(0.02),
    "60 ms into a save": _while_saving(0.06),
}.items():
    kill = _kill_when(condition, cached="compiles" not in moment)
    fault("kill", f"SIGKILL {moment}", KILLED)(kill)


@fault("kill", "SIGKILL while it evaluates", KILLED, resume=("--eval.sequences", "8"))
def _kill_evaluation(stage: Stage) -> list[End]:
    shutil.rmtree(stage.run)  # evaluation sets data aside: a run of its own
    command = stage.start("--eval.sequences", "8", "--eval.every", "1", steps=10_000)
    command.wait_for_text("eval loss")
    command.wait_for(lambda: len(stage.complete()) >= 2)
    command.signal(signal.SIGKILL)
    return [command.end()]


def _signal_one_of_two(number: int, process: int, *both: str) -> Callable[[Stage], list[End]]:
    def inject(stage: Stage) -> list[End]:
        commands = stage.pair(both=both, steps=10_000)
        _steps_done(stage, commands[0])
        for command in commands:
            command.began = time.monotonic()
        commands[process].signal(number)
        try:
            other = commands[1 - process].end()
        finally:
            if number == signal.SIGSTOP:
                commands[process].process.kill()
        return [other, commands[process].end()]

    return inject


HANG = ("--hang-timeout", "20")
for process in (0, 1):
    # without its coordinator jax itself aborts a process
    codes = (RETRY, -signal.SIGABRT) if process == 0 else (RETRY,)
    fault("kill", f"SIGKILL process {process} of 2", *codes, signalled=(KILLED,))(
        _signal_one_of_two(signal.SIGKILL, process)
    )

# ---- stop


def _signal_at(number: int, seconds: float) -> Callable[[Stage], list[End]]:
    def inject(stage: Stage) -> list[End]:
        command = stage.start(steps=10_000)
        time.sleep(seconds)
        command.signal(number)
        return [command.end()]

    return inject


for seconds in (0.1, 0.5, 1.5, 3.0):
    # late signals may find it in its first steps, which it ends by saving
    fault("stop", f"Ctrl-C after {seconds} s", INTERRUPTED, GOOD)(
        _signal_at(signal.SIGINT, seconds)
    )


def _signal_in_steps(number: int) -> Callable[[Stage], list[End]]:
    def inject(stage: Stage) -> list[End]:
        command = stage.start(steps=10_000)
        _steps_done(stage, command)
        command.signal(number)
        return [command.end()]

    return inject


fault("stop", "SIGTERM between steps", GOOD, says="saved step")(_signal_in_steps(signal.SIGTERM))
fault("stop", "SIGHUP between steps", GOOD, says="saved step")(_signal_in_steps(signal.SIGHUP))
fault("stop", "Ctrl-C between steps", GOOD, says="saved step")(_signal_in_steps(signal.SIGINT))
fault("stop", "SIGTERM to one process of 2", GOOD)(_signal_one_of_two(signal.SIGTERM, 1))
fault("stop", "SIGHUP to one process of 2", GOOD)(_signal_one_of_two(signal.SIGHUP, 1))
for process in (0, 1):
    fault("stop", f"SIGSTOP process {process} of 2", RETRY, signalled=(KILLED,))(
        _signal_one_of_two(signal.SIGSTOP, process, *HANG)
    )


@fault("stop", "a second command on the same run", MISTAKE)
def _two_at_once(stage: Stage) -> list[End]:
    first = stage.start(steps=10_000)
    _steps_done(stage, first)
    second = stage.start(steps=10_000)
    found = second.end()
    first.signal(signal.SIGTERM)
    first.end()
    return [found]


# ---- a folder that is no longer the run's

LOST = {"says": "left alone what is there now"}


def _move_away(stage: Stage, commands: list[Command]) -> Path:
    """Take the folder from a run between steps; gives back where it is."""
    _steps_done(stage, commands[0])
    aside = stage.folder / "moved"
    for command in commands:
        command.began = time.monotonic()
    stage.run.rename(aside)
    return aside


def _no_longer_there(stage: Stage) -> None:
    if stage.run.exists() and any(stage.run.glob("**/step-*")):
        raise FaultError("the run made its folder again")
    shutil.rmtree(stage.run, ignore_errors=True)  # an unfinished save may have made it


@fault("folder", "deleted between steps", MISTAKE, resume=None, **LOST)
def _deleted(stage: Stage) -> list[End]:
    command = stage.start(steps=10_000)
    _steps_done(stage, command)
    command.began = time.monotonic()
    shutil.rmtree(stage.run, ignore_errors=True)
    found = command.end()
    _no_longer_there(stage)
    return [found]


@fault("folder", "moved between steps, and back", MISTAKE, **LOST)
def _moved(stage: Stage) -> list[End]:
    command = stage.start(steps=10_000)
    aside = _move_away(stage, [command])
    found = command.end()
    _no_longer_there(stage)
    aside.rename(stage.run)
    return [found]


@fault("folder", "moved under 2 processes, and back", MISTAKE)
def _moved_under_two(stage: Stage) -> list[End]:
    commands = stage.pair(steps=10_000)
    aside = _move_away(stage, commands)
    ends = [command.end() for command in commands]
    _no_longer_there(stage)
    aside.rename(stage.run)
    return ends


@fault("folder", "deleted, and the same command again", MISTAKE, **LOST)
def _two_runs(stage: Stage) -> list[End]:
    """The first run sleeps until the second is at its end, then wants to write and rotate."""
    first = stage.start("--checkpoint.keep-last", "1", steps=10_000)
    _steps_done(stage, first)
    first.signal(signal.SIGSTOP)
    shutil.rmtree(stage.run)
    second = stage.start(steps=6).end()
    if second.code:
        raise FaultError(second.output)
    files = [path for path in stage.run.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    first.signal(signal.SIGCONT)
    found = first.end()
    if any(not path.exists() or path.read_bytes() != before[path] for path in files):
        raise FaultError("the first run changed what the second had written")
    return [found]


# ---- full disk

FULL = {"says": "full"}
NO_SPACE = {"says": "No space left"}


@fault("full disk", "before the start", MISTAKE, **NO_SPACE)
def _full_at_start(stage: Stage) -> list[End]:
    with small_disk(stage, 0):
        return [stage.start().end()]


@fault("full disk", "not a byte free when it resumes", MISTAKE, **NO_SPACE)
def _full_at_resume(stage: Stage) -> list[End]:
    with small_disk(stage, 0):
        ended = stage.start(steps=8, cached=False).end()
    if "compil" in ended.output:
        raise FaultError("it compiled before it looked at the disk")
    return [ended]


@fault("full disk", "no room for a checkpoint, to the end", MISTAKE, **FULL)
def _full_to_the_end(stage: Stage) -> list[End]:
    with small_disk(stage, 2 * 2**20):
        return [stage.start(steps=8).end()]


@fault("full disk", "no room for a checkpoint, freed later", GOOD)
def _full_for_a_while(stage: Stage) -> list[End]:
    with small_disk(stage, 2 * 2**20) as filler:
        command = stage.start(steps=10_000)
        command.wait_for_text("warning: ")
        filler.unlink()
        command.wait_for(lambda: max(stage.complete()) > max(SAVED))
        command.signal(signal.SIGTERM)
        return [command.end()]


@fault("full disk", "not a byte free after the start", MISTAKE, **FULL)
def _full_in_steps(stage: Stage) -> list[End]:
    with small_disk(stage, 40 * 2**20) as filler:
        command = stage.start("--checkpoint.every", "1000", steps=10_000)
        _steps_done(stage, command, wanted=6)
        fill(filler.with_name("filler-2"), 0)
        time.sleep(2)
        command.signal(signal.SIGTERM)
        found = command.end()
        filler.with_name("filler-2").unlink()
        return [found]


@fault("full disk", "a read-only file system", MISTAKE)
def _read_only(stage: Stage) -> list[End]:
    import subprocess

    with small_disk(stage, 40 * 2**20):
        subprocess.run(["mount", "-o", "remount,ro", str(stage.run)], check=True)
        try:
            return [stage.start().end()]
        finally:
            subprocess.run(["mount", "-o", "remount,rw", str(stage.run)], check=True)


@fault("full disk", "while a token store is packed", MISTAKE, **NO_SPACE)
def _full_while_packing(stage: Stage) -> list[End]:
    with small_disk(stage, 2**16):
        text = stage.folder / "text.txt"
        text.write_text("A sentence of some length. " * 40_000)
        packing = Command(["data", "pack", str(text), "--out", str(stage.run / "text.store")])
        return [packing.end()]


# ---- corruption of checkpoints


def _damage_newest(change: Callable[[Stage], None]) -> Callable[[Stage], list[End]]:
    def inject(stage: Stage) -> list[End]:
        change(stage)
        return [stage.start().end()]

    return inject


def _record(stage: Stage) -> Path:
    return stage.checkpoints / "step-00000004" / "checkpoint.json"


for name, change in {
    "a flipped bit in an array": lambda stage: damage(stage.array_file(4), flip),
    "an array cut in half": lambda stage: damage(stage.array_file(4), lambda b: b[: len(b) // 2]),
    "an array of zeros": lambda stage: damage(stage.array_file(4), lambda b: bytes(len(b))),
    "a file is missing": lambda stage: stage.array_file(4).unlink(),
    "checkpoint.json is empty": lambda stage: damage(_record(stage), lambda b: b""),
    "checkpoint.json was edited": lambda stage: damage(
        _record(stage), lambda b: b.replace(b'"step": 4', b'"step": 5')
    ),
    "checkpoint.json is missing": lambda stage: _record(stage).unlink(),
}.items():
    fault(
        "corruption", f"checkpoint: {name}", MISTAKE,
        damaged=(4,), resume=("--resume-from", "2"), says="--resume-from 2",
    )(_damage_newest(change))  # fmt: skip


@fault("corruption", "checkpoint: its folder was renamed", MISTAKE, GOOD, damaged=(4, 5))
def _renamed(stage: Stage) -> list[End]:
    (stage.checkpoints / "step-00000004").rename(stage.checkpoints / "step-00000005")
    found = stage.start().end()
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(stage.checkpoints / "step-00000005")
    return [found]


@fault("corruption", "the run's metrics.jsonl holds garbage", GOOD)
def _bad_metrics(stage: Stage) -> list[End]:
    with (stage.run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "lo\x00\xff')
    return [stage.start().end()]


# ---- corruption of data


def _packed(stage: Stage) -> Path:
    """A token store, and a run of four steps that was trained on it."""
    text, store = stage.folder / "text.txt", stage.folder / "text.store"
    text.write_text("".join(f"Sentence {n} of a small text. " for n in range(20_000)))
    packing = Command(["data", "pack", str(text), "--out", str(store)]).end()
    if packing.code:
        raise FaultError(packing.output)
    shutil.rmtree(stage.run)
    trained = Command(stage.train("--data", str(store), steps=4)).end()
    if trained.code:
        raise FaultError(trained.output)
    return store


def _damage_store(change: Callable[[Path], None]) -> Callable[[Stage], list[End]]:
    def inject(stage: Stage) -> list[End]:
        store = _packed(stage)
        shutil.copytree(store, store.with_name("copy"))
        change(store)
        found = stage.start("--data", str(store), steps=400).end()
        shutil.rmtree(store)
        store.with_name("copy").rename(store)
        return [found]

    return inject


def _rewrite_tokens(store: Path, value: int) -> None:
    tokens = np.fromfile(store / "tokens.bin", "<u2")
    tokens[:] = value
    tokens.tofile(store / "tokens.bin")


for name, change in {
    "flipped bits in the tokens": lambda store: damage(
        store / "tokens.bin", lambda b: bytes(byte ^ 1 for byte in b)
    ),
    "tokens outside the vocabulary": lambda store: _rewrite_tokens(store, 60_000),
    "zeros in place of the tokens": lambda store: _rewrite_tokens(store, 0),
    "tokens.bin cut in half": lambda store: damage(
        store / "tokens.bin", lambda b: b[: len(b) // 2]
    ),
    "offsets.bin shuffled": lambda store: damage(store / "offsets.bin", lambda b: b[::-1]),
    "meta.json is not JSON": lambda store: damage(store / "meta.json", lambda b: b[:-20]),
}.items():
    fault("corruption", f"token store: {name}", MISTAKE, resume=None)(_damage_store(change))

# ---- disagreement between processes

for flags in (
    ("--optimizer.learning-rate", "1e-4"),
    ("--batch", "8"),
    ("--seq", "64"),
    ("--seed", "1"),
    ("--steps", "7"),
    ("--compute.remat", "full"),
    ("--mesh", "dp=2"),
    ("--data", "OTHER"),
):

    def _disagree(stage: Stage, flags: tuple[str, ...] = flags) -> list[End]:
        if flags[1] == "OTHER":
            text, store = stage.folder / "text.txt", stage.folder / "text.store"
            text.write_text("".join(f"Sentence {n} of a small text. " for n in range(2_000)))
            Command(["data", "pack", str(text), "--out", str(store)]).end()
            flags = (flags[0], str(store))
        return [command.end() for command in stage.pair(*flags)]

    name = f"{flags[0]} of one process of 2"
    fault("disagreement", name, MISTAKE, says=flags[0], once=True)(_disagree)

# ---- divergence


@fault(
    "divergence", "learning rate 1e38, three restarts", MISTAKE,
    resume=("--resume-from", "4"), says="--resume-from 4",
)  # fmt: skip
def _diverge(stage: Stage) -> list[End]:
    rate = ("--optimizer.learning-rate", "1e38", "--optimizer.warmup-steps", "0")
    rate += ("--max-skipped", "3")
    return [stage.start(*rate, steps=40).end() for _ in range(3)]


@fault("divergence", "weights to start from are not finite", MISTAKE, resume=None)
def _bad_weights(stage: Stage) -> list[End]:
    folder = _hf_folder(stage, np.nan)
    shutil.rmtree(stage.run)
    return [stage.start("--init-from", str(folder), "--max-skipped", "2").end()]


def _hf_folder(stage: Stage, value: float) -> Path:
    """The weights of the preset `tiny`, all of one value, as a Hugging Face folder."""
    import jax
    import jax.numpy as jnp

    from meshwright.models import preset, save_hf
    from meshwright.models.decoder import abstract_arrays

    model = preset("tiny")
    described = abstract_arrays(model)
    params = jax.tree.map(lambda spec: jnp.full(spec.shape, value, "float32"), described)
    folder = stage.folder / "weights"
    save_hf(folder, params, model)
    return folder


# ---- bad data


def _pack(write: Callable[[Path], Path]) -> Callable[[Stage], list[End]]:
    def inject(stage: Stage) -> list[End]:
        source = write(stage.folder)
        store = stage.folder / "bad.store"
        return [Command(["data", "pack", str(source), "--out", str(store)]).end()]

    return inject


def _file(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


for name, write in {
    "a broken JSON line": lambda folder: _file(folder, "a.jsonl", b'{"text": "x"}\n{"text": \n'),
    "a JSON line without the field": lambda folder: _file(folder, "a.jsonl", b'{"body": "x"}\n'),
    "text that is not UTF-8": lambda folder: _file(folder, "a.txt", b"caf\xe9 \xff\xfe"),
    "an empty file": lambda folder: _file(folder, "a.txt", b""),
    "a gzip file cut short": lambda folder: _file(folder, "a.txt.gz", b"\x1f\x8b\x08\x00\x00"),
}.items():
    fault("bad data", name, MISTAKE, resume=None)(_pack(write))


@fault("bad data", "a store of fewer tokens than one sequence", MISTAKE, resume=None)
def _too_short(stage: Stage) -> list[End]:
    text, store = _file(stage.folder, "a.txt", b"short"), stage.folder / "a.store"
    Command(["data", "pack", str(text), "--out", str(store)]).end()
    shutil.rmtree(stage.run)
    return [stage.start("--data", str(store)).end()]


@fault("bad data", "a store that does not exist", MISTAKE, resume=None)
def _no_store(stage: Stage) -> list[End]:
    shutil.rmtree(stage.run)
    return [stage.start("--data", str(stage.folder / "none.store")).end()]


@fault("bad data", "other data than the run was trained on", MISTAKE)
def _other_data(stage: Stage) -> list[End]:
    text, store = stage.folder / "text.txt", stage.folder / "text.store"
    text.write_text("".join(f"Sentence {n} of a small text. " for n in range(2_000)))
    Command(["data", "pack", str(text), "--out", str(store)]).end()
    return [stage.start("--data", str(store)).end()]


# ---- running them


@contextlib.contextmanager
def staged(base: Stage) -> Iterator[Stage]:
    with tempfile.TemporaryDirectory() as temporary:
        stage = dataclasses.replace(base, folder=Path(temporary))
        shutil.copytree(base.run, stage.run)
        yield stage


@contextlib.contextmanager
def watched(stage: Stage) -> Iterator[set[int]]:
    """The steps of all checkpoints that were complete at some moment."""
    seen, over = set(stage.complete()), threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            seen.update(stage.complete())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


@dataclasses.dataclass(frozen=True)
class Result:
    fault: Fault
    seconds: float  # from the fault to the error, of the slowest process
    message: str
    problems: tuple[str, ...]
    lost: tuple[int, ...]  # checkpoints
    origin: Mapping[str, str] = dataclasses.field(default_factory=dict)  # where and when


def tried(fault: Fault, base: Stage, undisturbed: float) -> Result:
    """Inject one fault and look at what is left."""
    with staged(base) as stage:
        try:
            with watched(stage) as seen:
                ends = fault.inject(stage)
        except FaultError as reason:
            return Result(fault, 0.0, str(reason), ("was not injected",), ())
        problems = []
        everything = "".join(end.output for end in ends)
        for number, end in enumerate(ends):
            codes = fault.signalled if number and fault.signalled else fault.codes
            if end.code not in codes:
                problems.append(f"exit code {end.code}, expected {' or '.join(map(str, codes))}")
            if end.traceback:
                problems.append("a traceback was printed")
            text = everything if fault.once else end.output
            if fault.says not in text and not (number and fault.signalled):
                problems.append(f"the message does not contain {fault.says!r}")
        kept = stage.complete()
        # older ones are deleted by keep-last once newer ones are complete
        must = sorted({*kept, max(seen)} - {*fault.damaged}) if fault.resume is not None else kept
        if fault.resume is not None and not kept:
            problems.append("no checkpoint is left")
        lost = tuple(step for step in must if not intact(stage.checkpoints, step))
        if fault.resume is not None and not lost:
            problems += _resumed(stage, fault, undisturbed)
        seconds = max(end.seconds for end in ends)
        told = next((end for end in ends if fault.says in end.output), ends[0])
        message = told.message.replace(str(stage.folder), "…")
        return Result(fault, seconds, message, tuple(problems), lost)


def _resumed(stage: Stage, fault: Fault, undisturbed: float) -> list[str]:
    """What is wrong with the run when it is resumed; its loss at step 6 must be the same."""
    assert fault.resume is not None
    done = max(stage.complete(), default=0)
    again = stage.start(*fault.resume, steps=max(6, done + 2)).end()
    if again.code:
        return [f"could not be resumed: {again.message}"]
    if "--eval.sequences" in fault.resume:  # data is set aside: other losses
        return []
    found = stage.losses().get(6)
    if found is None or abs(found / undisturbed - 1) > 1e-5:
        return [f"loss {found} at step 6 after resuming, undisturbed {undisturbed}"]
    return []


def read_record() -> dict[str, Result]:
    """What happened at each fault when it was last tried, by kind and name."""
    kept = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return {one.title: Result(one, *kept[one.title]) for one in FAULTS if one.title in kept}


def add_to_record(result: Result) -> None:
    record = read_record() | {result.fault.title: dataclasses.replace(result, origin=origin())}
    data = {
        title: [one.seconds, one.message, one.problems, one.lost, one.origin]
        for title, one in record.items()
    }
    RECORD.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def conditions(results: Sequence[Result]) -> str:
    """The line under the title: of recorded results, which may come from several machines."""
    lost = sum(len(one.lost) for one in results)
    failed = sum(bool(one.problems or one.lost) for one in results)
    return (
        f"`python benchmarks/faults.py --write`; tried with "
        f"{origins((one.origin for one in results), 'versions', 'fault')}. {len(results)} faults; "
        f"checkpoints lost: {lost}; {len(results) - failed} ended as they must, and resumed with "
        "the loss of an undisturbed run where there is a run to resume. Times are from the fault "
        "(or the start of the command) to the end of the slowest process."
    )


def table(results: list[Result]) -> list[str]:
    lines = ["| kind | fault | ended after | message | lost |", "|---|---|---|---|---|"]
    for one in results:
        said = one.message.replace("|", "\\|")
        said = textwrap.shorten(said, 160, placeholder=" …")  # between words: no half of a flag
        lost = ", ".join(map(str, one.lost)) or "nothing"
        if one.problems:
            lost += f"; **{'; '.join(one.problems)}**"
        lines.append(
            f"| {one.fault.kind} | {one.fault.name} | {one.seconds:.1f} s | {said} | {lost} |"
        )
    return lines


def try_faults(
    chosen: Sequence[Fault], layout: tuple[str, ...], keep: Callable[[Result], None]
) -> Iterator[bool]:
    """Whether each could be tried; the results go to `keep`."""
    with tempfile.TemporaryDirectory() as temporary:
        base, reference = (Stage(Path(temporary, name), layout) for name in ("base", "reference"))
        for stage, steps in ((base, 4), (reference, 6)):
            end = stage.start(steps=steps).end()
            if end.code:
                print(end.output)
                yield False
                return
        undisturbed = reference.losses()[6]
        for number, one in enumerate(chosen, start=1):
            found = tried(one, base, undisturbed)
            keep(found)
            state = "; ".join((*found.problems, *(f"lost step {s}" for s in found.lost))) or "ok"
            print(f"{number}/{len(chosen)} {one.kind}: {one.name}: {found.seconds:.1f} s: {state}")
            print(f"    {found.message}", flush=True)
            yield True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="a word of the kind or name")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # not inherited from nohup by what is signalled
    chosen = [one for one in FAULTS if options.only in one.title]
    if not all(try_faults(chosen, ONE, add_to_record)):
        return 1
    results = list(read_record().values())
    said = conditions(results)
    print(said)
    if options.write:
        write_section("Injected faults", said, table(results))
    return 1 if any(one.problems or one.lost for one in results) else 0


if __name__ == "__main__":
    sys.exit(main())
