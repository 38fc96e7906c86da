"""Two gloo processes hold one target: same texts as one process, and no process goes its own way unnoticed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_mars import EaModel
from eagle_mars.errors import ConfigError
from eagle_mars.loading import load_target, tensor_parallel_options
from eagle_mars.target import TargetModel
from evaluation.answers import Answer
from tests.evaluation.running import arguments, run, untimed
from tests.parallel.decode import load, texts

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def two(tiny_pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes reports, and the answer file of an evaluation by both."""
    out = tmp_path_factory.mktemp("two") / "report"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    command += ["-m", "tests.parallel.decode", *tiny_pair, str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    reports = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(2)]
    return [{**report, "answers": Path(f"{out}.jsonl"), "stdout": done.stdout} for report in reports]


def test_two_processes_give_the_texts_of_one(tiny_pair: tuple[str, str], two: list[dict[str, Any]]) -> None:
    alone = load(*tiny_pair)
    one = texts(alone)
    assert two[0]["texts"] == one
    assert 2 * two[0]["kv_heads"] == alone.target.kv_heads
    assert one["exact"] == one["alone"] == one["together"]
    assert one["mars"] != one["exact"]  # else the arms test one thing
    assert one["sampled"] != one["exact"]


def test_all_processes_give_the_same_texts_whoever_chose_the_seed(two: list[dict[str, Any]]) -> None:
    assert two[0]["texts"] == two[1]["texts"]
    assert two[0]["unseeded"] == two[1]["unseeded"]


def test_a_process_that_differs_is_an_error_in_all_of_them(two: list[dict[str, Any]]) -> None:
    assert two[0]["errors"] == two[1]["errors"]
    errors = two[0]["errors"]
    assert "differ in their prompts or options" in errors["prompt"]
    assert "differ in their prompts or options" in errors["options"]
    assert "differ in their prompts or options" in errors["method"]
    assert "differ in what they drafted" in errors["tree"]
    assert "differ in what they decided" in errors["fault"]
    assert "differ in what they decided" in errors["verdict"]
    assert two[0]["after"] == two[0]["texts"]["exact"][0]  # the next response is a new start


def test_an_evaluation_by_both_writes_the_file_of_one(tiny_pair, two: list[dict[str, Any]], tmp_path: Path) -> None:
    answers = two[0]["answers"]
    question, alone = answers.with_name("report.question.0"), tmp_path / "a.jsonl"
    # exact has no regret, a sum of floats that slices round otherwise.
    expected = run(arguments(tiny_pair, question, alone, "--method", "exact"), alone)
    assert untimed([Answer.model_validate_json(line) for line in answers.read_text().splitlines()]) == untimed(expected)
    assert two[0]["stdout"].count('"answers": 1') == 1  # one process speaks for both


def test_the_number_of_processes_has_to_be_that_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert tensor_parallel_options(4) == {"tp_plan": "auto"}
    assert tensor_parallel_options(1) == {}
    with pytest.raises(ConfigError, match="--nproc-per-node 2"):
        tensor_parallel_options(2)


def test_packed_layers_and_processes_exclude_each_other(tiny_pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TargetModel, "tensor_parallel", 2)
    monkeypatch.setattr("eagle_mars.target.Ranks", lambda device, size: object())
    with pytest.raises(ConfigError, match="cpu_pack"):
        EaModel.from_pretrained(*tiny_pair, dtype=torch.float32, cpu_pack=True)


def test_a_device_map_and_processes_exclude_each_other(tiny_pair) -> None:
    with pytest.raises(ConfigError, match="excludes device_map"):
        load_target(tiny_pair[0], tp_plan="auto", device_map="auto")
