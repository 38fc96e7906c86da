"""Responses on their way to an HTTP client: as one body or as server-sent events, given up when the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from eagle_mars.chat.http import Receive, Send, error_body, status_and_code
from eagle_mars.chat.replies import Json, Reply
from eagle_mars.chat.response import Response as Decoding
from eagle_mars.chat.response import merged
from eagle_mars.chat.scheduler import ClosedError
from eagle_mars.errors import EagleMarsError

CLIENT_LEFT = 499  # nginx's status for a client that has closed the connection; nobody receives it


def cancel(decodings: Sequence[Decoding]) -> None:
    """Give up all of them; those that have ended don't mind."""
    for decoding in decodings:
        decoding.cancel()


async def whole(decodings: Sequence[Decoding], reply: Reply, request: Request) -> Response:
    """One JSON body, once every choice has ended. Raises what decoding raised, ClosedError."""
    gone = asyncio.create_task(_disconnected(request))
    gone.add_done_callback(lambda _: cancel(decodings))
    try:
        pieces = [[piece async for group in decoding for piece in group] for decoding in decodings]
        if gone.done():
            return Response(status_code=CLIENT_LEFT)
        if any(decoding.cancelled for decoding in decodings):
            raise _closed()
        return JSONResponse(reply.body([decoding.result for decoding in decodings], pieces))
    finally:
        gone.cancel()
        cancel(decodings)


class EventStream(StreamingResponse):
    """Server-sent events: the opening chunk of each choice, its text cycle by cycle, its last chunk, `[DONE]`."""

    media_type = "text/event-stream"

    def __init__(self, decodings: Sequence[Decoding], reply: Reply, include_usage: bool) -> None:
        super().__init__(_events(decodings, reply, include_usage), headers={"Cache-Control": "no-cache"})
        self._decodings = decodings

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # here and not in the events: a client may leave before the first of them is asked for
            cancel(self._decodings)


async def _events(decodings: Sequence[Decoding], reply: Reply, include_usage: bool) -> AsyncIterator[bytes]:
    for index in range(len(decodings)):
        if opening := reply.opening(index):
            yield _event(opening, include_usage)
    try:
        async for index, pieces in merged(decodings):
            if pieces is not None:
                yield _event(reply.delta(index, pieces), include_usage)
            elif decodings[index].cancelled:
                raise _closed()
            else:
                yield _event(reply.last(index, decodings[index].result), include_usage)
    except EagleMarsError as error:  # the status line has gone out: the error is an event, and ends the stream
        status, code = status_and_code(error)
        yield _event(error_body(status, str(error), code), include_usage=False)
        return
    if include_usage:
        yield _event(reply.usage([decoding.result for decoding in decodings]), include_usage)
    yield b"data: [DONE]\n\n"


def _event(body: Json, include_usage: bool) -> bytes:
    if include_usage:  # OpenAI's: every chunk but the last has a null usage
        body.setdefault("usage", None)
    return b"data: " + json.dumps(body, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"


async def _disconnected(request: Request) -> None:
    """Returns when the client has closed the connection; the body has been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _closed() -> ClosedError:
    return ClosedError("the server is shutting down; try again later.")
