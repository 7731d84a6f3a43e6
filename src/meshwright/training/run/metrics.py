"""The numbers of a run: one JSON line a step in metrics.jsonl; TensorBoard and W&B when asked.

    log = MetricsLog(run_folder)
    log.write(40, {"loss": 2.31, "grad_norm": 0.8})
    read_metrics(run_folder).column("loss")      # ([40], [2.31])

A run that resumes from step 40 drops what was written past it, so each step stands there once.
"""

import contextlib
import dataclasses
import errno
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from meshwright.errors import MeshwrightError
from meshwright.files import cannot_be_written, warn_once, write_whole
from meshwright.training.run.trackers import TensorBoard, WeightsAndBiases

FILE = "metrics.jsonl"
RESUMED, ENDED = "resumed", "ended"  # events


@dataclasses.dataclass(frozen=True)
class Metrics:
    """`records`: step and numbers; `events`: step, `event` and what belongs to it."""

    records: tuple[dict[str, Any], ...] = ()
    events: tuple[dict[str, Any], ...] = ()
    unreadable: int = 0  # lines cut short by a crash or a full disk
    end: dict[str, Any] | None = None  # the event, unless a line after it tells that a run went on

    @property
    def step(self) -> int:
        """The last that is known of; not every step has a line."""
        ends = [] if self.end is None else [self.end]
        return max((record["step"] for record in [*self.records, *ends]), default=0)

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """The steps that have `name`, and its values."""
        records = [record for record in self.records if name in record]
        return [record["step"] for record in records], [record[name] for record in records]


def read_metrics(run_folder: Path | str) -> Metrics:
    """What the run wrote; a line that was cut short is counted and left out."""
    file = Path(run_folder) / FILE
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise MeshwrightError(
            f"{str(run_folder)!r} holds no {FILE}: it is not the folder of a run that took a step"
        ) from None
    except OSError as reason:
        raise MeshwrightError(f"{str(file)!r} cannot be read: {reason.strerror}") from None
    records, events, unreadable = [], [], 0
    end: dict[str, Any] | None = None
    for line in lines:
        if not line.strip():
            continue
        record = _parsed(line)
        if record is None:
            unreadable += 1
        elif "event" in record:
            events.append(record)
            if record["event"] in (RESUMED, ENDED):
                end = record if record["event"] == ENDED else None
        else:
            records.append(record)
            end = None  # of a run that started anew in the folder
    return Metrics(tuple(records), tuple(events), unreadable, end)


class MetricsLog:
    """Writes from process 0 only; in the others every call does nothing.

    `wandb`: a project's name, or the arguments of `wandb.init`. `resume_step`: the last step whose
    lines are kept.
    """

    def __init__(
        self,
        run_folder: Path | str,
        *,
        tensorboard: bool = False,
        wandb: str | Mapping[str, Any] | None = None,
        resume_step: int | None = None,
        writes: bool | None = None,
    ) -> None:
        folder = Path(run_folder)
        self._sinks: list[Any] = []
        self._writes = jax.process_index() == 0 if writes is None else writes
        self._path = folder / FILE
        self._file: Any = None
        self._failed = False
        if not self._writes:
            return
        if tensorboard:
            self._sinks.append(TensorBoard(folder / "tensorboard", resume_step))
        if wandb is not None:
            self._sinks.append(WeightsAndBiases(folder, wandb))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _keep_until(folder / FILE, resume_step)
            self._file = (folder / FILE).open("ab", buffering=0)
        except OSError as reason:
            raise cannot_be_written(folder / FILE, reason) from None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Add one line; each value is a number."""
        if not self._writes:
            return
        numbers = {name: _number(name, value) for name, value in values.items()}
        self._append({"step": int(step), "time": round(time.time(), 3)} | numbers)
        for sink in list(self._sinks):
            with self._or_without(sink):
                sink.write(int(step), numbers)

    def note(self, step: int, event: str, **about: Any) -> None:
        """Add an event, such as `note(40, "resumed", mesh="fsdp=8")`."""
        if self._writes:
            about = {"step": int(step), "event": event, "time": round(time.time(), 3)} | about
            self._append(about)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        for sink in list(self._sinks):
            with self._or_without(sink):
                sink.close()
        self._sinks = []

    @contextlib.contextmanager
    def _or_without(self, sink: Any) -> Iterator[None]:
        """A tracker that fails (a full disk, no connection: many types) is left out, not fatal."""
        try:
            yield
        except Exception as reason:
            name = type(sink).__name__
            warn_once(name, f"{name} failed: {reason}; training continues without it")
            self._sinks.remove(sink)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _append(self, record: dict[str, Any]) -> None:
        # after a failed write half a line may stand there: begin a new one
        line = (("\n" if self._failed else "") + json.dumps(_encoded(record)) + "\n").encode()
        try:
            # unbuffered: a kill loses nothing that was written
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._failed = False
        except OSError as reason:  # training is worth more than its diary
            text = f"{self._path} cannot be written: {reason.strerror}; training continues"
            warn_once(str(self._path), text)
            self._failed = True


def _number(name: str, value: Any) -> float | int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        raise MeshwrightError(f"metric {name!r} is {value!r}, not a number") from None


def _encoded(record: dict[str, Any]) -> dict[str, Any]:
    # JSON has no NaN: as text, which float() reads back
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    if "event" in record:
        return record
    with contextlib.suppress(TypeError, ValueError):
        return {
            key: float(value) if isinstance(value, str) else value for key, value in record.items()
        }
    return None


def _keep_until(file: Path, step: int | None) -> None:
    """Drop half lines and, given a step, what was measured past it; atomically."""
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    kept = []
    for line in lines:
        record = _parsed(line) if line.strip() else None
        if record is not None and (
            step is None
            or record["step"] <= step
            or (step > 0 and record.get("event") in (RESUMED, ENDED))  # of this run
        ):
            kept.append(line)
    text = b"".join(line + b"\n" for line in kept)
    if text == b"\n".join(lines):
        return
    write_whole(file, text)
