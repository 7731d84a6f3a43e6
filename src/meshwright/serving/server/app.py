"""The routes of the server, as an ASGI application."""

import asyncio
import contextlib
import dataclasses
import functools
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from meshwright.errors import MeshwrightError
from meshwright.present import CONTENT_POLICY, render
from meshwright.serving.server import easylm, models
from meshwright.serving.server.chat import chat_completions
from meshwright.serving.server.completions import completions
from meshwright.serving.server.easylm import Endpoint
from meshwright.serving.server.errors import (
    ApiError,
    error_response,
    json_response,
    of_mistake,
    unavailable,
)
from meshwright.serving.server.gate import Gate, loopback_origins
from meshwright.serving.server.service import Service
from meshwright.serving.server.tokens import detokenize, tokenize, tokenizer_info

_LOG = logging.getLogger("meshwright.serving")


def application(service: Service, port: int) -> Starlette:
    """All routes; `service` is theirs, `port` the one that they are served at."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.stopped = asyncio.get_running_loop().create_future()
        yield

    def route(path: str, endpoint: Endpoint, method: str) -> Route:
        async def handle(request: HttpRequest) -> Response:
            return await endpoint(request, service)

        return Route(path, functools.wraps(endpoint)(handle), methods=[method])

    routes = [
        *(route(path, endpoint, "GET") for path, endpoint in _GET.items()),
        *(route(path, endpoint, "POST") for path, endpoint in _POST.items()),
    ]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=(*service.config.origins, *loopback_origins(port)),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
    )
    gate = Middleware(Gate, service=service, paths=(*_GET, *_POST))
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[cors, gate],
        exception_handlers={
            ApiError: _api_error,
            MeshwrightError: _mistake,
            HTTPException: _http_error,
            Exception: _failure,
        },
    )


async def _health(http: HttpRequest, service: Service) -> Response:
    if service.draining:
        raise unavailable("the server is shutting down")
    service.check_ready()
    return json_response({"status": "ok"})


async def _live(http: HttpRequest, service: Service) -> Response:
    """That the process answers, also while it starts or finishes what runs."""
    return json_response({"status": "alive"})


async def _ready(http: HttpRequest, service: Service) -> Response:
    await _health(http, service)
    return PlainTextResponse("Ready!\n")


async def _metrics(http: HttpRequest, service: Service) -> Response:
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


async def _page(http: HttpRequest, service: Service) -> Response:
    settings = {
        "model": service.name,
        "models": [
            service.name,
            *(f"{service.name}:{name}" for name in service.engine.adapters if not service.keys),
        ],
        "card": models.model_card(service),
        "needsKey": bool(service.keys),
        "hasTemplate": service.template is not None,
        "maxLength": service.engine.max_length,
        "defaults": dataclasses.asdict(service.defaults.typed),
    }
    text = render(Path(__file__).with_name("chat.html"), title=service.name, data=settings)
    return HTMLResponse(text, headers={"Content-Security-Policy": CONTENT_POLICY})


_GET: dict[str, Endpoint] = {
    "/": _page,
    "/v1/models": models.models,
    "/v1/models/{name:path}": models.model,
    "/tokenizer_info": tokenizer_info,
    "/live": _live,
    "/health": _health,
    "/ready": _ready,
    "/metrics": _metrics,
}
_POST: dict[str, Endpoint] = {
    "/v1/completions": completions,
    "/v1/chat/completions": chat_completions,
    "/v1/load_lora_adapter": models.load_adapter,
    "/v1/unload_lora_adapter": models.unload_adapter,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/generate": easylm.generate,
    "/chat": easylm.chat,
    "/loglikelihood": easylm.loglikelihood,
    # EasyLM's documentation has an underscore, its server a hyphen
    "/greedy-until": easylm.greedy_until,
    "/greedy_until": easylm.greedy_until,
    "/loglikelihood-rolling": easylm.loglikelihood_rolling,
    "/loglikelihood_rolling": easylm.loglikelihood_rolling,
}


async def _api_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _mistake(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, MeshwrightError)
    return error_response(of_mistake(error))


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = http.method, http.url.path[:200]
    routes = ", ".join((*_GET, *_POST)).replace("{name:path}", "NAME")
    usable = "GET" if "GET" in (error.headers or {}).get("Allow", "") else "POST"
    message = {
        404: f"there is no {path} here; the routes are {routes}",
        405: f"{path} does not take {method}; use {usable}",
    }.get(error.status_code, str(error.detail))
    return error_response(ApiError(error.status_code, message, headers=error.headers))


async def _failure(http: HttpRequest, error: Exception) -> Response:
    _LOG.error("%s failed", http.url.path, exc_info=error)
    return error_response(ApiError(500, "the server failed on this request; its log says why"))
