"""Compare the settings of all processes of a run, before anything is compiled.

    compare_processes({"--batch": Fact("8")}, store, process_id=1, processes=2)

Each process writes its facts to the coordinator's store; process 0 compares them and writes the
verdict, which all read. A difference is one error, the same in every process:

    the processes were started with different settings: --batch: 8 in processes 0 and 2, 16 in
    process 1; …
"""

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from meshwright.launch.coordinator import Store
from meshwright.launch.ending import AgreedError, look_interval_s

PATIENCE_S = 300.0  # for the slowest process to open its data
POLL_S = 0.1
MOST_TOLD = 12  # differences in one message
SAME = "same"

_T = TypeVar("_T")
_comparisons = itertools.count()  # the same in every process: each compares in the same order


class Fact(NamedTuple):
    """A value to compare, as text; for a file, a checksum of its content, and its name."""

    value: str
    name: str = ""


Facts = Mapping[str, Fact]


def compare_processes(
    facts: Facts | str,
    store: Store,
    process_id: int,
    processes: int,
    *,
    patience_s: float = PATIENCE_S,
    poll_s: float = POLL_S,
    folder: str = "",
) -> None:
    """Raise an AgreedError in every process if facts differ. Every process must call.

    A process that could not read its settings gives the reason, a text, instead of facts.
    """
    folder = folder or f"meshwright/settings/{next(_comparisons)}"
    store.put(f"{folder}/of/{process_id:06d}", json.dumps(facts))
    verdict_key = f"{folder}/verdict"
    interval_s = look_interval_s(processes, poll_s)
    if process_id == 0:
        told = _collected(store, f"{folder}/of/", processes, patience_s, interval_s)
        verdict = store.put_once(verdict_key, _verdict(told, processes, patience_s) or SAME)
    else:
        # process 0 times out first, and knows which process is missing
        found = _waited(lambda: store.get(verdict_key), patience_s + 30, interval_s)
        verdict = found or "process 0 did not compare the settings of the processes in time"
    if verdict != SAME:
        raise AgreedError(verdict)


def _collected(
    store: Store, folder: str, processes: int, patience_s: float, interval_s: float
) -> dict[int, Facts | str]:
    """The facts of each process; those that did not report in time are missing."""
    texts: dict[str, str] = {}

    def all_there() -> bool | None:
        texts.update(store.get_all(folder))
        return len(texts) >= processes or None

    _waited(all_there, patience_s, interval_s)
    told: dict[int, Facts | str] = {}
    for key, text in sorted(texts.items()):
        data = json.loads(text)
        if not isinstance(data, str):
            data = {name: Fact(*fact) for name, fact in data.items()}
        told[int(key.rpartition("/")[2])] = data
    return told


def _waited(look: Callable[[], _T | None], patience_s: float, interval_s: float) -> _T | None:
    end = time.monotonic() + patience_s
    while (found := look()) is None and time.monotonic() < end:
        time.sleep(interval_s)
    return found


def _verdict(told: Mapping[int, Facts | str], processes: int, patience_s: float) -> str:
    """Why the run cannot start, in one line; empty if it can."""
    missing = [process for process in range(processes) if process not in told]
    if missing:
        return (
            f"{_named(missing)} did not report its settings within {patience_s:g} s of joining the "
            "run: it has exited or hangs; see its log, and restart every process"
        )
    problems = {process: text for process, text in told.items() if isinstance(text, str)}
    if problems:
        process, problem = next(iter(problems.items()))
        everywhere = len(problems) == processes and len(set(problems.values())) == 1
        return problem if everywhere else f"process {process}: {problem}"
    facts = {process: one for process, one in told.items() if not isinstance(one, str)}
    differences = list(differing(facts))
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
    found = []
    for setting in dict.fromkeys(name for one in facts.values() for name in one):
        by_value: dict[str, list[int]] = {}
        names: dict[str, str] = {}
        for process, one in facts.items():
            fact = one.get(setting, Fact("unknown"))  # to another version
            by_value.setdefault(fact.value, []).append(process)
            names.setdefault(fact.value, fact.name)
        if len(by_value) > 1:
            told = []
            for value, processes in by_value.items():
                shown = names[value] or value
                if list(names.values()).count(shown) > 1:
                    shown += f" (content {value[:8]})"
                told.append(f"{shown} in {_named(processes)}")
            found.append(f"{setting}: {', '.join(told)}")
    return found


def _named(processes: Sequence[int]) -> str:
    """`"process 3"`, `"processes 0, 1 and 5"`, `"processes 0, 1, 2, 3 and 60 more"`."""
    if len(processes) == 1:
        return f"process {processes[0]}"
    told = [str(process) for process in processes[:5]]
    more = len(processes) - len(told)
    last = f"{more} more" if more else told.pop()
    return f"processes {', '.join(told)} and {last}"
