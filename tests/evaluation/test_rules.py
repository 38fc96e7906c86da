from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from eagle_mars import EaModel
from evaluation.rules import app, log_probabilities


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_every_rule_has_a_row_and_exact_is_the_yardstick(temperature: str, tiny_pair, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ab\ncd\n")
    target, head = tiny_pair
    arguments = ["--prompts", str(prompts), "--temperature", temperature, "--tree", "8,2,3", "--max-new-tokens", "8"]
    done = CliRunner().invoke(app, [*arguments, "--model", target, "--head", head, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    rows = {row["rule"]: row for row in json.loads((tmp_path / "rows.jsonl").read_text())["methods"]}
    exact = rows["exact"]
    assert exact["relaxed per 1000"] == exact["regret per 1000"] == 0
    assert exact["length ratio"] == exact["tok/s against exact"] == 1
    assert exact["log-probability"] < 0
    if temperature == "1":
        assert exact["TV per node"] == 0 < rows["released q draft, ratio off"]["TV per node"]
        assert rows["released q 1, ratio off"]["TV per node"] == 0  # without q and ratio the released code is exact
    assert (tmp_path / f"rules-t{temperature}.md").is_file()


def test_log_probabilities_are_the_targets(tiny_pair) -> None:
    ea = EaModel.from_pretrained(*tiny_pair, total_token=8, depth=2, top_k=3)
    prompt = ea.chat_ids("ab")
    result = ea.generate(prompt, max_new_tokens=5, method="autoregressive")
    with torch.no_grad():
        logits = ea.base_model(torch.tensor([[*prompt, *result.token_ids]])).logits[0, len(prompt) - 1 : -1]
    expected = [float(row.log_softmax(-1)[token]) for row, token in zip(logits, result.token_ids, strict=True)]
    assert log_probabilities(ea, prompt, result) == pytest.approx(expected, abs=1e-4)  # fp32, other kernels
