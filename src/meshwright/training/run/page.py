"""One self-contained HTML page of a run: what it is, how it goes, its curves.

    write_run_page("runs/tiny")     # runs/tiny/run.html

It reads metrics.jsonl, and from the same folder, where they are there, run.json (name, model, mesh,
machine, …: shown as they stand) and config.json (the resolved config).
"""

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.files import write_whole
from meshwright.present import duration_text, render
from meshwright.training.run.live import eta_seconds
from meshwright.training.run.metrics import Metrics, read_metrics
from meshwright.training.run.status import RunStatus, read_json, run_status
from meshwright.training.run.summary import curves, expert_loads, resumes, samples, summary

TEMPLATE = Path(__file__).with_name("page.html")
PAGE = "run.html"
EVERY_S = 10.0  # between two pages of a run that trains, and between two looks of a browser
SHARE = 0.02  # of the time, at most, goes into writing the page


def write_run_page(
    run_folder: Path | str,
    *,
    about: Mapping[str, Any] | None = None,
    config: Any | None = None,
) -> Path:
    """Write run.html into the folder; gives back its path.

    `about` and `config` stand in for run.json and config.json.
    """
    folder = Path(run_folder)
    write_whole(folder / PAGE, run_page(folder, about, config))
    return folder / PAGE


def run_page(
    folder: Path,
    about: Mapping[str, Any] | None = None,
    config: Any | None = None,
    *,
    served: bool = False,
) -> str:
    """The page's HTML; it needs nothing from outside. A served one asks its server for news."""
    metrics = read_metrics(folder)
    about = dict(read_json(folder / "run.json") if about is None else about)
    config = read_json(folder / "config.json") if config is None else config
    status = run_status(folder, metrics)
    data = {
        "curves": curves(metrics),
        "resumes": [
            {"step": event["step"], "mesh": event.get("mesh")} for event in resumes(metrics)
        ],
        "loads": expert_loads(metrics),
        "everyMs": EVERY_S * 1000,
        "written": time.time(),
    }
    title = str(about.pop("name", None) or folder.resolve().name)
    measured = {column for record in metrics.records for column in record}
    return render(
        TEMPLATE,
        title=title,
        data=data,
        about=[(str(key), str(value)) for key, value in about.items() if value not in (None, "")],
        status=status,
        progress=progress_text(status, metrics),
        live="" if not served and status.state != "running" else "fetch" if served else "reload",
        summary=summary(metrics),
        samples=samples(metrics),
        unmeasured=[
            name
            for name, column in (("memory", "memory_bytes"), ("MFU", "mfu"))
            if "step_seconds" in measured and column not in measured
        ],
        loads=data["loads"] is not None,
        unreadable=metrics.unreadable,
        config=json.dumps(config, indent=2, default=str) if config else None,
    )


def progress_text(status: RunStatus, metrics: Metrics) -> str:
    """`step 120 of 200, about 40 s left`."""
    text = f"step {status.step:,}" + (f" of {status.steps:,}" if status.steps else "")
    _, seconds = metrics.column("step_seconds")
    left = eta_seconds(status.step, status.steps or 0, seconds[-1] if seconds else None)
    return (
        f"{text}, about {duration_text(left)} left" if status.state == "running" and left else text
    )


class LivePage:
    """run.html while a run trains: `update()` after each step writes it now and then."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.file = folder / PAGE
        self._next = -float("inf")

    def update(self) -> None:
        """Write the page if it is due."""
        began = self._clock()
        if began < self._next:
            return
        # what keeps the page from being written, the run says at its end
        with contextlib.suppress(MeshwrightError):
            write_run_page(self.file.parent)
        now = self._clock()
        self._next = now + max(EVERY_S, (now - began) / SHARE)
