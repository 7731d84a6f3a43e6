"""Whether a run is running, finished, stopped or failed, as its folder tells it.

A run notes in metrics.jsonl that it resumed, and how it ended. One that was killed, or
whose machine went down, has noted no end: then its process is looked for. Runs of versions
before 0.2.0 noted nothing, and have no version in run.json.
"""

import dataclasses
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, Literal

from meshwright.checkpoint import folders
from meshwright.errors import MeshwrightError
from meshwright.training.run.lock import owner
from meshwright.training.run.metrics import FILE as METRICS
from meshwright.training.run.metrics import Metrics

State = Literal["running", "finished", "stopped", "failed", "unknown"]
NO_END = "no end was noted and its process no longer runs: killed, or the machine went down"
EARLIER = "a run of an earlier version, which noted no end"
QUIET_S = 600.0  # a run on another machine that wrote nothing for this long is taken for gone


@dataclasses.dataclass(frozen=True)
class RunStatus:
    """`steps`: how many the run is to take, where its config says so."""

    state: State
    step: int
    steps: int | None
    reason: str = ""


def run_status(folder: Path, metrics: Metrics) -> RunStatus:
    """The state of the run in a folder, given its metrics."""
    step = metrics.step
    steps = read_json(folder / "config.json").get("steps")
    steps = steps if isinstance(steps, int) else None
    if metrics.end is not None:
        return RunStatus(metrics.end["state"], step, steps, str(metrics.end.get("reason") or ""))
    if _has_process(folder):
        return RunStatus("running", step, steps)
    if steps is not None and step >= steps:
        return RunStatus("finished", step, steps)
    if "version" in read_json(folder / "run.json"):
        return RunStatus("failed", step, steps, NO_END)
    if step and step in folders.complete_steps(folder / "checkpoints"):
        return RunStatus("stopped", step, steps, f"{EARLIER}; its last step is saved")
    return RunStatus("unknown", step, steps, EARLIER)


def _has_process(folder: Path) -> bool:
    # by its number, not by its lock: to try the lock could refuse a run that starts meanwhile
    process, host = owner(folder)
    if process is None:
        return False
    if host != socket.gethostname():
        try:
            return time.time() - (folder / METRICS).stat().st_mtime < QUIET_S
        except OSError:
            return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def read_json(file: Path) -> dict[str, Any]:
    """What a file of the run's folder holds; nothing where it is not there, or is no object."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return data if isinstance(data, dict) else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as reason:
        raise MeshwrightError(f"{str(file)!r} cannot be read: {reason}") from None
