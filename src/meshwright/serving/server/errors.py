"""Errors of the HTTP server: a status and OpenAI's JSON body."""

import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from meshwright.errors import MeshwrightError
from meshwright.serving.request import EngineStoppedError, OverloadedError
from meshwright.serving.server.encoding import encoded


class ApiError(Exception):
    """An answer other than success, with a message that a person can act on."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ClientGoneError(Exception):
    """The client closed its connection; there is nobody to answer."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def of_mistake(reason: MeshwrightError) -> ApiError:
    """What a client did wrong, in the engine's words; or that it may try again."""
    if isinstance(reason, OverloadedError):
        return ApiError(429, str(reason), headers={"Retry-After": "1"})
    if isinstance(reason, EngineStoppedError):
        return unavailable(str(reason))
    return bad_request(str(reason))


def unavailable(message: str, retry_after: int = 5) -> ApiError:
    """`retry_after`: seconds, which OpenAI's clients wait before they send the request again."""
    return ApiError(503, message, headers={"Retry-After": str(retry_after)})


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers)


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(encoded(value), status, dict(headers or {}), media_type="application/json")


def field_of(message: str) -> str | None:
    """The field that a message of msgspec names.

    >>> field_of("Expected `int`, got `str` - at `$.max_tokens`")
    'max_tokens'
    """
    found = re.search(r"at `\$\.?([^`]*)`$", message)
    return found[1] or None if found else None
