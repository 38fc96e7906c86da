"""Where a process puts its copy of the model, without a GPU in sight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle_mars.errors import ConfigError
from evaluation.workers import Workers


def worker(device: str, local: int = 0, size: int = 1, tensor_parallel: int = 1) -> Workers:
    state: Any = SimpleNamespace(
        process_index=local, local_process_index=local, num_processes=size, device=torch.device("cuda", local)
    )
    return Workers(state, device, tensor_parallel)


def placement(device: str, local: int = 0, size: int = 1, per_model: int = 1, memory: str | None = None) -> Any:
    return worker(device, local, size).placement(per_model, memory)


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


def test_processes_of_one_model_share_its_questions_and_one_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    together = [worker("auto", local, 2, tensor_parallel=2) for local in range(2)]
    assert [(w.rank, w.size) for w in together] == [(0, 1), (0, 1)]
    assert [(w.first, w.writes) for w in together] == [(True, True), (False, False)]
    assert together[1].placement(1, None) == {"device_map": None, "tp_plan": "auto"}
    with pytest.raises(ConfigError, match="excludes --num-gpus-per-model"):
        together[0].placement(2, None)
    with pytest.raises(ConfigError, match="--nproc-per-node 4"):
        Workers.join("cpu", tensor_parallel=4)
