"""Numbers for people: bytes, seconds, counts, shares; the same in every command and page."""

import math
from collections.abc import Iterable, Mapping

GIB = 2**30


def bytes_text(number: float) -> str:
    """`"1.5 GiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def gib(number: float) -> str:
    """`"61.2"`; small ones with the digits that tell them from nothing."""
    size = number / GIB
    if size >= 1 or size == 0:
        return f"{size:,.1f}"
    return f"{size:.2f}" if size >= 0.01 else f"{size:.1g}"


def seconds_text(seconds: float) -> str:
    """`"12.3 s"`, `"456 ms"`, `"7.8 µs"`, `"1 h 5 min"`."""
    if seconds >= 3600:
        return f"{seconds // 3600:,.0f} h {seconds % 3600 // 60:.0f} min"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds / 1e-6)} µs" if seconds else "0"


def amount(number: float, unit: str = "") -> str:
    """`"1.23M"`, `"12.3K"`, `"950"`; with a unit `"989 TFLOP"`, `"1.5 GB"`."""
    letters = ("", "k", "M", "G", "T", "P", "E") if unit else ("", "K", "M", "B", "T")
    power = 0
    while abs(number) >= 999.5 and power < len(letters) - 1:
        number /= 1000
        power += 1
    return f"{_three(number)}{' ' if unit else ''}{letters[power]}{unit}"


def _three(number: float) -> str:
    """Three digits, zeros too, so that a column of them lines up."""
    return f"{number:,.0f}" if number >= 99.5 or not number else f"{number:#.3g}".rstrip(".")


def percent(share: float) -> str:
    """`"23%"`; `"<1%"` is little, `"0%"` nothing."""
    return "<1%" if 0 < share < 0.005 else f"{100 * share:.0f}%"


def bar(share: float, width: int) -> str:
    """`"████▌   "`: a share of 1, in eighths of a character; what is over 1 fills it."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(width)


def _three_digits(number: float) -> str:
    size = abs(number)
    return f"{number:.2f}" if size < 9.995 else f"{number:.1f}" if size < 99.95 else f"{number:.0f}"


def count_text(number: float) -> str:
    """Three digits and a letter.

    >>> [count_text(n) for n in (7, 999, 12_345, 1_250_000, 3.2e9)]
    ['7', '999', '12.3K', '1.25M', '3.20B']
    """
    if not math.isfinite(number):
        return str(number)
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        # what would round to 1000 belongs to the next letter
        if abs(number) >= size * 0.9995:
            return f"{_three_digits(number / size)}{letter}"
    return f"{number:.0f}" if abs(number) >= 99.95 or number == int(number) else f"{number:.3g}"


def duration_text(seconds: float) -> str:
    """The two largest units.

    >>> [duration_text(s) for s in (8, 72, 3725, 187_200)]
    ['8s', '1m 12s', '1h 02m', '2d 04h']
    """
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}h"
    if hours:
        return f"{hours}h {minute:02}m"
    return f"{minutes}m {second:02}s" if minutes else f"{second}s"


def nearest_multiples(size: int, factor: int) -> str:
    """The multiples of `factor` on both sides of `size`: `"24 or 32"`."""
    below = size // factor * factor
    return f"{below} or {below + factor}" if below else f"{factor}"


def nearest_sizes_text(given: int, fits: Iterable[int]) -> str:
    """Of sizes that fit, the three that are nearest to the one that is given: `"2, 4 or 8"`."""
    found = sorted(sorted(fits, key=lambda size: abs(math.log(size / given)))[:3])
    *most, last = map(str, found)
    return f"{', '.join(most)} or {last}" if most else last


_PLURALS = {"axis": "axes", "copy": "copies", "micro-batch": "micro-batches"}


def count(number: int, noun: str) -> str:
    """`"1 device"`, `"8 devices"`, `"2 axes"`."""
    if number == 1:
        return f"1 {noun}"
    plural = _PLURALS.get(noun, noun + "s")
    return f"{number:,} {plural}"


def mesh_text(mesh_shape: Mapping[str, int]) -> str:
    """`"fsdp=2,tp=4"`; axes of bare devices have no names: `"2×2×2, unnamed"`."""
    if mesh_shape and all(axis.startswith("unnamed_") for axis in mesh_shape):
        return f"{'×'.join(map(str, mesh_shape.values()))}, unnamed"
    return ",".join(f"{axis}={size}" for axis, size in mesh_shape.items())
