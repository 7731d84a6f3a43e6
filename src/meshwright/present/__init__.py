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
    nearest_sizes_text,
    percent,
    seconds_text,
)
from meshwright.present.page import CONTENT_POLICY, render, write_page
from meshwright.present.tables import (
    Column,
    Row,
    aligned,
    paragraph,
    table_html,
    table_markdown,
    table_text,
    text_html,
    wrapped,
)

__all__ = [
    "CONTENT_POLICY", "GIB", "Column", "Row", "aligned", "amount", "bar", "bytes_text", "count",
    "count_text", "duration_text", "gib", "mesh_text", "nearest_multiples", "nearest_sizes_text",
    "paragraph", "percent", "render", "seconds_text", "table_html", "table_markdown", "table_text",
    "text_html", "wrapped", "write_page",
]  # fmt: skip
