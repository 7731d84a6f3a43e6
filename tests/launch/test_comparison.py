"""Processes with different facts all learn of every difference; a missing one is named."""

import threading
from collections.abc import Sequence
from typing import Any

from meshwright.launch import AgreedError, Fact, compare_processes
from meshwright.launch.comparison import MOST_TOLD


class Shared:
    """A store for processes that are threads."""

    def __init__(self) -> None:
        self.lock, self.texts = threading.Lock(), dict[str, str]()

    def get(self, key: str) -> str | None:
        with self.lock:
            return self.texts.get(key)

    def get_all(self, folder: str) -> dict[str, str]:
        with self.lock:
            return {key: text for key, text in self.texts.items() if key.startswith(folder)}

    def put(self, key: str, text: str) -> None:
        with self.lock:
            self.texts[key] = text

    def put_once(self, key: str, text: str) -> str:
        with self.lock:
            return self.texts.setdefault(key, text)


def compared(facts: Sequence[Any], processes: int | None = None) -> list[str]:
    """What each process is told; empty where it may begin. None of `facts` never comes."""
    store, told = Shared(), dict[int, str]()

    def work(process: int) -> None:
        try:
            compare_processes(
                facts[process], store, process, processes or len(facts),
                patience_s=0.5, poll_s=0.01, folder="test",
            )  # fmt: skip
            told[process] = ""
        except AgreedError as mistake:
            told[process] = str(mistake)

    threads = [
        threading.Thread(target=work, args=(i,)) for i, one in enumerate(facts) if one is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [told[process] for process in sorted(told)]


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
