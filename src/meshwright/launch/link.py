"""Messages between process 0 and the other processes of a run, and news of one that is gone.

    with open_link(joined, store) as link:      # in every process; None in a run of one process
        if isinstance(link, Leader):
            link.send(b"what to do")            # to every other process
        else:
            for message in link:                # until process 0 closes its link
                …

A TCP connection from each process to process 0. The kernel closes the connections of a process that
is killed, so the others know at once; a machine that vanishes is noticed when its heartbeats do not
come. Messages have their length and kind before them and are never unpickled. Whoever can reach the
coordinator can read the key that opens a connection: as with jax.distributed itself, the network
must be trusted.
"""

import abc
import contextlib
import hmac
import json
import logging
import queue
import secrets
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from types import TracebackType
from typing import Self

from meshwright.errors import MeshwrightError
from meshwright.interrupt import before_end
from meshwright.launch.coordinator import Store, coordinator_host
from meshwright.launch.failure import (
    EXIT_CODE,
    MISTAKE_CODE,
    AgreedError,
    end_process,
    farewell_s,
    first_to_say,
)
from meshwright.launch.processes import PATIENCE_S, Joined

_log = logging.getLogger("meshwright")

HEARTBEAT_S = 1.0
SILENCE_S = 20.0  # without a heartbeat; clients should hear of it within 30 s
GRACE_S = 3.0  # for the news of a lost process, after an error that it may have caused
_KEY = "meshwright/link"
_HEAD = struct.Struct("<BI")
HELLO, BEAT, DATA, STOP, END, FAILED = range(6)
RESTART = "see its log, and start every process again"


class Connection:
    """Framed messages over a socket."""

    def __init__(self, sock: socket.socket, process: int, host: str) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(SILENCE_S)
        self.process, self.host = process, host
        self._socket = sock
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return f"process {self.process} ({self.host})"

    def send(self, kind: int, data: bytes = b"") -> None:
        with self._lock:
            self._socket.sendall(_HEAD.pack(kind, len(data)) + data)

    def receive(self) -> tuple[int, bytes]:
        """The next message; an OSError if there is none."""
        kind, size = _HEAD.unpack(self._bytes(_HEAD.size))
        return kind, self._bytes(size)

    def _bytes(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise ConnectionResetError
            view = view[count:]
        return bytes(data)

    def lost(self, reason: OSError) -> str:
        """What a person should know when messages no longer come."""
        if isinstance(reason, TimeoutError):
            return (
                f"{self.name} has not responded for {SILENCE_S:.0f} s: it is stopped, overloaded "
                f"or disconnected; {RESTART}"
            )
        return f"{self.name} is gone: it was killed or has crashed; {RESTART}"

    def close(self) -> None:
        self._socket.close()


class Link(abc.ABC):
    """What both ends share. Leaving the block with an error ends all processes."""

    def __init__(self, process_id: int, store: Store) -> None:
        self.process_id, self.store = process_id, store
        self.host = socket.gethostname()
        self.closing = False
        self.failure: str | None = None  # why the run ends
        self._over = threading.Event()
        self._readers: list[threading.Thread] = []
        self._deciding = threading.Lock()

    def __enter__(self) -> Self:
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        for connection in self.connections():
            self._listen_to(connection)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self.end(error)

    def end(self, error: BaseException) -> None:
        """End this process because of an error, and tell the others."""
        if isinstance(error, AgreedError):
            self.closing = True
            text = str(error) if first_to_say(self.store, self.process_id) else ""
            end_process(text, MISTAKE_CODE, farewell_s(self.process_id, 1.0))
        mistake = isinstance(error, MeshwrightError)
        if not mistake and self.cause() is not None:
            end_process(self.failure or "", EXIT_CODE)
        text = str(error).partition("\n")[0] or type(error).__name__
        self.fail(text)
        if not mistake:
            traceback.print_exception(error)
        end_process(text, MISTAKE_CODE if mistake else 1)

    @contextlib.contextmanager
    def ends_on_error(self) -> Iterator[None]:
        """For threads: an error inside ends the process, as it does in the main thread."""
        try:
            yield
        except Exception as error:
            self.end(error)

    def cause(self) -> str | None:
        """The process that is gone and broke a step of this one, or None."""
        self._over.wait(GRACE_S)
        return self.failure

    def fail(self, text: str) -> None:
        """Tell the other processes that this one ends, and why, if they do not know."""
        self.closing = True
        if self.failure is None:
            self._tell(f"process {self.process_id} ({self.host}) failed: {text}")

    @abc.abstractmethod
    def close(self) -> None:
        """End the link, without an error."""

    @abc.abstractmethod
    def connections(self) -> Collection[Connection]:
        """To the processes that this one talks to."""

    def _tell(self, text: str) -> None:
        for connection in self.connections():
            with contextlib.suppress(OSError):
                connection.send(END if self.process_id == 0 else FAILED, text.encode())

    def _decide(self, text: str) -> bool:
        """Note why the run ends; False if that was known, or if it ends anyway."""
        with self._deciding:
            if self.failure is not None or self.closing:
                return False
            self.failure = text
        self._over.set()
        return True

    def _listen_to(self, connection: Connection) -> None:
        name = f"link-{connection.process}"
        reader = threading.Thread(target=self._read, args=(connection,), name=name, daemon=True)
        self._readers.append(reader)
        reader.start()

    def _read(self, connection: Connection) -> None:
        try:
            while self._take(connection, *connection.receive()):
                pass
        except OSError as reason:
            self._lose(connection.lost(reason))
        except Exception as error:  # a message that cannot be taken: nobody would wait for less
            _log.exception("a message of %s", connection.name)
            self._lose(f"a message of {connection.name} could not be read: {error!r}")
        finally:
            connection.close()

    @abc.abstractmethod
    def _take(self, connection: Connection, kind: int, data: bytes) -> bool:
        """Do what a message says; whether others follow."""

    @abc.abstractmethod
    def _lose(self, text: str) -> None:
        """The run ends for this reason."""

    def _beat(self) -> None:
        while not self.closing:
            for connection in self.connections():
                with contextlib.suppress(OSError):  # the thread that reads tells of it
                    connection.send(BEAT)
            time.sleep(HEARTBEAT_S)


class Leader(Link):
    """The link of process 0.

    Until somebody sets `on_lost` and `on_stop`, a lost process or a request to stop ends this one.
    """

    def __init__(self, processes: int, store: Store, patience_s: float = PATIENCE_S) -> None:
        super().__init__(0, store)
        self.on_message: Callable[[int, bytes], None] = lambda process, data: None
        self.on_lost: Callable[[str], None] = end_process
        self.on_stop: Callable[[], None] | None = None
        self._connections: dict[int, Connection] = {}
        self._accept(processes, store, patience_s)

    def connections(self) -> Collection[Connection]:
        return self._connections.values()

    def send(self, data: bytes, processes: Collection[int] | None = None) -> None:
        """To these processes, or to all others."""
        for process, connection in self._connections.items():
            if processes is None or process in processes:
                connection.send(DATA, data)

    def close(self) -> None:
        """Let the other processes end."""
        self.closing = True
        for connection in self.connections():
            with contextlib.suppress(OSError):
                connection.send(STOP)
        for reader in self._readers:
            reader.join(GRACE_S)

    def _accept(self, processes: int, store: Store, patience_s: float) -> None:
        key = secrets.token_hex(16)
        end = time.monotonic() + patience_s
        with _listen(coordinator_host()) as server:
            store.put(_KEY, json.dumps({"port": server.getsockname()[1], "key": key}))
            while len(self._connections) < processes - 1:
                server.settimeout(max(end - time.monotonic(), 0.001))
                try:
                    sock, _ = server.accept()
                except TimeoutError:
                    missing = set(range(1, processes)) - set(self._connections)
                    raise MeshwrightError(
                        f"process {min(missing)} did not connect to process 0 within "
                        f"{patience_s:g} s: {RESTART}"
                    ) from None
                self._greet(sock, key)

    def _greet(self, sock: socket.socket, key: str) -> None:
        connection = Connection(sock, 0, "")
        sock.settimeout(5.0)
        try:
            kind, size = _HEAD.unpack(connection._bytes(_HEAD.size))
            if kind != HELLO or size > 1024:
                raise ValueError
            hello = json.loads(connection._bytes(size))
            if not hmac.compare_digest(str(hello["key"]).encode(), key.encode()):
                raise ValueError
            connection.process, connection.host = int(hello["process"]), str(hello["host"])
            connection.send(HELLO, self.host.encode())
            sock.settimeout(SILENCE_S)
        except (OSError, ValueError, KeyError, TypeError):  # somebody else's
            connection.close()
            return
        self._connections[connection.process] = connection

    def _take(self, connection: Connection, kind: int, data: bytes) -> bool:
        if kind == DATA:
            self.on_message(connection.process, data)
        elif kind == STOP and not self.on_stop:
            stopped = f"{connection.name} was stopped by a signal before the work began"
            self.end(MeshwrightError(stopped))
        elif kind == STOP and self.on_stop:
            self.on_stop()
        elif kind == FAILED:
            self._lose(data.decode())
        return kind != FAILED

    def _lose(self, text: str) -> None:
        if self._decide(text):
            self._tell(text)
            self.on_lost(text)


class Follower(Link):
    """The link of another process; iterating gives the messages of process 0, until it closes."""

    def __init__(self, process_id: int, store: Store, patience_s: float = PATIENCE_S) -> None:
        super().__init__(process_id, store)
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        end = time.monotonic() + patience_s
        while (text := store.get(_KEY)) is None:
            if time.monotonic() > end:
                raise MeshwrightError(f"process 0 opened no link within {patience_s:g} s")
            time.sleep(0.05)
        place = json.loads(text)
        try:
            sock = socket.create_connection((coordinator_host(), place["port"]), timeout=patience_s)
        except OSError as reason:
            raise MeshwrightError(
                f"process {process_id} cannot reach port {place['port']} of process 0 at "
                f"{coordinator_host()} ({reason}): the processes of a server need open ports "
                "between them"
            ) from None
        self.leader = Connection(sock, 0, coordinator_host())
        hello = {"key": place["key"], "process": process_id, "host": self.host}
        try:
            self.leader.send(HELLO, json.dumps(hello).encode())
            self.leader.host = self.leader.receive()[1].decode()
        except OSError as reason:
            raise MeshwrightError(f"process 0 did not answer ({reason}): {RESTART}") from None

    def connections(self) -> Collection[Connection]:
        return (self.leader,)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._messages.get, None)

    def send(self, data: bytes) -> None:
        self.leader.send(DATA, data)

    def ask_to_stop(self) -> None:
        """Ask process 0 to end the run, as a signal there would."""
        with contextlib.suppress(OSError):
            self.leader.send(STOP)

    def close(self) -> None:
        self.closing = True
        self.leader.close()

    def _take(self, connection: Connection, kind: int, data: bytes) -> bool:
        if kind == DATA:
            self._messages.put(data)
        elif kind == STOP:
            self.closing = True
            self._messages.put(None)
        elif kind == END:
            self._lose(data.decode())
        return kind not in (STOP, END)

    def _lose(self, text: str) -> None:
        # the main thread may wait in a collective for ever
        if self._decide(text):
            end_process(text)


@contextlib.contextmanager
def open_link(joined: Joined, store: Store | None) -> Iterator[Leader | Follower | None]:
    """The link of this process, while the block runs; None in a run of one process."""
    if store is None:
        yield None
        return
    try:
        if joined.process_id:
            link: Leader | Follower = Follower(joined.process_id, store)
        else:
            link = Leader(joined.processes, store)
    except MeshwrightError as reason:  # jax's shutdown would wait for processes that are missing
        end_process(str(reason))
    with link, before_end(lambda: link.fail("it was stopped by a signal")):
        yield link


def _listen(host: str) -> socket.socket:
    """A server of any free port of the address that the others know; of all, if it is not ours."""
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, 0), family=family)
    except OSError:
        return socket.create_server(("", 0))
