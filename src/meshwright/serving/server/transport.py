"""HTTP around a request: its body, a client that leaves, server-sent events."""

import asyncio
import contextvars
import ctypes
import itertools
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from meshwright.errors import MeshwrightError
from meshwright.serving.server.bodies import decoded
from meshwright.serving.server.encoding import event
from meshwright.serving.server.errors import (
    ApiError,
    ClientGoneError,
    bad_request,
    of_mistake,
    unavailable,
)
from meshwright.serving.server.service import PROGRESS, Progress, Service
from meshwright.serving.settings import LimitsConfig

_T = TypeVar("_T")
_Body = TypeVar("_Body", bound=msgspec.Struct)
_LOG = logging.getLogger("meshwright.serving")
_STOPPED = "the server is shutting down and has ended this request; send it again later"


async def read(request: Request, kind: type[_Body], service: Service) -> _Body:
    """The request's JSON body, within the limits."""
    limits = service.config.limits
    too_large = ApiError(
        413,
        f"the request body is larger than {limits.body_bytes:,} bytes; send less at once",
        headers={"Connection": "close"},
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limits.body_bytes:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                data += chunk
                if len(data) > limits.body_bytes:
                    raise too_large
    except TimeoutError:
        raise ApiError(
            408,
            f"the request body did not arrive within {limits.body_seconds:g} s",
            headers={"Connection": "close", **_NO_RETRY},
        ) from None
    except ClientDisconnect:
        raise ClientGoneError from None
    request.scope["access"].body_bytes = len(data)
    most_values = max(limits.body_values, 2 * service.engine.max_length)
    return await off_loop(request, lambda: decoded(bytes(data), kind, most_values))


async def off_loop(request: Request, work: Callable[[], _T]) -> _T:
    """The result of `work`, which other requests do not wait for if the request's body is large."""
    return await _in_thread(_LARGE_BODIES, work, request.scope["access"].body_bytes > _LARGE_BODY)


async def assembled(entries: int, work: Callable[[], _T]) -> _T:
    """The result of `work`, which other requests do not wait for if it writes many entries.

    See logprobs.written_entries.
    """
    return await _in_thread(_LARGE_ANSWERS, work, entries > _LARGE_ANSWER)


async def _in_thread(threads: ThreadPoolExecutor, work: Callable[[], _T], is_long: bool) -> _T:
    if not is_long:
        return work()
    return await asyncio.get_running_loop().run_in_executor(threads, work)


def answer_response(parts: Sequence[bytes], service: Service) -> Response:
    """A response of JSON, given in parts."""
    if sum(map(len, parts)) <= _SENT_BYTES:
        return Response(b"".join(parts), media_type="application/json")
    return LargeResponse(parts, service.config.limits.send_seconds)


class LargeResponse(Response):
    """JSON that is sent in parts, each when the client has read those before.

    Of what is sent at once, the event loop copies all that the client does not read at once.
    """

    def __init__(self, parts: Sequence[bytes], send_seconds: float) -> None:
        super().__init__(media_type="application/json")
        self._parts, self._send_seconds = parts, send_seconds
        self.headers["Content-Length"] = str(sum(map(len, parts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for part in itertools.chain.from_iterable(map(_sent_parts, self._parts)):
            try:
                async with asyncio.timeout(self._send_seconds):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            except TimeoutError:
                raise ClientGoneError from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _sent_parts(data: bytes) -> Iterator[bytes]:
    return (data[at : at + _SENT_BYTES] for at in range(0, len(data), _SENT_BYTES))


def give_back_memory(body_bytes: int) -> None:
    """Return to the system what a request used, once it has ended.

    glibc keeps it: 120 MB after a text of 1.5 MB was tokenized.
    """
    if body_bytes > _MEMORY_BODY and _TRIM is not None:
        _LARGE_BODIES.submit(_TRIM, 0)


_LARGE_BODY = 1 << 14  # bytes
_LARGE_ANSWER = 1 << 11  # entries, about a microsecond each
_MEMORY_BODY = 1 << 18
_SENT_BYTES = 1 << 18  # of an answer at once
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
# few: each that runs Python delays the event loop by up to 5 ms each time that it waits
_LARGE_BODIES = ThreadPoolExecutor(2, "large-bodies")
_LARGE_ANSWERS = ThreadPoolExecutor(2, "large-answers")


_NO_RETRY = {"X-Should-Retry": "false"}  # which OpenAI's clients follow


def _too_slow(limits: LimitsConfig) -> ApiError:
    return ApiError(
        504,
        f"the request took longer than {limits.request_seconds:g} s and was cancelled; ask for "
        "fewer tokens",
        headers=_NO_RETRY,
    )


def _not_started(service: Service) -> ApiError:
    limit = service.config.limits.request_seconds
    return unavailable(
        f"the server was busy with other requests for {limit:g} s and has not started this one; "
        "send it again later",
        service.retry_after,
    )


async def finish(request: Request, service: Service, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`; cancels it if the client leaves, or at a limit of the server."""
    limits, progress = service.config.limits, Progress()
    context = contextvars.copy_context()
    context.run(PROGRESS.set, progress)
    task = asyncio.create_task(work, context=context)
    gone = asyncio.create_task(_disconnect(request.receive))
    assert service.stopped is not None
    ends: set[asyncio.Future[Any]] = {task, gone, service.stopped}
    try:
        await asyncio.wait(
            ends,
            timeout=limits.request_seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if task.done():
            return task.result()
        if gone.done():
            raise ClientGoneError
        if service.stopped.done():
            raise unavailable(_STOPPED)
        is_queued = progress.behind_others and not progress.begun
        raise _not_started(service) if is_queued else _too_slow(limits)
    finally:
        await _end(task, gone)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def event_stream(
    request: Request, service: Service, events: AsyncGenerator[bytes, None]
) -> "EventStream":
    """A response of events. The first is awaited, so that its errors have their own status."""

    async def first() -> bytes:
        return await anext(events)

    deadline = asyncio.get_running_loop().time() + service.config.limits.request_seconds
    try:
        return EventStream(await finish(request, service, first()), events, service, deadline)
    except StopAsyncIteration:
        raise bad_request("there is nothing to stream") from None
    except BaseException:
        await events.aclose()
        raise


class EventStream(StreamingResponse):
    """Server-sent events, ended by [DONE]; an error ends it without."""

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes, None], service: Service, deadline: float
    ) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._first, self._events = first, events
        self._service, self._deadline = service, deadline
        self._write_began: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(_disconnect(receive))
        try:
            error = await self._watch(sending, gone)
        finally:
            await _end(sending, gone)
            await self._events.aclose()
        if error is None:
            sending.result()
        elif self._write_began is None:
            await self._write(send, event(error.body()))
            await self._write(send, b"", more=False)
        else:  # the client does not read, so it is not told either
            scope["access"].gone = True

    async def _watch(
        self, sending: asyncio.Task[None], gone: asyncio.Task[None]
    ) -> ApiError | None:
        """Wait until all is sent (None), or for the reason to stop.

        One place that looks at the clock from time to time: a timeout for each event would cost as
        much as the event.
        """
        limits, stopped = self._service.config.limits, self._service.stopped
        assert stopped is not None
        ends: set[asyncio.Future[Any]] = {sending, gone, stopped}
        clock = asyncio.get_running_loop().time
        while True:
            left = max(self._deadline - clock(), 0)
            await asyncio.wait(
                ends,
                timeout=min(left, limits.send_seconds / 4),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if sending.done():
                return None
            if gone.done():
                raise ClientGoneError
            if stopped.done():
                return unavailable(_STOPPED)
            began = self._write_began
            if clock() >= self._deadline or (began and clock() - began > limits.send_seconds):
                return _too_slow(limits)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        data = self._first
        end = b"data: [DONE]\n\n"
        while True:
            for part in _sent_parts(data):
                await self._write(send, part)
            try:
                data = await anext(self._events)
            except StopAsyncIteration:
                break
            except Exception as reason:
                end = event(_as_api_error(reason).body())
                break
        await self._write(send, end)
        await self._write(send, b"", more=False)

    async def _write(self, send: Send, data: bytes, more: bool = True) -> None:
        # waits while the client does not read: uvicorn's flow control
        self._write_began = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._write_began = None


def _as_api_error(reason: Exception) -> ApiError:
    if isinstance(reason, ApiError):
        return reason
    if isinstance(reason, MeshwrightError):
        return of_mistake(reason)
    _LOG.error("a stream failed", exc_info=reason)
    return ApiError(500, "the server failed on this request; its log says why")
