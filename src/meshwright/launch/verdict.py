"""Find the process that the others wait for, from the last report of each process.

step 41 has not finished for 120 s: process 3 (node-3) was last seen at step 40, in
reader.py:88 next_batch; the other 7 wait in step 41
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence

REPORTS = "meshwright/watchdog/"  # prefix of their keys in the store


@dataclasses.dataclass(frozen=True)
class Report:
    """The state that one process reports, and how long it has not changed."""

    process: int
    host: str = "host unknown"
    step: int | None = None  # the step it last began; None: before the first
    doing: str = ""  # "saving", "compiling"; empty: an ordinary step
    seconds: float = 0.0  # since its last progress
    limit_s: float = 0.0  # how long that may take
    where: str = ""  # the line its main thread is at
    count: int = 0  # increases with every report
    left: bool = False  # it has left the loop
    silent_s: float = 0.0  # by the reader's clock: since `count` last grew

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def read(cls, text: str) -> "Report":
        return cls(**json.loads(text))


def read_reports(texts: Mapping[str, str]) -> dict[int, Report]:
    """Reports by process; unreadable ones, of another version, are ignored."""
    reports = {}
    for text in texts.values():
        try:
            report = Report.read(text)
        except (json.JSONDecodeError, TypeError):
            continue
        reports[report.process] = report
    return reports


def verdict(reports: Sequence[Report], mine: int, silence_s: float) -> str | None:
    """Why the run must end, in one line; None if it need not.

    It must end when this process and every process it may wait for (those not ahead of it) are over
    their limits; or when one of those has not reported for `silence_s`.
    """
    me = next(report for report in reports if report.process == mine)
    others = [report for report in reports if report.process != mine]
    no_further = [other for other in others if _place(other) <= _place(me)]
    silent = [other for other in no_further if not other.left and other.silent_s > silence_s]
    if silent and me.seconds > silence_s:
        return f"{_stall(me)}: {_silent(silent)}{_rest(reports, silent)}"
    if me.seconds <= me.limit_s:
        return None
    if any(not other.left and other.seconds < other.limit_s for other in no_further):
        return None
    return f"{_stall(me, reports)}: {_blame(reports, me)}"


def _place(report: Report) -> float:
    return -1.0 if report.step is None else float(report.step)


def _stall(me: Report, reports: Sequence[Report] = ()) -> str:
    furthest = max([me, *reports], key=_place).step
    what = (
        "the first step has not begun" if furthest is None else f"step {furthest} has not finished"
    )
    return f"{what} for {me.seconds:.0f} s{f' ({me.doing})' if me.doing else ''}"


def _blame(reports: Sequence[Report], me: Report) -> str:
    if len(reports) == 1:
        return f"this process is in {me.where}" if me.where else "this process hangs"
    last = min(map(_place, reports))
    behind = [report for report in reports if _place(report) == last]
    if len(behind) < len(reports):
        return _named(behind) + _rest(reports, behind)
    left = [report for report in reports if report.left]
    if left:
        return _named(left) + _rest(reports, left)
    # all are in the same step: the odd one out is the one whose main thread is elsewhere
    places = [report.where for report in reports]
    common = max(set(places), key=places.count)
    odd = [report for report in reports if report.where != common]
    if odd and len(odd) * 2 < len(reports) + 1:
        return _named(odd) + _rest(reports, odd)
    return f"all {len(reports)} processes are in it; a collective or the network hangs"


def _named(guilty: Sequence[Report]) -> str:
    told = []
    for report in guilty[:4]:
        where = f", in {report.where}" if report.where else ""
        doing = f" ({report.doing})" if report.doing else ""
        when = (
            "has not begun the first step"
            if report.step is None
            else f"left the loop at step {report.step}"
            if report.left
            else f"was last seen at step {report.step}{doing}"
        )
        told.append(f"process {report.process} ({report.host}) {when}{where}")
    more = f", and {len(guilty) - 4} more" if len(guilty) > 4 else ""
    return "; ".join(told) + more


def _silent(silent: Sequence[Report]) -> str:
    told = [
        f"process {report.process} ({report.host}) has not reported for {report.silent_s:.0f} s"
        for report in silent[:4]
    ]
    more = f", and {len(silent) - 4} more" if len(silent) > 4 else ""
    return "; ".join(told) + more + ": it is stopped, swapped out or disconnected"


def _rest(reports: Sequence[Report], guilty: Sequence[Report]) -> str:
    number = len(reports) - len(guilty)
    furthest = max(map(_place, reports))
    place = f"in step {furthest:.0f}" if furthest >= 0 else "before the first step"
    if number < 1:
        return ""
    return f"; the other {number} wait {place}" if number > 1 else f"; the other waits {place}"
