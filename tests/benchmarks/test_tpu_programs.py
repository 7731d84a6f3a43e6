"""The record of TPU programs before and after they scattered more and overlapped."""

from pathlib import Path

import tpu_programs
from plan_against_compiler import words


def test_every_recorded_step_is_faster_and_none_of_its_parts_slower() -> None:
    record = tpu_programs.read_record()
    assert set(record) <= {words(one) for one in tpu_programs.STEPS}
    both = [entries for entries in record.values() if {"before", "after"} <= entries.keys()]
    assert len(both) >= 6
    for entries in both:
        before, after = entries["before"], entries["after"]
        scattered = entries.get("scattered", before)
        assert after["seconds"] <= scattered["seconds"] <= 1.001 * before["seconds"]
        assert after["seconds"] < before["seconds"]
        sent = [sum(entry["sums"].values()) for entry in (before, after)]
        assert 0.99 < sent[1] / sent[0] < 1.01  # of arrays: a scatter and an all-reduce count alike


def test_a_table_has_a_line_for_each_step_and_a_dump_is_read(tmp_path: Path) -> None:
    lines = tpu_programs.table(tpu_programs.read_record())
    assert len(lines) >= 2 + 6
    assert all(line.count("|") == lines[0].count("|") for line in lines)
    (tmp_path / "a.after_buffer_assignment.txt").write_text("HloModule step")
    report = "Memory Space: default (color=0)\nTotal bytes: 1234 (1.2KiB)"
    (tmp_path / "a.memory-usage-report.txt").write_text(report)
    assert tpu_programs.of_dump(tmp_path) == ("HloModule step", 1234)
