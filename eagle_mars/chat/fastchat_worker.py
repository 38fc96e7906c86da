"""FastChat's worker protocol over the session layer: stock controllers, API servers and web pages can use the model."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterable
from threading import Event, Thread
from typing import Any
from uuid import uuid4

import requests
import uvicorn
from fastapi import FastAPI
from fastchat.constants import WORKER_HEART_BEAT_INTERVAL, ErrorCode
from fastchat.conversation import Conversation, SeparatorStyle
from fastchat.serve import base_model_worker
from fastchat.serve.base_model_worker import BaseModelWorker

from eagle_mars.chat.fastchat_params import ASSISTANT, SYSTEM, USER, WorkerParams
from eagle_mars.chat.replies import speculation
from eagle_mars.chat.scheduler import QueueFullError
from eagle_mars.chat.session import ChatService
from eagle_mars.errors import ConfigError, ContextLengthError
from eagle_mars.result import TokenScores
from eagle_mars.stream import Piece

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 5.0


class OpenGate:
    """In the place of FastChat's semaphore, whose slots are lost when an endpoint fails between taking and giving.

    The service's queue bounds the load instead, and refuses what is beyond it.
    """

    _value = 0

    async def acquire(self) -> bool:
        return True

    def release(self) -> None:
        """There is nothing to give back."""

    def locked(self) -> bool:
        return False


class EagleMarsWorker(BaseModelWorker):
    """Serves one `ChatService` under FastChat's protocol.

    FastChat's endpoints reach their worker through a module global, so a process has one worker; a second replaces it.
    worker_address: the URL under which the controller's clients reach this worker.
    """

    def __init__(self, service: ChatService, controller_address: str, worker_address: str, model_name: str) -> None:
        # Where a logger is set already, FastChat doesn't put its own in the place of sys.stdout and sys.stderr.
        base_model_worker.logger = logger
        self.service = service
        scheduler = service.scheduler
        super().__init__(
            controller_address,
            worker_address,
            worker_id=uuid4().hex[:8],
            model_path=model_name,
            model_names=[model_name],
            limit_worker_concurrency=scheduler.max_active + scheduler.max_waiting,
        )
        base_model_worker.worker = self
        self.tokenizer = service.model.tokenizer
        self.context_len = service.max_context
        self.semaphore = OpenGate()
        self._stopped = Event()

    @property
    def app(self) -> FastAPI:
        """FastChat's endpoints, to be run or mounted."""
        return base_model_worker.app

    def make_conv_template(self, conv_template: str | None = None, model_path: str | None = None) -> Conversation:
        """The template of markers that `fastchat_params` splits again.

        It goes over the wire by the number of its style, and only the first few styles have the same in all versions.
        """
        return Conversation(
            name="eagle_mars",
            system_template=SYSTEM + "{system_message}",
            roles=(USER, ASSISTANT),
            sep_style=SeparatorStyle.NO_COLON_SINGLE,
            sep="",
        )

    # --- registration ---

    def init_heart_beat(self) -> None:
        """Register and stay registered, from a thread that outlives every outage of the controller."""
        self.heart_beat_thread = Thread(target=self._stay_registered, name="eagle-mars-heart-beat", daemon=True)
        self.heart_beat_thread.start()

    def stop_heart_beat(self) -> None:
        """Let the controller forget this worker."""
        self._stopped.set()

    def _stay_registered(self) -> None:
        beat, pause = self.register_to_controller, 0.0
        while not self._stopped.wait(pause):
            try:
                beat()
            except (requests.RequestException, AssertionError) as error:  # FastChat asserts the status
                logger.warning("the controller %s can't be reached: %s", self.controller_addr, error)
                pause = _RETRY_SECONDS
            else:
                beat, pause = self.send_heart_beat, WORKER_HEART_BEAT_INTERVAL

    def get_queue_length(self) -> int:
        return self.service.scheduler.active + self.service.scheduler.waiting

    # --- requests: whatever goes wrong in one is its answer, never an exception ---

    def count_token(self, params: Any) -> dict[str, Any]:
        try:
            return {"count": len(WorkerParams.parse(params).ids(self.service)), "error_code": 0}
        except Exception as error:  # noqa: BLE001
            return {"count": 0, **_failure(error)}

    async def generate_stream_gate(self, params: Any) -> AsyncIterator[bytes]:
        """JSON objects ended by a zero byte, each with the whole text so far."""
        try:
            answer = _Answer(self.service, params)
            try:
                async for pieces in answer.response:
                    yield _packed(answer.add(pieces))
                yield _packed(answer.end())
            finally:
                answer.response.cancel()  # a client that leaves closes this generator
        except Exception as error:  # noqa: BLE001
            yield _packed(_failure(error))

    def generate_gate(self, params: Any) -> dict[str, Any]:
        """The last object of the stream. FastChat calls it in a thread, where a client that leaves isn't noticed."""
        try:
            answer = _Answer(self.service, params)
            for pieces in answer.response:
                answer.add(pieces)
            return answer.end()
        except Exception as error:  # noqa: BLE001
            return _failure(error)

    def get_embeddings(self, params: Any) -> dict[str, Any]:
        return _failure(ConfigError("this model gives no embeddings; ask a model made for them."))


def serve_worker(worker: EagleMarsWorker, host: str, port: int) -> None:
    """Run the worker alone until SIGINT or SIGTERM, after which running answers get half a minute."""
    worker.init_heart_beat()
    try:
        uvicorn.run(worker.app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=30)
    finally:
        worker.stop_heart_beat()
        worker.service.close()


class _Answer:
    """One submitted request and the growing answer to it, in FastChat's form. Raises what `ChatService.submit` does."""

    def __init__(self, service: ChatService, params: Any) -> None:
        request = WorkerParams.parse(params)
        ids = request.ids(service)
        self.response = service.submit(ids, request.worker_options(service, len(ids)))
        self._text = request.prompt if request.echo else ""
        self._tokens = 0
        self._token_text = service.token_text
        self._logprobs: dict[str, list[Any]] | None = None
        if request.logprobs is not None:
            self._logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
            self._best, self._offset = request.logprobs, len(self._text)

    def add(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """The answer with new pieces."""
        for piece in pieces:
            self._text += piece.text
            self._tokens += len(piece.tokens)
            for scores in piece.scores:
                self._add_logprobs(scores)
        return self._state(None)

    def end(self) -> dict[str, Any]:
        """The whole answer; with `speculation`, which FastChat's clients ignore."""
        result = self.response.result
        self._tokens = result.new_tokens
        return {**self._state(result.finish_reason), "speculation": speculation([result])}

    def _state(self, finish_reason: str | None) -> dict[str, Any]:
        prompt = self.response.prompt_tokens
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": self._tokens,
            "total_tokens": prompt + self._tokens,
        }
        state = {"text": self._text, "error_code": 0, "usage": usage, "finish_reason": finish_reason}
        return {**state, "logprobs": self._logprobs} if self._logprobs is not None else state

    def _add_logprobs(self, scores: TokenScores) -> None:
        assert self._logprobs is not None  # scores come only where they were asked for
        text = self._token_text(scores.chosen.token_id)
        best = {self._token_text(c.token_id): c.logprob for c in scores.best[: self._best]}
        told = {"tokens": text, "token_logprobs": scores.chosen.logprob, "top_logprobs": best}
        for name, value in {**told, "text_offset": self._offset}.items():
            self._logprobs[name].append(value)
        self._offset += len(text)


def _packed(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer).encode() + b"\0"


def _failure(error: Exception) -> dict[str, Any]:
    """An error as FastChat's clients read it; what isn't the request's fault is logged with its traceback."""
    codes: dict[type[Exception], int] = {
        ContextLengthError: ErrorCode.CONTEXT_OVERFLOW,
        ConfigError: ErrorCode.PARAM_OUT_OF_RANGE,
        QueueFullError: ErrorCode.ENGINE_OVERLOADED,
    }
    code = codes.get(type(error), ErrorCode.INTERNAL_ERROR)
    if code == ErrorCode.INTERNAL_ERROR:
        logger.error("a request failed", exc_info=error)
    return {"text": str(error) or type(error).__name__, "error_code": code}
