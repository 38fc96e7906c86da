"""Where a process puts its copy of the model, without a GPU in sight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle_mars.errors import ConfigError
from evaluation.workers import Workers


def placement(device: str, local: int = 0, size: int = 1, per_model: int = 1, memory: str | None = None) -> Any:
    state: Any = SimpleNamespace(
        process_index=local, local_process_index=local, num_processes=size, device=torch.device("cuda", local)
    )
    return Workers(state, device).placement(per_model, memory)


@pytest.fixture(autouse=True)
def _four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (1000 + gpu, 2000))


def test_one_process_uses_the_device_that_was_named() -> None:
    assert placement("cpu") == {"device_map": "cpu"}
    assert placement("cuda:2") == {"device_map": {"": "cuda:2"}}
    assert placement("auto") == {"device_map": {"": "cuda:0"}}


def test_each_process_has_a_gpu_of_its_own() -> None:
    assert [placement("auto", local, 4)["device_map"] for local in range(4)] == [
        {"": f"cuda:{local}"} for local in range(4)
    ]
    assert placement("cuda", 3, 4) == {"device_map": {"": "cuda:3"}}


def test_a_copy_may_be_spread_over_several_gpus() -> None:
    second = {0: 0, 1: 0, 2: 1002, 3: 1003}
    assert placement("auto", 1, 2, per_model=2) == {"device_map": "auto", "max_memory": second}
    limited = {0: "40GiB", 1: 0, 2: 0, 3: 0}
    assert placement("auto", memory="40GiB") == {"device_map": "auto", "max_memory": limited}


def test_too_few_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs 6 GPUs for the processes of this machine, which has 4"):
        placement("auto", 1, 2, per_model=3)
    with pytest.raises(ConfigError, match="this run is on the CPU"):
        placement("cpu", memory="40GiB")
