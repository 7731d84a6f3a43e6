"""All processes of a run agree: whether one of them failed, and on the settings they started with.

One process notices a failure: its disk is full, or a file it reads is damaged. The others would
continue into a collective and hang. So each process reports, and all get the same verdict. Without
any device, so it is safe in a background thread during training.

Settings are compared before anything is compiled. A difference is one error in every process:

    the processes were started with different settings: --batch: 8 in processes 0 and 2, 16 in
    process 1; …
"""

import abc
import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from meshwright.errors import MeshwrightError
from meshwright.launch.coordinator import Store, coordinator_store
from meshwright.launch.failure import AgreedError, look_interval_s
from meshwright.launch.processes import Joined

TIMEOUT_S = 1800.0  # the slowest save or read of one process
SETTINGS_TIMEOUT_S = 300.0  # for the slowest process to open its data
POLL_S = 0.1
MOST_TOLD = 12  # differences in one message

_T = TypeVar("_T")
Reports = Mapping[int, Any]  # by process; those that did not report in time are missing


class Agreement(abc.ABC):
    """A series of agreements. Every process must make the same calls in the same order."""

    member = "process"  # as messages name one

    @abc.abstractmethod
    def exchange(self, report: Any, decide: Callable[[Reports], str]) -> str:
        """What `decide` makes of all reports, the same in every process. They must be JSON."""

    def agree(self, problem: str, about: str = "") -> str:
        """The problem of the first process that has one, "" if none has.

        `about` names the operation; a difference between processes is a problem too.
        """
        return self.exchange((problem, about), self._first_problem)

    def check(self, problem: str, about: str = "") -> None:
        """Raise the agreed problem, if there is one, in every process."""
        if verdict := self.agree(problem, about):
            raise MeshwrightError(verdict)

    def from_first(self, text: str) -> str:
        """The text of process 0, in every process; used for what only process 0 sees on disk."""
        return self.exchange(text, lambda reports: str(reports[0]))

    @contextlib.contextmanager
    def collective_errors(
        self, about: str, advised: str = "", why: Callable[[Exception], str] | None = None
    ) -> Iterator[Callable[[Callable[[], Any]], Any]]:
        """What one process fails at, all raise at the end of the block: `catch(lambda: work())`.

        After a failure, `catch` does nothing and returns None. `why` explains an exception.
        """
        problem = ""

        def catch(act: Callable[[], Any]) -> Any:
            nonlocal problem
            if problem:
                return None
            try:
                return act()
            except MeshwrightError as error:
                problem = str(error)
            except Exception as error:  # of any library: the other processes wait for this one
                problem = f"{type(error).__name__}: {error}"
                if why is not None:
                    with contextlib.suppress(Exception):  # a disk that cannot be read either
                        problem = why(error)
            return None

        yield catch
        if verdict := self.agree(problem, about):
            raise MeshwrightError(f"{about}: {verdict}{advised}")

    def _first_problem(self, reports: Reports) -> str:
        first = reports[0][1]
        for process, (problem, about) in reports.items():
            if problem:
                # a problem agreed on before already names its process
                named = len(reports) == 1 or problem.startswith(f"{self.member} ")
                return str(problem) if named else f"{self.member} {process}: {problem}"
            if about != first:
                return (
                    f"{self.member} 0 is at {first}, {self.member} {process} at {about}; "
                    "all must do the same"
                )
        return ""


def jax_run() -> tuple[Store | None, Joined]:
    """This process as jax.distributed knows it, and the store; None for a single process."""
    import jax

    joined, store = Joined(jax.process_index(), jax.process_count()), coordinator_store()
    if joined.processes > 1 and store is None:
        raise MeshwrightError(
            f"{joined.processes} processes, but jax.distributed.initialize() was not called; "
            "checkpoints of several processes need it"
        )
    return store if joined.processes > 1 else None, joined


_instances = itertools.count()


class StoreAgreement(Agreement):
    """Agreements through the coordinator's store: process 0 decides, the others read its verdict.

    >>> StoreAgreement("example").agree("")
    ''

    `run` is called when it is needed, since asking jax starts its devices.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[], tuple[Store | None, Joined]] = jax_run,
        timeout_s: float = TIMEOUT_S,
        poll_s: float = POLL_S,
    ) -> None:
        # processes open them in the same order, so the numbers match
        self._folder = f"meshwright/{name}/{next(_instances)}"
        self._number = itertools.count()
        self._run, self._timeout_s, self._poll_s = run, timeout_s, poll_s

    def exchange(self, report: Any, decide: Callable[[Reports], str]) -> str:
        store, joined = self._run()
        if store is None:
            return decide({0: report})
        process, processes = joined.process_id, joined.processes
        number = next(self._number)
        reports_folder, verdict_key = f"{self._folder}/of/", f"{self._folder}/verdict"
        reports: dict[int, Any] = {}

        # keys are written again: no process reports twice before all have read the verdict between
        def all_reported() -> bool | None:
            nonlocal reports
            texts = sorted(store.get_all(reports_folder).items())
            read = {int(key.rpartition("/")[2]): json.loads(text) for key, text in texts}
            reports = {other: found for other, (at, found) in read.items() if at == number}
            return len(reports) == processes or None

        def verdict_of_first() -> tuple[str, str] | None:
            at, *verdict = json.loads(store.get(verdict_key) or "[null]")
            return (verdict[0], verdict[1]) if at == number else None

        store.put(f"{reports_folder}{process:06d}", json.dumps([number, report]))
        interval_s = look_interval_s(processes, self._poll_s)
        if process == 0:
            missing = ""
            if _wait(all_reported, self._timeout_s, interval_s) is None:
                missing = _did_not_report(set(range(processes)) - set(reports), self._timeout_s)
            verdict = "" if missing else decide(reports)
            store.put(verdict_key, json.dumps([number, verdict, missing]))
        else:  # process 0 times out first, and knows which process is missing
            answer = _wait(verdict_of_first, self._timeout_s + 30, interval_s)
            verdict, missing = answer or ("", _did_not_report({0}, self._timeout_s + 30))
        if missing:
            raise AgreedError(missing)
        return verdict


def _wait(look: Callable[[], _T | None], timeout_s: float, interval_s: float) -> _T | None:
    """What `look` returns, called more and more rarely while it is None."""
    end, pause_s = time.monotonic() + timeout_s, 0.002
    while (found := look()) is None and time.monotonic() < end:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, interval_s)
    return found


def _did_not_report(missing: set[int], timeout_s: float) -> str:
    return (
        f"{_named(sorted(missing))} did not report within {timeout_s:g} s: it has exited or hangs; "
        "see its log, and restart every process"
    )


class Fact(NamedTuple):
    """A value to compare, as text; for a file, a checksum of its content, and its name."""

    value: str
    name: str = ""


Facts = Mapping[str, Fact]


def compare_processes(
    read: Callable[[], _T],
    facts_of: Callable[[_T], Facts],
    store: Store | None,
    joined: Joined,
    *,
    timeout_s: float = SETTINGS_TIMEOUT_S,
    poll_s: float = POLL_S,
) -> _T:
    """What `read` returns; an AgreedError in every process if facts differ or one cannot read."""
    if store is None:
        return read()
    settings: list[_T] = []
    try:
        settings.append(read())
        report: Facts | str = facts_of(settings[0])
    except MeshwrightError as mistake:
        report = str(mistake)
    agreement = StoreAgreement("settings", lambda: (store, joined), timeout_s, poll_s)
    if verdict := agreement.exchange(report, _different_settings):
        raise AgreedError(verdict)
    return settings[0]


def _different_settings(reports: Reports) -> str:
    """Why the run cannot start, in one line; empty if it can."""
    problems = {process: text for process, text in reports.items() if isinstance(text, str)}
    if problems:
        process, problem = next(iter(problems.items()))
        everywhere = len(problems) == len(reports) and len(set(problems.values())) == 1
        return problem if everywhere else f"process {process}: {problem}"
    differences = differing(
        {
            process: {name: Fact(*fact) for name, fact in facts.items()}
            for process, facts in reports.items()
        }
    )
    if not differences:
        return ""
    more = len(differences) - MOST_TOLD
    return (
        "the processes were started with different settings: "
        + "; ".join(differences[:MOST_TOLD])
        + (f"; and {more} more" if more > 0 else "")
        + ". Start every process with the same command, except for --process-id"
    )


def differing(facts: Mapping[int, Facts]) -> list[str]:
    """`"--batch: 8 in processes 0 and 2, 16 in process 1"` for each fact that differs."""
    differences = []
    for setting in dict.fromkeys(name for of_process in facts.values() for name in of_process):
        by_value: dict[str, list[int]] = {}
        names: dict[str, str] = {}
        for process, of_process in facts.items():
            fact = of_process.get(setting, Fact("unknown"))  # to another version
            by_value.setdefault(fact.value, []).append(process)
            names.setdefault(fact.value, fact.name)
        if len(by_value) > 1:
            values = []
            for value, processes in by_value.items():
                shown = names[value] or value
                if list(names.values()).count(shown) > 1:
                    shown += f" (content {value[:8]})"
                values.append(f"{shown} in {_named(processes)}")
            differences.append(f"{setting}: {', '.join(values)}")
    return differences


def _named(processes: Sequence[int]) -> str:
    """`"process 3"`, `"processes 0, 1 and 5"`, `"processes 0, 1, 2, 3 and 60 more"`."""
    if len(processes) == 1:
        return f"process {processes[0]}"
    numbers = [str(process) for process in processes[:5]]
    more = len(processes) - len(numbers)
    last = f"{more} more" if more else numbers.pop()
    return f"processes {', '.join(numbers)} and {last}"
