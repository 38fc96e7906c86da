"""Repairs of FastChat's API server: streaming, and request fields that it would drop or fail on."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextvars import ContextVar
from itertools import count
from typing import Any

from eagle_mars.chat.fastchat_launch import require
from eagle_mars.chat.templates import normalise
from eagle_mars.errors import ConfigError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# Fields of `WorkerParams` that FastChat's request models don't know.
_EXTRAS = ("seed", "min_p", "repetition_penalty", "rule", "theta", "margin", "gap", "branch", "max_regret", "draft")
_PARAM_OUT_OF_RANGE = 40302
_BODY_LIMIT = 8 * 2**20

# Of the request that is being answered: what FastChat would drop, and the number of the next choice.
_extras: ContextVar[dict[str, Any]] = ContextVar("extras")
_choices: ContextVar[Iterator[int]] = ContextVar("choices")


def mend_api(module: Any) -> None:
    """Repair the imported `fastchat.serve.openai_api_server`. Raises ConfigError if it isn't the known one."""
    _mend_chunks(module)
    _pass_extras_on(module)
    module.app.add_middleware(MendedBodies)


def _mend_chunks(module: Any) -> None:
    """Chunks are serialised by a call that pydantic 2 refuses; and without unset fields, so without `object`."""
    for name in ("ChatCompletionStreamResponse", "CompletionStreamResponse"):
        model: Any = getattr(module, name, None)
        require(model is not None and hasattr(model, "model_dump_json"), name)
        model.json = _chunk_json


def _chunk_json(chunk: Any, *, exclude_none: bool = False, **ignored: Any) -> str:
    return chunk.model_dump_json(exclude_none=exclude_none)


def _pass_extras_on(module: Any) -> None:
    """Worker parameters get the request's extras; choices after the first get other seeds."""
    for name in ("get_gen_params", "generate_completion", "generate_completion_stream"):
        require(callable(getattr(module, name, None)), name)
    get_params, whole, stream = module.get_gen_params, module.generate_completion, module.generate_completion_stream

    async def get_gen_params(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**await get_params(*args, **kwargs), **_extras.get({})}

    def varied(payload: dict[str, Any]) -> dict[str, Any]:
        seed = payload.get("seed")
        return {**payload, "seed": seed + next(_choices.get())} if isinstance(seed, int) else payload

    module.get_gen_params = get_gen_params
    module.generate_completion = lambda payload, address: whole(varied(payload), address)
    module.generate_completion_stream = lambda payload, address: stream(varied(payload), address)


class MendedBodies:
    """ASGI middleware: rewrites the JSON of completion requests into what FastChat's models take."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].endswith("/completions"):
            await self.app(scope, receive, send)
            return
        body = b""
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return
            body += message.get("body", b"")
            if len(body) > _BODY_LIMIT:
                await _refuse(send, f"the request is larger than {_BODY_LIMIT} bytes; shorten it.")
                return
            if not message.get("more_body"):
                break
        try:
            body = _mended(body)
        except ConfigError as error:
            await _refuse(send, str(error))
            return
        length = str(len(body)).encode()
        scope["headers"] = [(k, length if k == b"content-length" else v) for k, v in scope["headers"]]
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        await self.app(scope, replay, send)


def _mended(body: bytes) -> bytes:
    """The body in FastChat's terms; what isn't the JSON of a request is left to FastChat's own error."""
    try:
        request = json.loads(body)
    except ValueError:  # bad JSON, or bytes that aren't UTF-8
        return body
    if not isinstance(request, dict):
        return body
    if request.get("max_completion_tokens") is not None:
        request["max_tokens"] = request.pop("max_completion_tokens")
    messages = request.get("messages")
    if isinstance(messages, list) and all(map(_is_message, messages)):
        request["messages"] = normalise(messages)
        if any(message["role"] == "tool" for message in messages):
            raise ConfigError("FastChat's API knows no role 'tool'; use system, user or assistant.")
    _extras.set({name: request[name] for name in _EXTRAS if name in request})
    _choices.set(count())
    return json.dumps(request).encode()


def _is_message(message: Any) -> bool:
    """Whether `normalise` can read it."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    return content is None or isinstance(content, str) or (isinstance(content, list) and all(map(_is_part, content)))


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("type"), str) and isinstance(part.get("text", ""), str)


async def _refuse(send: Send, message: str) -> None:
    body = json.dumps({"object": "error", "message": message, "code": _PARAM_OUT_OF_RANGE}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
