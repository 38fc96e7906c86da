"""The OpenAI-compatible server: a FastAPI app over one `ChatService`."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import time
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from eagle_mars.chat import delivery
from eagle_mars.chat.http import ApiError, BodyLimit, ErrorBody, install_error_handlers, key_check
from eagle_mars.chat.metrics import Metrics
from eagle_mars.chat.protocol import ChatBody, CompletionBody, GenerationBody
from eagle_mars.chat.replies import ChatReply, CompletionReply, Json, Reply
from eagle_mars.chat.response import Response as Decoding
from eagle_mars.chat.session import ChatService
from eagle_mars.errors import EagleMarsError

logger = logging.getLogger(__name__)

_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}
_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}
_MOST_UNKNOWN = 100  # names of unknown fields that are remembered, so that a client can't fill memory and log with them


@dataclass(frozen=True)
class ServerOptions:
    """name: of the model. temperature: for requests that name none. max_body: bytes of a request."""

    name: str
    api_key: str | None = None
    temperature: float = 1.0
    max_body: int = 4 * 2**20


def create_app(service: ChatService, metrics: Metrics, options: ServerOptions) -> FastAPI:
    """The app; it closes the service when it shuts down."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(service.close)

    app = FastAPI(title="eagle_mars", lifespan=lifespan)
    app.add_middleware(BodyLimit, limit=options.max_body)
    install_error_handlers(app)
    app.include_router(_router(service, options))
    metrics.watch(service.scheduler)
    started = time()

    @app.get("/health", responses={503: {"description": "The decoding thread has died."}})
    def health() -> JSONResponse:
        queue = service.scheduler
        state = {"status": "ok" if queue.alive else "dead", "active": queue.active, "waiting": queue.waiting}
        return JSONResponse({**state, "uptime": time() - started}, 200 if queue.alive else 503)

    @app.get("/metrics", response_class=Response)
    def prometheus() -> Response:
        return Response(metrics.text(), media_type=metrics.content_type)

    return app


def _router(service: ChatService, options: ServerOptions) -> APIRouter:
    router = APIRouter(prefix="/v1", dependencies=[Depends(key_check(options.api_key))], responses=_ERRORS)
    card = {"id": options.name, "object": "model", "created": int(time()), "owned_by": "eagle_mars"}
    unknown: set[str] = set()

    def check(body: GenerationBody) -> None:
        if body.model is not None:
            check_name(body.model)
        new = set(body.unknown_fields()) - unknown
        if new and len(unknown) < _MOST_UNKNOWN:
            unknown.update(new)
            logger.warning("ignoring fields that this server doesn't know: %s", ", ".join(sorted(new)))

    def check_name(name: str) -> None:
        if name != options.name:
            message = f"there is no model {name!r} here; use {options.name!r}."
            raise ApiError(404, message, "model_not_found", "model")

    @router.get("/models")
    def models() -> Json:
        return {"object": "list", "data": [card]}

    @router.get("/models/{name:path}")
    def model(name: str) -> Json:
        check_name(name)
        return card

    @router.post("/chat/completions", responses=_STREAM, response_class=JSONResponse)
    async def chat(body: ChatBody, request: Request) -> Response:
        check(body)
        ids = await run_in_threadpool(service.chat_ids, [message.model_dump() for message in body.messages])
        best = (body.top_logprobs or 0) if body.logprobs else None
        reply = ChatReply(options.name, service.token_text, body.n or 1, best, bool(body.details))
        return await answer(body, [ids], reply, request)

    @router.post("/completions", responses=_STREAM, response_class=JSONResponse)
    async def completions(body: CompletionBody, request: Request) -> Response:
        check(body)
        prompts = body.prompts()
        ids = [await run_in_threadpool(service.text_ids, p) if isinstance(p, str) else p for p in prompts]
        reply = CompletionReply(options.name, service.token_text, body.n or 1, body.logprobs, bool(body.details))
        return await answer(body, ids, reply, request)

    async def answer(body: GenerationBody, prompts: list[list[int]], reply: Reply, request: Request) -> Response:
        decodings = _submit(service, prompts, body, options.temperature)
        if not body.stream:
            return await delivery.whole(decodings, reply, request)
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        return delivery.EventStream(decodings, reply, include_usage)

    return router


def _submit(
    service: ChatService, prompts: Sequence[Sequence[int]], body: GenerationBody, temperature: float
) -> list[Decoding]:
    """Queue every choice of every prompt, or none."""
    choices = body.options(service, temperature)
    decodings: list[Decoding] = []
    try:
        for ids in prompts:
            for choice in choices:
                decodings.append(service.submit(ids, choice))  # one by one, so that a refusal knows what came before it
    except EagleMarsError:
        delivery.cancel(decodings)
        raise
    return decodings
