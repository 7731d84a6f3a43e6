"""Output for people: number formatting, tables and self-contained HTML pages."""

from meshwright.present.numbers import (
    GIB,
    amount,
    bar,
    bytes_text,
    count,
    count_text,
    duration_text,
    gib,
    mesh_text,
    nearest_multiples,
    percent,
    seconds_text,
)
from meshwright.present.page import render

__all__ = [
    "GIB",
    "amount",
    "bar",
    "bytes_text",
    "count",
    "count_text",
    "duration_text",
    "gib",
    "mesh_text",
    "nearest_multiples",
    "percent",
    "render",
    "seconds_text",
]
