"""Tables: aligned, no wider than asked, with nothing lost in silence."""

import pytest

from meshwright.present import Column, Row, table_markdown, table_text

COLUMNS = [
    Column("mesh", right=False),
    Column("step"),
    Column("source", right=False, least=8),
    Column("count", importance=1),
]
ROWS = [
    Row(("fsdp=8", "1.25 s", "layers of the model in order", "12")),
    Row(("fsdp=4,tp=2", "980 ms", "short", "7"), note="a note", heading="on two hosts"),
]


def test_columns_line_up_with_numbers_on_the_right() -> None:
    first, second, heading, third, note = table_text(COLUMNS, ROWS).splitlines()
    assert first.startswith("mesh")
    assert first.index("step") + 4 == second.index("1.25 s") + 6 == third.index("980 ms") + 6
    assert len(first) == len(second) == len(third)
    assert (heading, note) == ("on two hosts", "    a note")


@pytest.mark.parametrize("width", range(31, 70))
def test_no_line_is_wider_than_the_terminal_and_no_word_is_lost(width: int) -> None:
    text = table_text(COLUMNS, ROWS, width)
    text, left_out, names = text.partition("\nleft out: ")
    assert max(map(len, [*text.splitlines(), *f"left out: {names}".splitlines()])) <= width
    words = {word for row in ROWS for word in " ".join(row.cells[:3]).split()}
    assert words <= set(text.split())
    assert ("count" in text.split()) == (not left_out) != names.startswith("count;")
    if left_out:
        needed = int(names.partition("COLUMNS=")[2].rstrip(")"))
        assert needed > width
        assert "left out" not in table_text(COLUMNS, ROWS, needed)
        assert "left out: count" in table_text(COLUMNS, ROWS, needed - 1)


def test_a_drawing_is_left_out_without_a_word() -> None:
    columns = [Column("share"), Column("", importance=1)]
    assert table_text(columns, [Row(("50%", "██████████"))], 12).splitlines() == ["share", "  50%"]


def test_markdown_has_every_column_and_escapes_bars() -> None:
    head, rule, line = table_markdown(COLUMNS, [Row(("a|b", "1 s", "here", "2"))]).splitlines()
    assert head == "| mesh | step | source | count |"
    assert rule == "|---|---|---|---|"
    assert line == r"| a\|b | 1 s | here | 2 |"


def test_a_table_without_rows_is_its_header() -> None:
    assert table_text(COLUMNS, []) == "mesh  step  source  count"
