"""All processes get the same verdict: of problems, of differences; a missing one is named."""

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.launch.memory_store import MemoryStore

from meshwright.errors import MeshwrightError
from meshwright.launch import AgreedError, Fact, Joined, StoreAgreement, compare_processes
from meshwright.launch.agreement import MOST_TOLD


def in_threads(work: Callable[[int], str], processes: Sequence[int]) -> list[str]:
    """What each process returns or raises."""
    told = dict[int, str]()

    def run(process: int) -> None:
        try:
            told[process] = work(process)
        except MeshwrightError as mistake:
            told[process] = str(mistake)

    threads = [threading.Thread(target=run, args=(process,)) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [told[process] for process in processes]


@pytest.fixture(autouse=True)
def same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are threads share a counter: each agreement has the same number here."""
    monkeypatch.setattr("meshwright.launch.agreement._instances", itertools.repeat(0))


def compared(facts: Sequence[Any], processes: int | None = None) -> list[str]:
    """What each process is told; empty where it may begin. None of `facts` never comes."""
    store = MemoryStore()

    def work(process: int) -> str:
        def read() -> Any:
            if isinstance(facts[process], str):
                raise MeshwrightError(facts[process])
            return facts[process]

        try:
            joined = Joined(process, processes or len(facts))
            compare_processes(read, lambda read: read, store, joined, timeout_s=0.5, poll_s=0.01)
        except AgreedError as mistake:
            return str(mistake)
        return ""

    return in_threads(work, [i for i, one in enumerate(facts) if one is not None])


def agreement(store: MemoryStore, process: int, processes: int) -> StoreAgreement:
    return StoreAgreement("test", lambda: (store, Joined(process, processes)), 0.5, 0.01)


def test_all_get_the_first_problem_and_can_agree_again() -> None:
    store = MemoryStore()

    def work(process: int) -> str:
        mine = agreement(store, process, 3)
        texts = [mine.agree(problem if process else "") for problem in ("", "disk full", "")]
        return "|".join([*texts, mine.from_first(f"of {process}"), mine.agree("", f"{process}")])

    found = in_threads(work, range(3))
    assert found == [found[0]] * 3
    assert found[0] == (
        "|process 1: disk full||of 0|process 0 is at 0, process 1 at 1; all must do the same"
    )
    assert len(store) == 4  # however often they agree: three reports and a verdict


def test_what_one_process_fails_at_all_raise() -> None:
    store = MemoryStore()

    def work(process: int) -> str:
        with agreement(store, process, 2).collective_errors("saving", "; retry", str) as catch:
            catch(lambda: [0][process])
            assert catch(lambda: "later") == (None if process else "later")
        return "not raised"

    assert in_threads(work, range(2)) == ["saving: process 1: list index out of range; retry"] * 2
    alone = StoreAgreement("alone", lambda: (None, Joined()))
    assert alone.agree("disk full") == "disk full"  # there is no other process to name


def test_a_process_that_never_reports_a_result_is_named() -> None:
    store = MemoryStore()
    found = in_threads(lambda process: agreement(store, process, 3).agree(""), range(2))
    assert found == [found[0]] * 2
    assert found[0].startswith("process 2 did not report within 0.5 s")


def test_processes_with_the_same_facts_begin() -> None:
    same = {"--batch": Fact("8"), "--data": Fact("1f3a", "here.store")}
    moved = {"--batch": Fact("8"), "--data": Fact("1f3a", "/mnt/there.store")}
    assert compared([same, moved, same]) == ["", "", ""]


def test_every_process_is_told_each_difference_and_each_value() -> None:
    found = compared(
        [
            {"--batch": Fact("8"), "--seed": Fact("0"), "--steps": Fact("5")},
            {"--batch": Fact("16"), "--seed": Fact("1"), "--steps": Fact("5")},
            {"--batch": Fact("8"), "--seed": Fact("2"), "--steps": Fact("5")},
        ]
    )
    assert found == [found[0]] * 3
    assert "--batch: 8 in processes 0 and 2, 16 in process 1" in found[0]
    assert "--seed: 0 in process 0, 1 in process 1, 2 in process 2" in found[0]
    assert "--steps" not in found[0]
    assert "\n" not in found[0]


def test_files_of_one_name_and_other_contents_are_told_apart() -> None:
    (told, _) = compared(
        [{"--data": Fact("aaaabbbbcc", "my.store")}, {"--data": Fact("ddddeeeeff", "my.store")}]
    )
    assert (
        "my.store (content aaaabbbb) in process 0, my.store (content ddddeeee) in process 1" in told
    )


def test_a_setting_that_only_another_version_has_is_a_difference() -> None:
    (told, _) = compared([{"--batch": Fact("8")}, {"--batch": Fact("8"), "--new": Fact("1")}])
    assert "--new: unknown in process 0, 1 in process 1" in told


def test_many_differences_are_cut_short() -> None:
    names = [f"--{i}" for i in range(MOST_TOLD + 3)]
    (told, _) = compared([dict.fromkeys(names, Fact("0")), dict.fromkeys(names, Fact("1"))])
    assert f"--{MOST_TOLD - 1}:" in told
    assert f"--{MOST_TOLD}:" not in told
    assert "and 3 more" in told


def test_a_process_that_cannot_read_its_settings_tells_all() -> None:
    found = compared([{"--batch": Fact("8")}, "token store 'a' does not exist"])
    assert found == ["process 1: token store 'a' does not exist"] * 2
    assert compared(["no such model"] * 2) == ["no such model"] * 2


def test_a_process_that_never_reports_is_named() -> None:
    found = compared([{"--batch": Fact("8")}, {"--batch": Fact("8")}, None, None], processes=4)
    assert found == [found[0]] * 2
    assert "processes 2 and 3 did not report" in found[0]


def test_facts_that_hundreds_of_processes_share_are_not_listed_one_by_one() -> None:
    facts = [{"--batch": Fact("8")}] * 40 + [{"--batch": Fact("9")}]
    told = compared(facts)[0]
    assert "8 in processes 0, 1, 2, 3, 4 and 35 more, 9 in process 40" in told
