from __future__ import annotations

from collections.abc import Iterator

import pytest

from eagle_mars import EaModel, VerifyConfig
from eagle_mars.chat.session import ChatService


@pytest.fixture(scope="session")
def tiny(tiny_pair) -> EaModel:
    """A tiny pair whose greedy text is letters."""
    target, head = tiny_pair
    return EaModel.from_pretrained(target, head, total_token=8, depth=3, top_k=4)


@pytest.fixture
def service(tiny: EaModel) -> Iterator[ChatService]:
    running = ChatService(tiny, verify=VerifyConfig(rule="exact"), max_active=2, max_waiting=3)
    yield running
    running.close()
