"""Settings of the whole suite: one thread, no forgotten memory, the golden vectors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: more threads only wait for each other
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def golden() -> Path:
    """Vectors recorded from the released code; `golden/README.md` describes them."""
    return Path(__file__).parent / "golden"


@pytest.fixture(autouse=True, scope="session")
def _no_forgotten_memory() -> Iterator[None]:
    """Every uninitialised tensor is full of NaN (integers: the maximum), so that reading one can't go unnoticed.

    torch does that in deterministic mode only; operators without a deterministic form warn instead of failing.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Paths of a tiny target, with tokenizer, and of its head."""
    from tests.tiny_pair import save_pair

    return save_pair(tmp_path_factory.mktemp("pair"))
