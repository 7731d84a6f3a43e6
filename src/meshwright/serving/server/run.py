"""Run the server in a thread of its own, until it is told to stop."""

import asyncio
import contextlib
import errno
import gc
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from meshwright.errors import MeshwrightError
from meshwright.interrupt import signal_calls, termination_calls
from meshwright.present import count
from meshwright.serving.request import EngineStoppedError
from meshwright.serving.server.app import application
from meshwright.serving.server.service import Service
from meshwright.serving.settings import LimitsConfig

_LOG = logging.getLogger("meshwright.serving")
_BACKLOG = 2048
_PARSED_BYTES = 1 << 14  # of a connection, before the event loop serves the others
_START_SECONDS = 30.0
_FAILED_SECONDS = 5.0  # in which clients and /health get the reason, after the engine has failed
_LAST_WORDS_SECONDS = 2  # for errors to reach clients, after the time for finishing is over
_CLOSING_SECONDS = 4  # for the rest of the process after that, as a step that runs


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are for the main thread


class _Protocol(AutoHTTPProtocol):  # type: ignore[valid-type, misc]
    """Parses a part of what has arrived, and the next after others had their turn.

    A body in chunks of one byte takes the parser a second per megabyte.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._unparsed = bytearray()
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        is_first = not self._unparsed
        self._unparsed += data
        if is_first:
            self._parse()

    def _parse(self) -> None:
        if self.transport.is_closing():
            return
        part = bytes(self._unparsed[:_PARSED_BYTES])
        super().data_received(part)
        del self._unparsed[:_PARSED_BYTES]
        if self.transport.is_closing():
            return
        if self._unparsed:
            self.transport.pause_reading()
            self.loop.call_soon(self._parse)
        elif not self.flow.read_paused:
            self.transport.resume_reading()


class HttpServer:
    """A server on a socket of this machine.

    with HttpServer(service) as server:
        print(server.url)
        server.wait()
    """

    def __init__(self, service: Service, bound: socket.socket | None = None) -> None:
        """`bound`: the socket to listen on, if it was bound before the service was there."""
        self.service = service
        self._socket = bound or bind(service.config.host, service.config.port)
        host, port = self._socket.getsockname()[:2]
        self.url = _url(host, port)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._server = _Uvicorn(
            uvicorn.Config(
                application(service, port),
                http=_Protocol,
                lifespan="on",
                log_config=None,
                log_level="critical",  # failures are logged by the application
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=_LAST_WORDS_SECONDS,
            )
        )
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def __enter__(self) -> "HttpServer":
        self._thread.start()
        limit = time.monotonic() + _START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > limit:
                raise MeshwrightError(f"the HTTP server at {self.url} did not start")
            time.sleep(0.005)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.stop(now=error is not None)
        self.wait()

    def stop(self, now: bool = False) -> None:
        """Finish what runs, refuse what is new, then end; `now`: finish nothing."""

        def drain() -> None:
            if self._draining is None or now:
                self._draining = asyncio.create_task(self._drain(now))

        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(drain)

    def wait(self, seconds: float = math.inf) -> bool:
        """Until the server has ended, but not longer than this; whether it is running."""
        end = time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < end:
            self._thread.join(0.2)  # so that signal handlers of this thread run
        return self._thread.is_alive()

    def _run(self) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            await self._server.serve(sockets=[self._socket])

        try:
            with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
                runner.run(main())
        finally:
            self._socket.close()

    async def _drain(self, now: bool) -> None:
        service = self.service
        service.draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (0 if now else service.config.limits.shutdown_seconds)
        while service.in_flight and loop.time() < deadline:
            await asyncio.sleep(0.02)
        if service.in_flight:
            _LOG.warning("ending %d sequences that did not finish in time", service.in_flight)
        if service.stopped is not None and not service.stopped.done():
            service.stopped.set_result(None)
        self._server.should_exit = True


def run_until_stopped(
    server: HttpServer, on_ready: Callable[[], object], on_stop: Callable[[], object]
) -> None:
    """Wait for SIGTERM, SIGHUP or Ctrl-C, then finish what runs; a second one ends at once.

    `on_ready` is called once signals are heard, `on_stop` at the first of them.
    """

    def stop(*_: object) -> bool:
        asked = server.service.draining
        if not asked:
            _LOG.info("stopping: in flight are %s", count(server.service.in_flight, "sequence"))
            on_stop()
        server.stop(now=asked)
        return True

    engine = server.service.engine
    # jax and the model stay: a collection that looks at all of their objects holds up every request
    # for 0.2 s
    gc.collect()
    gc.freeze()
    with termination_calls(stop), signal_calls(signal.SIGINT, stop):
        on_ready()
        while server.wait(0.2):
            if engine.failure is not None:
                server.wait(_FAILED_SECONDS)
                server.stop(now=True)
                server.wait()
    if engine.failure is not None:
        raise EngineStoppedError(engine.failure)


def longest_shutdown(limits: LimitsConfig) -> float:
    """Seconds after which a process that was asked to end should have ended."""
    return limits.shutdown_seconds + _LAST_WORDS_SECONDS + _CLOSING_SECONDS


def _url(host: str, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def bind(host: str, port: int) -> socket.socket:
    """A socket with this address; connections are refused until a server listens on it."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # also just after another server
    if bound.family == socket.AF_INET6:
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    try:
        bound.bind((host, port))
    except OSError as reason:
        bound.close()
        raise MeshwrightError(_cannot_bind(host, port, reason)) from None
    return bound


def _cannot_bind(host: str, port: int, reason: OSError) -> str:
    if isinstance(reason, socket.gaierror):
        return f"--host {host} is not a known name or address; use 127.0.0.1, or 0.0.0.0 for all"
    if reason.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is used by another program; choose another --port (0 takes a "
            "free one)"
        )
    if reason.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is not an address of this machine; use 127.0.0.1, or 0.0.0.0 for all"
    return f"cannot listen on port {port} of {host}: {os.strerror(reason.errno or 0)}"
