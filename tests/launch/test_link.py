"""Messages between processes, here between threads; tests/serving has real processes."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator

import pytest
from tests.launch.memory_store import MemoryStore
from tests.patience import PATIENCE_S, eventually

from meshwright.errors import MeshwrightError
from meshwright.launch import link as links
from meshwright.launch.link import Follower, Leader


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What processes would have printed at their end."""
    texts: list[str] = []

    def end(text: str, *_: object) -> None:
        texts.append(text)
        if threading.current_thread() is threading.main_thread():
            raise SystemExit

    monkeypatch.setattr(links, "end_process", end)
    monkeypatch.setattr(links, "coordinator_host", lambda: "127.0.0.1")
    return texts


@contextlib.contextmanager
def linked(followers: int = 2) -> Iterator[tuple[Leader, list[Follower]]]:
    store = MemoryStore()
    found: list[Follower] = []
    threads = [
        threading.Thread(target=lambda i=i: found.append(Follower(i, store)))
        for i in range(1, followers + 1)
    ]
    for thread in threads:
        thread.start()
    leader = Leader(followers + 1, store, patience_s=10)
    for thread in threads:
        thread.join()
    found.sort(key=lambda follower: follower.process_id)
    with leader:
        for follower in found:
            follower.__enter__()
        yield leader, found
    for follower in found:
        follower.close()


def wait_for(texts: list[str], number: int) -> None:
    eventually(lambda: len(texts) >= number)
    assert len(texts) == number, texts


def test_messages_arrive_whole_and_in_order_until_the_leader_closes(ended: list[str]) -> None:
    big = bytes(range(256)) * 4096
    with linked() as (leader, (first, second)):
        leader.send(b"a")
        leader.send(b"", {2})
        leader.send(big)
        leader.close()
        assert list(first) == [b"a", big]
        assert list(second) == [b"a", b"", big]
    assert not ended


def test_the_leader_hears_messages_and_requests_to_stop() -> None:
    heard: list[tuple[int, bytes]] = []
    stopped = threading.Event()
    with linked() as (leader, (first, second)):
        leader.on_message = lambda *message: heard.append(message)
        leader.on_stop = stopped.set
        second.send(b"ready")
        first.ask_to_stop()
        assert stopped.wait(PATIENCE_S)
        eventually(lambda: heard)
        assert heard == [(2, b"ready")]


def test_a_follower_that_is_gone_is_named_to_the_leader_and_the_others(ended: list[str]) -> None:
    lost: list[str] = []
    with linked() as (leader, (first, second)):
        leader.on_lost = lost.append
        second.leader._socket.shutdown(socket.SHUT_RDWR)  # as the kernel does for a killed process
        wait_for(lost, 1)
        assert lost[0].startswith(f"process 2 ({socket.gethostname()}) is gone: it was killed")
        assert leader.cause() == lost[0] == leader.failure
        wait_for(ended, 2)
        assert lost[0] in ended  # by the first; the second lost the leader
        assert first.failure == lost[0]


def test_a_leader_that_is_gone_ends_the_followers(ended: list[str]) -> None:
    with linked(1) as (leader, _):
        leader.closing = True
        for connection in leader.connections():
            connection._socket.shutdown(socket.SHUT_RDWR)
        wait_for(ended, 1)
        assert ended[0].startswith(f"process 0 ({socket.gethostname()}) is gone")


def test_silence_is_told_from_an_end(ended: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "HEARTBEAT_S", 0.02)  # of the leader
    monkeypatch.setattr(links, "SILENCE_S", 1.0)
    monkeypatch.setattr(Follower, "_beat", lambda self: None)
    with linked(1) as (leader, _):
        leader.on_lost = links.end_process
        wait_for(ended, 2)  # the leader tells the follower
        assert ended[0].startswith(f"process 1 ({socket.gethostname()}) has not responded for 1 s")
        assert ended[1] == ended[0]


def test_an_error_of_a_follower_is_told_to_all(
    ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "GRACE_S", 0.1)
    lost: list[str] = []
    with linked() as (leader, (first, _)):
        leader.on_lost = lost.append
        with pytest.raises(SystemExit):
            first.end(MeshwrightError("runs/first does not exist"))
        wait_for(lost, 1)
        host = socket.gethostname()
        assert lost == [f"process 1 ({host}) failed: runs/first does not exist"]
        wait_for(ended, 2)
        assert sorted(ended) == sorted([*lost, "runs/first does not exist"])


def test_an_error_that_a_lost_process_caused_is_told_as_that(ended: list[str]) -> None:
    with linked() as (leader, (first, second)):
        leader.on_lost = lambda text: None
        second.leader._socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(SystemExit):
            first.end(RuntimeError("Gloo: connection reset by peer"))
        assert any("process 2" in text and "is gone" in text for text in ended)
        assert not any("Gloo" in text for text in ended)


def test_strangers_are_not_let_in_and_a_missing_process_is_named() -> None:
    store = MemoryStore()
    failures: list[str] = []

    def lead() -> None:
        try:
            Leader(2, store, patience_s=1.0)
        except MeshwrightError as reason:
            failures.append(str(reason))

    thread = threading.Thread(target=lead)
    thread.start()
    eventually(lambda: "meshwright/link" in store)
    port = json.loads(store["meshwright/link"])["port"]
    hello = json.dumps({"key": "guessed", "process": 1, "host": "h"}).encode()
    for data in (b"GET / HTTP/1.1\r\n\r\n", links._HEAD.pack(links.HELLO, len(hello)) + hello):
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as stranger:
            stranger.sendall(data)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(10) == b""
    thread.join()
    assert failures[0].startswith("process 1 did not connect to process 0 within 1 s")
