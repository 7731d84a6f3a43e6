"""The process that holds the others up is the one that is named."""

import dataclasses

from meshwright.launch.verdict import Report, verdict


def report(process: int, step: int | None, seconds: float = 130, **more: object) -> Report:
    basic = Report(process, f"node-{process}", step, seconds=seconds, limit_s=120)
    return dataclasses.replace(basic, **more)  # type: ignore[arg-type]


def test_the_process_behind_is_named_whoever_asks() -> None:
    reports = [report(i, 40 if i == 3 else 41) for i in range(8)]
    said = "step 41 has not finished for 130 s: process 3 (node-3) was last seen at step 40; the other 7 wait in step 41"
    assert verdict(reports, 0, 60) == said
    assert verdict(reports, 3, 60) == said


def test_nobody_is_named_before_the_limit() -> None:
    assert verdict([report(0, 41, 119), report(1, 40, 119)], 0, 600) is None


def test_a_process_that_is_saving_within_its_limit_is_waited_for() -> None:
    saving = report(1, 41, 130, doing="saving", limit_s=1800)
    assert verdict([report(0, 41), saving], 0, 600) is None
    late = dataclasses.replace(saving, seconds=1801)
    said = verdict([report(0, 42), late], 0, 600)
    assert said is not None
    assert "process 1 (node-1) was last seen at step 41 (saving)" in said


def test_a_process_that_is_behind_does_not_wait_for_those_ahead() -> None:
    ahead = report(0, 41, 1)
    assert verdict([ahead, report(1, 40)], 1, 600) is not None


def test_silence_is_told_before_the_limit_is_reached() -> None:
    reports = [report(0, 41, 70), report(1, 41, 5, silent_s=65)]
    said = verdict(reports, 0, 60)
    assert said == (
        "step 41 has not finished for 70 s: process 1 (node-1) has not reported for 65 s: "
        "it is stopped, swapped out or disconnected; the other waits in step 41"
    )
    assert verdict(reports, 0, 66) is None


def test_in_the_same_step_the_one_that_is_elsewhere_is_named() -> None:
    reports = [report(i, 41, where="loop.py:9 wait") for i in range(4)]
    said = verdict(reports, 0, 600)
    assert said is not None
    assert "all 4 processes are in it; a collective or the network hangs" in said
    reports[2] = dataclasses.replace(reports[2], where="reader.py:88 next_batch")
    said = verdict(reports, 0, 600)
    assert said is not None
    assert (
        "process 2 (node-2) was last seen at step 41, in reader.py:88 next_batch; the other 3"
        in said
    )


def test_a_process_that_never_began_or_that_left_is_named() -> None:
    never = verdict([report(0, 1), report(1, None, 0, limit_s=0)], 0, 600)
    assert never is not None
    assert "process 1 (node-1) has not begun the first step" in never
    left = verdict([report(0, 41), report(1, 40, 1, left=True)], 0, 600)
    assert left is not None
    assert "process 1 (node-1) left the loop at step 40" in left


def test_what_is_written_is_what_is_read() -> None:
    original = report(3, 41, where='odd "name".py:1 f', doing="saving", count=7)
    assert Report.read(original.text()) == original
