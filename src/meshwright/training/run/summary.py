"""A run in a few numbers, and its curves thinned to what a screen can show."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.present import GIB, count_text, duration_text
from meshwright.training.run.metrics import RESUMED, Metrics

MOST_POINTS = 8000
MOST_SAMPLED = 50  # steps whose sample texts are shown
SAMPLE = "sample"  # an event: a prompt and the text that the weights of a step gave after it
# of a step's report and an event: of layers with experts, how often each was chosen in the step,
# over the average
EXPERT_LOADS = "expert_loads"


@dataclasses.dataclass(frozen=True)
class Curve:
    """A column of metrics.jsonl, and how a person calls it."""

    column: str
    title: str
    unit: str = ""
    scale: float = 1.0
    log: bool = False  # whether a logarithmic axis makes sense


CURVES = (
    Curve("loss", "loss", log=True),
    Curve("eval_loss", "eval loss", log=True),
    Curve("grad_norm", "gradient norm", log=True),
    Curve("learning_rate", "learning rate", log=True),
    Curve("tokens_per_second", "tokens/s"),
    Curve("mfu", "MFU", "%", 100.0),
    Curve("step_seconds", "seconds per step", " s", log=True),
    Curve("memory_bytes", "memory", " GiB", 1 / GIB),
    Curve("highest_load", "load of the most chosen expert, over the average"),
)


def summary(metrics: Metrics) -> list[tuple[str, str]]:
    """Name and value, as shown; what the run did not measure is left out."""
    told: list[tuple[str, str]] = [("steps", f"{metrics.step:,}")]
    tokens = _finite(metrics, "tokens")
    if tokens:
        told.append(("tokens", count_text(tokens[-1])))
    for column, name in (("loss", "loss"), ("eval_loss", "eval loss")):
        values = _finite(metrics, column)
        if values:
            told.append((name, f"{values[-1]:.4f}"))
    seconds = _finite(metrics, "step_seconds")
    if seconds:
        median = statistics.median(seconds)
        text = duration_text(median) if median >= 60 else f"{median:.3g} s"
        told.append(("median step", text))
    speeds = _finite(metrics, "tokens_per_second")
    if speeds:
        told.append(("tokens/s", count_text(statistics.median(speeds))))
    mfus = _finite(metrics, "mfu")
    if mfus:
        told.append(("MFU", f"{statistics.median(mfus):.1%}"))
    memory = _finite(metrics, "memory_bytes")
    if memory:
        limits = _finite(metrics, "memory_limit_bytes")
        of = f" of {limits[-1] / GIB:.1f}" if limits and limits[-1] else ""
        told.append(("memory", f"{max(memory) / GIB:.1f}{of} GiB"))
    skipped = _finite(metrics, "skipped_steps")
    told.append(("skipped steps", f"{skipped[-1]:.0f}" if skipped else "0"))
    told.append(("resumes", str(len(resumes(metrics)))))
    return told


def resumes(metrics: Metrics) -> list[dict[str, Any]]:
    return [event for event in metrics.events if event["event"] == RESUMED]


def samples(metrics: Metrics) -> list[tuple[int, list[dict[str, Any]]]]:
    """Each step that has sample texts with them, the newest first.

    A step that a resumed run repeated has what it gave last.
    """
    by_step: dict[int, dict[str, dict[str, Any]]] = {}
    for event in metrics.events:
        if event["event"] == SAMPLE:
            by_step.setdefault(event["step"], {})[str(event.get("prompt"))] = event
    newest = sorted(by_step, reverse=True)[:MOST_SAMPLED]
    return [(step, list(by_step[step].values())) for step in newest]


def expert_loads(metrics: Metrics) -> dict[str, Any] | None:
    """The last that a run wrote of the loads of its experts: the step, and those of each layer."""
    events = [event for event in metrics.events if event["event"] == EXPERT_LOADS]
    return {"step": events[-1]["step"], "layers": events[-1]["loads"]} if events else None


def curves(metrics: Metrics, most: int = MOST_POINTS) -> list[dict[str, Any]]:
    """Every curve the run has points of, ready for the page."""
    drawn = []
    for curve in CURVES:
        steps, values = metrics.column(curve.column)
        finite = [(x, y * curve.scale) for x, y in zip(steps, values, strict=True) if _real(y)]
        if not finite:
            continue
        kept = thinned([y for _, y in finite], most)
        means = {} if len(kept) == len(finite) else _means(finite, most // 2)
        drawn.append(
            means
            | {
                "column": curve.column,
                "title": curve.title + _of(metrics, curve),
                "axis": curve.title,
                "unit": curve.unit,
                "log": curve.log,
                "x": [finite[i][0] for i in kept],
                "y": [float(f"{finite[i][1]:.6g}") for i in kept],
                "points": len(finite),
                "lost": [x for x, y in zip(steps, values, strict=True) if not _real(y)][:500],
            }
        )
    return drawn


def thinned(values: Sequence[float], most: int) -> list[int]:
    """Positions to keep: at most `most`, with the lowest and highest of every stretch among them.

    >>> thinned([0, 0, 9, 0, 0, 0, 0, 0, -5, 0], 6)
    [0, 2, 5, 8, 9]
    """
    number = len(values)
    if number <= most:
        return list(range(number))
    array = np.asarray(values)
    kept = {0, number - 1}
    for stretch in np.array_split(np.arange(number), max(1, (most - 2) // 2)):
        kept.add(int(stretch[array[stretch].argmin()]))
        kept.add(int(stretch[array[stretch].argmax()]))
    return sorted(kept)


def _means(points: list[tuple[int, float]], stretches: int) -> dict[str, list[float]]:
    # lowest and highest alone would pull a smoothed line towards the rare values
    parts = np.array_split(np.asarray(points, dtype=np.float64), stretches)
    x, y = np.stack([part.mean(axis=0) for part in parts]).T
    return {
        "meanX": [round(float(v), 1) for v in x],
        "mean": [float(f"{v:.6g}") for v in y],
    }


def _of(metrics: Metrics, curve: Curve) -> str:
    limits = _finite(metrics, "memory_limit_bytes") if curve.column == "memory_bytes" else []
    return f" (of {limits[-1] * curve.scale:.1f}{curve.unit})" if limits and limits[-1] else ""


def _finite(metrics: Metrics, column: str) -> list[float]:
    return [value for value in metrics.column(column)[1] if _real(value)]


def _real(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
