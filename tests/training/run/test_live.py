"""The live line: its words, and that it works on a terminal, in a pipe and without rich."""

import io
import math
import re
import sys
import threading

import pytest
from tests.patience import eventually

from meshwright.present import count_text, duration_text
from meshwright.training.run import LiveLine, live, waiting_line
from meshwright.training.run.live import eta_seconds, metrics_text

METRICS = {
    "step": 120,
    "loss": 2.3141,
    "tokens_per_second": 12345.0,
    "tflops_per_device": 393.4,
    "mfu": 0.3978,
    "memory_bytes": 71.2 * 2**30,
    "memory_limit_bytes": 139.8 * 2**30,
    "step_seconds": 3725 / 880,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (7, "7"), (0.5, "0.5"), (999, "999"), (999.6, "1.00K"), (1000, "1.00K"), (12_345, "12.3K"),
     (99_950, "100K"), (123_456, "123K"), (999_600, "1.00M"), (3.2e9, "3.20B"), (15e12, "15.0T"), (math.nan, "nan")],
)  # fmt: skip
def test_numbers_have_three_digits(number: float, text: str) -> None:
    assert count_text(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (-3, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (72, "1m 12s"), (3599.7, "1h 00m"), (3725, "1h 02m"),
     (86399, "23h 59m"), (86400, "1d 00h"), (187_200, "2d 04h"), (math.inf, "?")],
)  # fmt: skip
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_the_line_shows_what_the_metrics_have() -> None:
    assert metrics_text(METRICS, 1000) == (
        "step   120/1,000  loss 2.314  12.3K tok/s  393 TFLOP/s 39.8% MFU  71.2/139.8 GiB  ETA 1h 02m"
    )
    # a CPU knows neither peak nor memory
    assert metrics_text(
        {"step": 1, "loss": 9.0, "tflops_per_device": 0.0123, "skipped_steps": 2}, 10
    ) == ("step  1/10  loss 9.000  2 skipped")
    assert "loss nan" in metrics_text({"step": 1, "loss": math.nan}, 10)
    assert eta_seconds(12, 10, 1.0) == 0


def test_without_a_terminal_a_line_is_printed_now_and_then() -> None:
    now = [0.0]
    file = io.StringIO()
    with LiveLine(100, every_s=10, file=file, clock=lambda: now[0]) as line:
        for step in range(1, 101):
            line.update({"step": step})
            now[0] += 0.5
        line.print("saved step 100")
    printed = file.getvalue().splitlines()
    # the first, every 20th step, and the last
    assert [
        int(text.split()[1].split("/")[0]) for text in printed if "step " in text and "/" in text
    ] == [1, 21, 41, 61, 81, 100]
    assert "saved step 100" in printed


def test_on_a_terminal_one_line_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    file = Terminal()
    with LiveLine(1000, file=file) as line:
        line.update(METRICS)
        line.print("saved [step] 100")
    text = file.getvalue()
    assert "saved [step] 100" in text
    assert "ETA 1h 02m" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor comes back


def test_without_rich_a_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.live", None)
    file = Terminal()
    with LiveLine(1000, file=file) as line:
        line.update(METRICS)
    assert file.getvalue() == metrics_text(METRICS, 1000) + "\n"


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_what_is_printed_after_the_last_step_comes_after_its_line(
    kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    file = kind()
    with LiveLine(160, file=file, every_s=1e9) as line:
        for step in (1, 160):
            line.update({"step": step})
        line.finish()
        line.print("saved step 160")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())  # colours, the cursor
    assert text.rindex("step 160/160") < text.index("saved step 160")
    assert text.endswith("saved step 160\n")


def test_long_waiting_is_told_again_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "REPEATED_AFTER_S", 0.001)
    file = io.StringIO()
    with waiting_line("compiling", file=file):
        eventually(lambda: file.getvalue().count("\n") >= 3)
    first, *rest = file.getvalue().splitlines()
    assert first == "compiling …"
    assert set(rest) == {"compiling … 0 s"}


def test_waiting_is_told_once_without_a_terminal() -> None:
    file = io.StringIO()
    with waiting_line("compiling", file=file):
        pass
    with waiting_line("compiling", file=file, shown=False):
        pass
    assert file.getvalue() == "compiling …\n"


def test_waiting_counts_seconds_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    file = Terminal()
    with waiting_line("compiling", file=file):
        eventually(lambda: "compiling … 1 s" in file.getvalue())


def test_a_line_that_is_not_shown_prints_nothing() -> None:
    file = io.StringIO()
    with LiveLine(10, file=file, shown=False) as line:
        line.update(METRICS)
        line.print("never")
    assert file.getvalue() == ""


def test_a_first_step_that_takes_long_is_told_until_the_speed_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "REPEATED_AFTER_S", 0.001)
    file = io.StringIO()
    with LiveLine(10, file=file, first=4) as line:
        eventually(lambda: "step 5 … 0 s" in file.getvalue())
        line.update({"step": 5, "loss": 2.0})
        eventually(lambda: "step 6 … 0 s" in file.getvalue())
        line.update({"step": 6, "loss": 2.0, "step_seconds": 0.5})
        before = file.getvalue()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("step ")]
        assert file.getvalue() == before
