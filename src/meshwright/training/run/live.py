"""The line that moves while a run trains; plain lines, now and then, where there is no terminal.

step 120/1,000  loss 2.314  12.3K tok/s  393 TFLOP/s 39.8% MFU  71.2/139.8 GiB  ETA 1h 02m
"""

import contextlib
import math
import sys
import threading
import time
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from meshwright.files import TerminalOutput, print_line
from meshwright.present import GIB, count_text, duration_text

PLAIN_EVERY_S = 10.0
REPEATED_AFTER_S = 4.0


def eta_seconds(step: int, total_steps: int, step_seconds: float | None) -> float | None:
    """What is left; None while the step time is not known."""
    return None if not step_seconds else max(0, total_steps - step) * step_seconds


def metrics_text(metrics: Mapping[str, Any], total_steps: int) -> str:
    """One line of text; metrics that are missing are left out.

    >>> metrics_text({"step": 40, "loss": 2.5, "step_seconds": 0.5}, 100)
    'step 40/100  loss 2.500  ETA 30s'
    """
    step = int(metrics["step"])
    width = len(f"{total_steps:,}")
    parts = [f"step {step:>{width},}/{total_steps:,}" if total_steps else f"step {step:,}"]
    for name, label, form in (("loss", "loss", ".3f"), ("eval_loss", "eval", ".3f")):
        if name in metrics:
            parts.append(f"{label} {metrics[name]:{form}}")
    if "tokens_per_second" in metrics:
        parts.append(f"{count_text(metrics['tokens_per_second'])} tok/s")
    speed = []
    tflops, on_known_chip = metrics.get("tflops_per_device", 0.0), metrics.get("mfu") is not None
    if on_known_chip or tflops >= 1:  # less is a CPU, of which it says nothing
        speed.append(f"{tflops:.0f} TFLOP/s" if tflops >= 10 else f"{tflops:.3g} TFLOP/s")
    if on_known_chip:
        speed.append(f"{metrics['mfu']:.1%} MFU")
    if speed:
        parts.append(" ".join(speed))
    if "memory_bytes" in metrics:
        limit = metrics.get("memory_limit_bytes")
        of = f"/{limit / GIB:.1f}" if limit else ""
        parts.append(f"{metrics['memory_bytes'] / GIB:.1f}{of} GiB")
    if metrics.get("dropped"):
        parts.append(f"{metrics['dropped']:.1%} dropped by experts")
    if metrics.get("skipped_steps"):
        parts.append(f"{metrics['skipped_steps']:.0f} skipped")
    left = eta_seconds(step, total_steps, metrics.get("step_seconds"))
    if left is not None and total_steps:
        parts.append(f"ETA {duration_text(left)}")
    return "  ".join(parts)


class LiveLine:
    """`update(metrics)` after each step, in process 0; `close()`, or use it in `with`.

    On a terminal with rich: one line that is rewritten in place, and `print` writes above it.
    Elsewhere: a plain line at the first and the last step and every `every_s` seconds. The steps
    are those after `first`.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        every_s: float = PLAIN_EVERY_S,
        file: TextIO | None = None,
        shown: bool = True,
        first: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._every_s, self._clock = every_s, clock
        self._file = file or sys.stdout
        self._shown = shown
        self._next = -math.inf
        self._last = ""
        self._printed = ""
        self._live = _rich_live(self._file) if shown else None
        self._silence = contextlib.ExitStack()
        self._wait(first + 1)

    def _wait(self, step: int) -> None:
        """Say that a step takes long, until it is known how long steps take."""
        self._silence.close()
        if self._live is None and self._shown:
            self._silence.enter_context(_repeated(f"step {step:,}", self._file, at_once=False))

    def update(self, metrics: Mapping[str, Any]) -> None:
        if not self._shown:
            return
        if "step_seconds" in metrics:
            self._silence.close()
        else:
            self._wait(int(metrics["step"]) + 1)
        self._last = metrics_text(metrics, self._total)
        if self._live is not None:
            self._live.update(_styled(self._last))
        elif self._clock() >= self._next:
            self._print_last()

    def print(self, text: str) -> None:
        """A line that stays, above the one that moves."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif self._shown:
            print_line(text, self._file)

    def finish(self) -> None:
        """The line of the last step stays; what is printed from now on comes after it."""
        self._silence.close()
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._printed = self._last
        elif self._shown and self._last != self._printed:
            self._print_last()

    def close(self) -> None:
        self.finish()
        self._shown = False

    def __enter__(self) -> "LiveLine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _print_last(self) -> None:
        print_line(self._last, self._file)
        self._printed = self._last
        self._next = self._clock() + self._every_s


@contextlib.contextmanager
def waiting_line(
    activity: str, *, shown: bool = True, at_once: bool = True, file: TextIO | None = None
) -> Iterator[None]:
    """`compiling … 12 s` while the block runs: counted up on a terminal, else lines."""
    file = file or sys.stdout
    live = _rich_live(file, transient=True) if shown else None
    if live is None:
        with _repeated(activity, file, at_once) if shown else contextlib.nullcontext():
            yield
        return
    start = time.monotonic()

    class Elapsed:
        def __rich__(self) -> Any:
            return _styled(f"{activity} … {time.monotonic() - start:.0f} s")

    try:
        live.update(Elapsed())
        yield
    finally:
        live.stop()


@contextlib.contextmanager
def _repeated(activity: str, file: TextIO, at_once: bool = True) -> Iterator[None]:
    """Print the activity at once and, while the block runs, every 4 s; after a minute rarer."""
    done = threading.Event()

    def repeat() -> None:
        start = time.monotonic()
        pause = REPEATED_AFTER_S
        while not done.wait(pause):
            elapsed = time.monotonic() - start
            print_line(f"{activity} … {elapsed:.0f} s", file)
            pause = max(REPEATED_AFTER_S, elapsed / 15)

    if at_once:
        print_line(f"{activity} …", file)
    thread = threading.Thread(target=repeat, name=activity, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _rich_live(file: TextIO, transient: bool = False) -> Any | None:
    if not file.isatty():
        return None
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        return None
    console = Console(file=typing.cast(TextIO, TerminalOutput(file)))
    if console.is_dumb_terminal:
        return None
    live = Live(console=console, refresh_per_second=4, transient=transient)
    live.start()
    return live


def _styled(text: str) -> Any:
    from rich.text import Text

    styled = Text(text, no_wrap=True, overflow="ellipsis")
    styled.highlight_regex(r"loss [^ ]+|eval [^ ]+", "bold")
    styled.highlight_regex(r"ETA .*|/[0-9.,]+( GiB)?", "dim")
    return styled
