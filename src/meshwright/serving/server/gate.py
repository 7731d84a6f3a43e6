"""Before and after every request: API keys, browsers, metrics, the access log."""

import dataclasses
import hashlib
import hmac
import logging
import time
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.serving.request import request_id
from meshwright.serving.server.errors import ApiError, ClientGoneError, error_response
from meshwright.serving.server.service import Service, Usage
from meshwright.serving.server.transport import give_back_memory

LOG = logging.getLogger("meshwright.access")
OPEN = frozenset({"/", "/health", "/ready", "/live"})  # no key needed: the page asks for it
_WITHOUT_ENGINE = frozenset({"/live", "/metrics"})  # answered also while the server starts
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_PORTS = {"http": 80, "https": 443}
_CLIENT_GONE = 499  # as nginx logs it


@dataclasses.dataclass
class Access:
    """What the access log says of a request."""

    id: str
    usage: Usage = dataclasses.field(default_factory=Usage)
    gone: bool = False
    body_bytes: int = 0


class Gate:
    """Checks a request before the routes see it, and records how it ended."""

    def __init__(self, app: ASGIApp, service: Service, paths: Iterable[str]) -> None:
        self._app, self._service, self._paths = app, service, frozenset(paths)
        self._keys = [_digest(key.encode()) for key in service.keys]
        config = service.config
        self._origins = frozenset(config.origins)
        self._own_names = None
        if config.host in LOOPBACK and not self._keys:
            self._own_names = LOOPBACK | {urlsplit(o).hostname for o in self._origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        access = scope["access"] = Access(request_id("req"))
        started, status = time.perf_counter(), _CLIENT_GONE

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = [
                    (b"x-request-id", access.id.encode()),
                    (b"x-content-type-options", b"nosniff"),
                ]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            try:
                await send(message)
            except Exception as reason:  # a connection that takes no answer, as after broken HTTP
                raise ClientGoneError from reason

        try:
            refusal = self._refusal(scope) or self._starting(scope)
            app = self._app if refusal is None else error_response(refusal)
            await app(scope, receive, watched)
        except ClientGoneError:
            access.gone = True
        except BaseException:
            status = 500 if status == _CLIENT_GONE else status
            raise
        finally:
            self._record(scope, access, _CLIENT_GONE if access.gone else status, started)
            give_back_memory(access.body_bytes)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        origin = headers.get("origin")
        # a page of another site can send requests to servers on this machine, also under a name
        # that it made point here
        if self._own_names is not None and _hostname(host) not in self._own_names:
            return ApiError(
                403,
                f"the host '{host[:100]}' is not this machine; use localhost, or start the server "
                "with an API key or with --allow-origin",
            )
        if origin is not None and origin not in self._origins and not is_own(origin, host):
            return ApiError(
                403,
                f"web pages of '{str(origin)[:100]}' may not call this server; --allow-origin "
                "permits it",
            )
        if not self._keys or scope["path"] in OPEN:
            return None
        kind, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        if not key:
            message = "this server needs an API key; send 'Authorization: Bearer KEY'"
        elif not self._is_known(key):
            message = "the API key is wrong"
        else:
            return None
        return ApiError(
            401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
        )

    def _starting(self, scope: Scope) -> ApiError | None:
        if scope["path"] in _WITHOUT_ENGINE:
            return None
        try:
            self._service.engine  # noqa: B018, which is an error while there is none
        except ApiError as reason:
            if scope["path"] == "/":  # a browser loads the page again until it is there
                reason.headers["Refresh"] = reason.headers["Retry-After"]
            return reason
        return None

    def _is_known(self, key: str) -> bool:
        digest = _digest(key.encode("utf-8", "surrogateescape"))
        # every key is compared, and in constant time: how long it takes says nothing
        matches = [hmac.compare_digest(digest, known) for known in self._keys]
        return any(matches)

    def _record(self, scope: Scope, access: Access, status: int, started: float) -> None:
        path = scope["path"]
        route = path if path in self._paths else "other"
        self._service.metrics.responses.labels(route, str(status)).inc()
        if self._service.config.access_log:
            client = scope.get("client") or ("-", 0)
            # the raw path is ASCII; the query and the headers, which may hold keys, are not logged
            shown = scope.get("raw_path", b"-").partition(b"?")[0][:200].decode("ascii", "replace")
            LOG.info(
                "%s %s %s %d %.3fs prompt=%d generated=%d %s",
                client[0], scope["method"], shown, status, time.perf_counter() - started,
                access.usage.prompt, access.usage.generated, access.id,
            )  # fmt: skip


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def loopback_origins(port: int) -> list[str]:
    """What a browser calls pages that this machine serves at a port."""
    names = [f"[{name}]" if ":" in name else name for name in LOOPBACK]
    return [f"http://{name}" + (f":{port}" if port != _PORTS["http"] else "") for name in names]


def is_own(origin: str, host: str) -> bool:
    """Whether a page of this origin came from the host that its request goes to.

    The names of the loopback address are one host.

    >>> is_own("http://localhost:8000", "127.0.0.1:8000"), is_own("http://a.org", "b.org")
    (True, False)
    """
    try:
        page, own = urlsplit(origin), urlsplit(f"{urlsplit(origin).scheme}://{host}")
        ports = [parts.port or _PORTS.get(parts.scheme) for parts in (page, own)]
    except ValueError:
        return False
    names = {page.hostname, own.hostname}
    return ports[0] == ports[1] and None not in names and (len(names) == 1 or names <= LOOPBACK)


def _hostname(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
