from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from eagle_mars import EaModel
from evaluation import logits


def test_best_two_are_the_logits_that_chose_each_token(tiny_pair) -> None:
    ea = EaModel.from_pretrained(*tiny_pair, total_token=8, depth=2, top_k=3)
    prompt = ea.chat_ids("ab")
    best = logits.best_two(ea, prompt, 5)
    result = ea.generate(prompt, max_new_tokens=5, method="autoregressive")
    with torch.no_grad():
        rows = ea.base_model(torch.tensor([[*prompt, *result.token_ids]])).logits[0, len(prompt) - 1 : -1]
    chosen = rows.gather(-1, torch.tensor(result.token_ids).unsqueeze(-1)).squeeze(-1)
    assert best[:, 0].tolist() == pytest.approx(chosen.tolist(), abs=1e-4)  # fp32, other kernels
    assert (best[:, 0] >= best[:, 1]).all()
    assert len(best) == result.new_tokens


def test_description_by_hand() -> None:
    facts = logits.describe(torch.tensor([10.0, 20.0, -1.0]), torch.tensor([9.5, 10.0, -2.0]))
    assert facts["positions"] == 3
    assert facts["z1 <= 0"] == 1
    assert facts["theta"]["0.9"]["fires"] == round(1 / 3, 3)  # 9.5 > 9; the negative row never fires
    assert facts["theta"]["0.9"]["largest gap allowed"] == 2.0
    assert 0.5 < facts["theta"]["0.9"]["gap that fires as often"] <= 1.0  # only the gap of .5 is below it
    assert facts["gap"]["50%"] == 1.0


def test_command_writes_numbers_and_picture(tiny_pair, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ab\ncd\n")
    target, head = tiny_pair
    command = logits.typer.Typer()
    command.command()(logits.main)
    arguments = ["--prompts", str(prompts), "--model", target, "--head", head, "--max-new-tokens", "6"]
    done = CliRunner().invoke(command, [*arguments, "--out", str(tmp_path / "z.png")])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "z.json").read_text())["positions"] <= 12
    assert (tmp_path / "z.png").read_bytes().startswith(b"\x89PNG")
