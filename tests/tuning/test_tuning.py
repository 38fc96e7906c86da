from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from eagle_mars.cli import app
from eagle_mars.config import DraftConfig, VerifyConfig
from eagle_mars.engine import Engine, Request
from eagle_mars.errors import ConfigError
from eagle_mars.model import EaModel
from eagle_mars.target import TargetModel
from eagle_mars.tuning import store
from eagle_mars.tuning.replay import Recording, replay, tau
from eagle_mars.tuning.tuner import Candidate, Grid, Tuning, tune
from tests.tiny import tiny_head, tiny_model

PROMPT = torch.tensor([[3, 9, 4, 11]])
SMALL = Grid(nodes=(2, 3, 5, 8, 12), depth=2, top_k=(1, 3))


@pytest.fixture(scope="module")
def pair():
    model = tiny_model("Llama", vocab_size=16)
    head = tiny_head(model)
    return TargetModel(model, head.config.capture_layers), head


@pytest.mark.parametrize(
    "draft",
    [
        DraftConfig(total_token=6, depth=2, top_k=3),
        DraftConfig(total_token=10, depth=1, top_k=3),
        DraftConfig(total_token=4, depth=0, top_k=3),
        DraftConfig(total_token=14, depth=2, top_k=3),
    ],
)
def test_one_replay_knows_what_every_tree_accepts(pair, draft: DraftConfig) -> None:
    target, _ = pair
    request = Request(max_new_tokens=40, draft=draft, verify=VerifyConfig(rule="exact"))
    hits = 0
    for seed in range(4):  # a random head rarely hits; together they do
        head = tiny_head(target.model, seed=seed)
        steps = list(Engine(target, head).speculate(PROMPT, request))
        answer = torch.tensor([[token for step in steps for token in step.tokens]])
        ids = torch.cat((PROMPT, answer), dim=1)
        features = target.prefill(ids, target.new_cache(1, ids.shape[1])).features
        positions = replay(head, Recording(ids, features, PROMPT.shape[1]), depth=2, top_k=3)
        accepted, at = [], 0
        while at < len(positions):
            accepted.append(sum(needed <= draft.total_token for needed in positions[at][draft.depth]))
            at += accepted[-1] + 1
        assert accepted == [step.accepted for step in steps[1:]][: len(accepted)]
        assert tau(positions, draft.depth, draft.total_token) == pytest.approx(1 + sum(accepted) / len(accepted))
        hits += sum(accepted)
    assert hits > 5


def test_the_best_quotient_wins(pair) -> None:
    found = tune(*pair, [PROMPT], max_new_tokens=24, grid=SMALL)
    speeds = [c.tokens_per_second for c in found.candidates]
    assert speeds == sorted(speeds, reverse=True)
    assert {c.total_token for c in found.candidates} == set(SMALL.nodes)
    for c in found.candidates:
        assert c.tokens_per_second == pytest.approx(1000 * c.tau / (c.draft_ms + c.target_ms))
        assert c.draft.total_token == c.total_token


def test_answers_too_short_to_tell_anything_are_refused(pair) -> None:
    with pytest.raises(ConfigError, match="longer than 3 tokens"):
        tune(*pair, [PROMPT], max_new_tokens=3, grid=SMALL)


@pytest.fixture
def one(monkeypatch, tmp_path: Path) -> Tuning:
    """Tuning finds this at once; its file lies in a directory of its own."""
    monkeypatch.setenv("EAGLE_MARS_HOME", str(tmp_path))
    best = Candidate(total_token=5, depth=1, top_k=2, tau=1.5, draft_ms=1, target_ms=2, tokens_per_second=500)
    found = Tuning(candidates=(best,), plain_tokens_per_second=400)
    calls = []

    def tune_once(*arguments, **keywords) -> Tuning:
        calls.append(arguments)
        assert len(calls) == 1, "what is in the file was measured again"
        return found

    monkeypatch.setattr(store, "tune", tune_once)
    return found


def test_minus_one_is_the_measured_tree_and_is_remembered(one: Tuning, tiny_pair) -> None:
    for _ in range(2):
        model = EaModel.from_pretrained(*tiny_pair, total_token=-1)
        assert model.draft == DraftConfig(total_token=5, depth=1, top_k=2)
    assert list(json.loads(store.store_path().read_text()).values()) == [one.model_dump(mode="json")]


def test_another_dtype_or_number_of_threads_is_another_key(pair) -> None:
    target, head = pair
    own = store.key(target.model, head)
    assert store.key(target.model, head) == own
    assert store.key(tiny_model("Llama", vocab_size=16).bfloat16(), head) != own
    assert store.key(tiny_model("Llama", vocab_size=16, seed=5), head) != own
    torch.set_num_threads(2)
    try:
        assert store.key(target.model, head) != own
    finally:
        torch.set_num_threads(1)


def test_a_damaged_file_is_measured_anew(one: Tuning, caplog) -> None:
    store.store_path().write_text("{")
    with caplog.at_level(logging.WARNING):
        assert store.load("k") is None
    assert "tuning again" in caplog.text
    store.save("k", one)
    assert store.load("k") == one


def test_the_command_prints_the_trees_and_minus_one_takes_the_best(one: Tuning, tiny_pair) -> None:
    pair = ["--model", tiny_pair[0], "--head", tiny_pair[1], "--threads", "1"]
    done = CliRunner().invoke(app, ["tune", *pair])
    assert done.exit_code == 0, done.output
    assert "1.25" in done.stdout  # 500 over plain decoding's 400 tokens per second
    done = CliRunner().invoke(app, ["tune", "--json", *pair])
    assert json.loads(done.stdout) == one.model_dump(mode="json")
    done = CliRunner().invoke(app, ["generate", "ab", "--total-token", "-1", "--max-new-tokens", "4", *pair])
    assert done.exit_code == 0, done.output
