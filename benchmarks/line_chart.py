"""Line charts as SVG text, for the docs: panels side by side, each with curves and limits.

svg = line_charts([Panel("loss", [Curve("ours", BLUE, [(0, 9.7), (100, 5.1)])])])
"""

import dataclasses
import html
import math
from collections.abc import Sequence

BLUE, ORANGE, GREY = "#3457d5", "#c2410c", "#667085"
WIDTH, HEIGHT = 440, 300  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 52, 24, 50, 30


@dataclasses.dataclass(frozen=True)
class Curve:
    """Curves of one label share an entry of the legend."""

    label: str
    colour: str
    points: Sequence[tuple[float, float]]  # x, y


@dataclasses.dataclass(frozen=True)
class Panel:
    title: str
    curves: Sequence[Curve]
    limits: Sequence[float] = ()  # horizontal lines, always in view
    unit: str = ""  # of y


def line_charts(panels: Sequence[Panel]) -> str:
    """All panels in one picture. Points that are not finite are left out."""
    size = f"{WIDTH * len(panels)} {HEIGHT}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{GREY}">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for number, panel in enumerate(panels):
        parts += [f'<g transform="translate({number * WIDTH} 0)">', *_drawn(panel), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from `low` to `high`, at most `most` of them."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    for times in (1, 2, 5, 10, 20):
        first, last = math.ceil(low / (step * times)), math.floor(high / (step * times))
        if last - first < most:
            return [k * step * times for k in range(first, last + 1)]
    raise AssertionError("twenty steps of at least a tenth of the range are fewer than wanted")


def _drawn(panel: Panel) -> list[str]:
    curves = [
        dataclasses.replace(curve, points=[p for p in curve.points if all(map(math.isfinite, p))])
        for curve in panel.curves
    ]
    x_low, x_high = _range([x for curve in curves for x, _ in curve.points], 0)
    y_low, y_high = _range([*(y for curve in curves for _, y in curve.points), *panel.limits], 0.06)

    def across(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    def level(y: float, style: str) -> str:
        return f'<path d="M{LEFT} {down(y):.1f}H{WIDTH - RIGHT}" {style}/>'

    parts = [f'<text x="{LEFT}" y="18" font-weight="600">{html.escape(panel.title)}</text>']
    for y in round_numbers(y_low, y_high, 7):
        parts.append(level(y, 'stroke="#eceff4"'))
        label = f"{y:.6g}".replace("-", "−") + panel.unit
        parts.append(f'<text x="{LEFT - 6}" y="{down(y) + 4:.1f}" text-anchor="end">{label}</text>')
    for x in round_numbers(x_low, x_high, 6):
        place = f'x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 18}"'
        parts.append(f'<text {place} text-anchor="middle">{x:,.6g}</text>')
    parts += [level(y, f'stroke="{GREY}" stroke-dasharray="4 3"') for y in panel.limits]
    for curve in curves:
        path = "L".join(f"{across(x):.1f} {down(y):.1f}" for x, y in curve.points)
        if path:
            line = f'fill="none" stroke="{curve.colour}" stroke-width="1.4" stroke-linejoin="round"'
            parts.append(f'<path d="M{path}" {line}/>')
    place = LEFT
    for name, colour in dict.fromkeys((curve.label, curve.colour) for curve in curves):
        parts.append(f'<path d="M{place} 32h16" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{place + 21}" y="36">{html.escape(name)}</text>')
        place += 40 + 7 * len(name)
    return parts


def _range(values: Sequence[float], room: float) -> tuple[float, float]:
    """From the least to the largest, with room for a share of that on both sides."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low == high:
        return low - 1, high + 1
    return low - room * (high - low), high + room * (high - low)
