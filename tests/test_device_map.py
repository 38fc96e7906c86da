"""Targets that accelerate has placed: several devices, and weights that wait elsewhere until they are needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle_mars import EaModel, SamplingConfig, VerifyConfig
from eagle_mars.causal_lm import where_it_runs
from tests.parallel import offloaded

ROOT = Path(__file__).parents[1]
SHAPE = (12, 3, 4)
EXACT = VerifyConfig(rule="exact")
ON_DISK = {
    "model.embed_tokens": "cpu",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
    **{f"model.layers.{i}": "disk" if i in (0, 2, 5) else "cpu" for i in range(8)},
}


def texts(ea: EaModel) -> list[tuple[int, ...]]:
    sampled = SamplingConfig(temperature=0.8, seed=5)
    return [
        ea.generate("abc", max_new_tokens=12, verify=EXACT).token_ids,
        ea.generate("abc", max_new_tokens=12, sampling=sampled).token_ids,
        ea.generate("abc", max_new_tokens=12, method="autoregressive").token_ids,
    ]


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}, ON_DISK], ids=["auto", "one device", "disk"])
def test_texts_do_not_depend_on_where_the_weights_are(device_map: Any, tiny_pair, tmp_path: Path) -> None:
    ea = EaModel.from_pretrained(*tiny_pair, *SHAPE, device_map=device_map, offload_folder=str(tmp_path))
    away = {name for name, p in ea.base_model.named_parameters() if p.device.type == "meta"}
    assert bool(away) == (device_map is ON_DISK)
    assert set(ea.target.layer_devices) == {torch.device("cpu")}  # where they compute, so where the cache has to be
    assert ea.device == torch.device("cpu")
    assert {p.device for p in ea.ea_layer.parameters()} == {torch.device("cpu")}
    assert texts(ea) == texts(EaModel.from_pretrained(*tiny_pair, *SHAPE))


def test_two_processes_with_a_device_map_each_share_the_prompts(tiny_pair, tmp_path: Path) -> None:
    out = tmp_path / "texts"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.parallel.offloaded", *tiny_pair, str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    first, second = json.loads(out.read_text())
    assert first["away"] > 0
    assert second["away"] > 0
    together = [text for pair in zip(first["texts"], second["texts"], strict=True) for text in pair]
    assert together == offloaded.texts(EaModel.from_pretrained(*tiny_pair, *SHAPE), offloaded.PROMPTS)


def test_a_module_runs_where_its_hook_takes_the_weights() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    assert where_it_runs(layer) == torch.device("cpu")
    layer[0]._hf_hook = SimpleNamespace(execution_device="cuda:1")
    assert where_it_runs(layer) == torch.device("cuda", 1)
    layer[0]._hf_hook = SimpleNamespace(hooks=(SimpleNamespace(), SimpleNamespace(execution_device="cuda:2")))
    assert where_it_runs(layer) == torch.device("cuda", 2)
