"""schemathesis against the server's own OpenAPI document."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="serving needs: pip install 'eagle-mars[chat]'")
pytest.importorskip("schemathesis")
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from eagle_mars.chat.metrics import Metrics
from eagle_mars.chat.openai_server import ServerOptions, create_app
from eagle_mars.chat.session import ChatService

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]


@pytest.fixture(scope="module")
def document(tiny) -> Iterator[schemathesis.BaseSchema]:
    service = ChatService(tiny, default_max_new_tokens=2, max_waiting=64)
    app = create_app(service, Metrics(), ServerOptions("tiny"))
    app.router.lifespan_context = _no_lifespan  # schemathesis starts and ends the app around every call
    yield schemathesis.openapi.from_asgi("/openapi.json", app)
    service.close()


@asynccontextmanager
async def _no_lifespan(app: Any) -> AsyncIterator[None]:
    yield


OPERATIONS = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/health"),
    ("GET", "/metrics"),
]


def test_every_operation_is_listed_here(document) -> None:
    found = {(result.ok().method.upper(), result.ok().path) for result in document.get_all_operations()}
    assert found == set(OPERATIONS)


# schemathesis' own pytest plugin doesn't run under pytest 9, so its strategies are used directly.
@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [(*operation, GenerationMode.POSITIVE) for operation in OPERATIONS]
    + [("POST", path, GenerationMode.NEGATIVE) for path in ("/v1/chat/completions", "/v1/completions")],
)
def test_every_answer_is_as_documented(document, method: str, path: str, mode: GenerationMode) -> None:
    @settings(max_examples=12, database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=document[path][method].as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):  # long answers would only take time
            for name in ("max_tokens", "max_completion_tokens"):
                if isinstance(case.body.get(name), int) and case.body[name] > 4:
                    case.body[name] = 4
        case.call_and_validate(checks=CHECKS)

    check()
