"""HTTP around the endpoints: OpenAI's error bodies, a limit on request size, the API key."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from eagle_mars.chat.scheduler import ClosedError, QueueFullError
from eagle_mars.errors import ConfigError, ContextLengthError, EagleMarsError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_bearer = HTTPBearer(auto_error=False)
_SHOWN = 80  # characters of a wrong value that an error repeats


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


class ApiError(HTTPException):
    """An error with OpenAI's code and parameter."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(status, message)
        self.code, self.param = code, param


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    detail = ErrorDetail(message=message, type=kind, param=param, code=code)
    return ErrorBody(error=detail).model_dump()


def status_and_code(error: EagleMarsError) -> tuple[int, str | None]:
    """How an error of this package is told over HTTP."""
    match error:
        case ContextLengthError():
            return HTTPStatus.BAD_REQUEST, "context_length_exceeded"
        case ConfigError():
            return HTTPStatus.BAD_REQUEST, "invalid_value"
        case QueueFullError():
            return HTTPStatus.TOO_MANY_REQUESTS, "queue_full"
        case ClosedError():
            return HTTPStatus.SERVICE_UNAVAILABLE, "shutting_down"
    return HTTPStatus.INTERNAL_SERVER_ERROR, None


def install_error_handlers(app: FastAPI) -> None:
    """Every error leaves as OpenAI's error object."""

    @app.exception_handler(EagleMarsError)
    async def _(request: Request, error: EagleMarsError) -> JSONResponse:
        status, code = status_and_code(error)
        headers = {"Retry-After": "1"} if status in (429, 503) else None
        return JSONResponse(error_body(status, str(error), code), status, headers)

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError) -> JSONResponse:
        param, message = _first(error)
        return JSONResponse(error_body(400, message, "invalid_value", param), 400)

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> JSONResponse:
        extra = (error.code, error.param) if isinstance(error, ApiError) else (None, None)
        return JSONResponse(error_body(error.status_code, error.detail, *extra), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def _(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(500, "the server failed on this request; its log says why."), 500)


def _first(error: RequestValidationError) -> tuple[str | None, str]:
    """Field and one sentence about the first thing that is wrong with a body."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return None, f"the body is not JSON: {first['ctx']['error']}."
    # Members of a union add their type's name to the path; only what the client wrote is worth showing.
    path = [part for part in first["loc"][1:] if isinstance(part, int) or (part.isidentifier() and part != "str")]
    param = ".".join(map(str, path)) or None
    name = param or "the body"
    if first["type"] == "missing":
        return param, f"{name} is missing; add it."
    value = repr(first.get("input"))
    shown = value if len(value) <= _SHOWN else value[:_SHOWN] + "..."
    return param, f"{name}={shown} is not usable: {first['msg'].removeprefix('Value error, ')}."


class BodyLimit:
    """ASGI middleware: a request body beyond `limit` bytes is refused with 413, before it is held in memory."""

    def __init__(self, app: Callable[..., Awaitable[None]], limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._limit:
            refusal = JSONResponse(error_body(413, self._message, "request_too_large"), 413)
            await refusal(scope, receive, send)
            return
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limit:
                raise ApiError(413, self._message, "request_too_large")
            return message

        await self._app(scope, counted, send)

    @property
    def _message(self) -> str:
        return f"the request is larger than {self._limit} bytes; send less."


def key_check(key: str | None) -> Callable[..., None]:
    """A dependency that demands `Authorization: Bearer KEY`; None demands nothing."""

    def check(given: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> None:
        # Compared in constant time, so that answers don't tell how much of a guess was right.
        if given is None or not hmac.compare_digest(given.credentials.encode(), (key or "").encode()):
            raise ApiError(401, "the API key is missing or wrong; send it as a bearer token.", "invalid_api_key")

    return check if key else lambda: None
