"""One self-contained HTML page of a run: what it was, how it went, its curves.

    write_run_page("runs/tiny")     # runs/tiny/run.html

It reads metrics.jsonl, and from the same folder, where they are there, run.json (name, model, mesh,
machine, …: shown as they stand) and config.json (the resolved config).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.files import write_whole
from meshwright.present import render
from meshwright.training.run.metrics import read_metrics
from meshwright.training.run.summary import curves, expert_loads, resumes, samples, summary

TEMPLATE = Path(__file__).with_name("page.html")
PAGE = "run.html"


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
    about = dict(_json(folder / "run.json") or {} if about is None else about)
    config = _json(folder / "config.json") if config is None else config
    text = run_page(folder, about, config)
    write_whole(folder / PAGE, text)
    return folder / PAGE


def run_page(folder: Path, about: Mapping[str, Any], config: Any | None) -> str:
    """The page's HTML; it needs nothing from outside."""
    metrics = read_metrics(folder)
    data = {
        "curves": curves(metrics),
        "resumes": [
            {"step": event["step"], "mesh": event.get("mesh")} for event in resumes(metrics)
        ],
        "loads": expert_loads(metrics),
    }
    about = dict(about)
    title = str(about.pop("name", None) or folder.resolve().name)
    return render(
        TEMPLATE,
        title=title,
        data=data,
        about=[(str(key), str(value)) for key, value in about.items() if value not in (None, "")],
        summary=summary(metrics),
        samples=samples(metrics),
        loads=data["loads"] is not None,
        unreadable=metrics.unreadable,
        config=None if config is None else json.dumps(config, indent=2, default=str),
    )


def _json(file: Path) -> Any | None:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as reason:
        raise MeshwrightError(f"{str(file)!r} cannot be read: {reason}") from None
