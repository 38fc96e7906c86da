from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from eagle_mars import DraftConfig, EaModel
from evaluation.peers import hf_generate
from evaluation.sweep import app, first_difference, parse_tree


def test_tree_names() -> None:
    assert parse_tree("chain-3") == DraftConfig(total_token=4, depth=2, top_k=1)
    assert parse_tree("26,4,8") == DraftConfig(total_token=26, depth=4, top_k=8)


@pytest.mark.parametrize("tree", ["chain-x", "26,4", "wide"])
def test_what_is_no_tree_is_refused_in_one_sentence(tree: str, tiny_pair) -> None:
    done = CliRunner().invoke(app, [tree, "--model", tiny_pair[0], "--head", tiny_pair[1]])
    assert done.exit_code == 1
    assert f"'{tree}' is no tree" in done.stderr


def test_sweep_writes_a_row_with_provenance_and_a_table(tiny_pair, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ab\ncd\nef\n")
    target, head = tiny_pair
    arguments = ["chain-2", "8,2,3", "--prompts", str(prompts), "--limit", "2", "--max-new-tokens", "10"]
    done = CliRunner().invoke(
        app, [*arguments, "--threads", "1", "--model", target, "--head", head, "--out", str(tmp_path), "--name", "t"]
    )
    assert done.exit_code == 0, done.output
    row = json.loads((tmp_path / "rows.jsonl").read_text())
    methods = {method["method"]: method for method in row["methods"]}
    assert list(methods) == ["ar", "generate", "exact chain-2", "mars chain-2", "exact 8,2,3", "mars 8,2,3"]
    assert methods["exact 8,2,3"]["identical_to_ar"] == methods["generate"]["identical_to_ar"] == 2
    assert methods["ar"]["speedup_vs_ar"] == 1
    assert row["differences"] == []
    assert {"commit", "command", "device", "threads", "packages"} <= row["provenance"].keys()
    assert "| exact chain-2 |" in (tmp_path / "t.md").read_text()


def test_first_difference_reports_the_gap_of_the_two_best_logits(tiny_pair) -> None:
    ea = EaModel.from_pretrained(*tiny_pair, total_token=8, depth=2, top_k=3)
    prompt = ea.chat_ids("ab")
    base = hf_generate(ea.base_model, ea.tokenizer, prompt, 8, "generate")
    other = hf_generate(ea.base_model, ea.tokenizer, prompt, 8, "generate")
    object.__setattr__(other, "token_ids", (*base.token_ids[:5], base.token_ids[5] + 1, 0, 0))
    found = first_difference(ea, prompt, other, base)
    with torch.no_grad():
        logits = ea.base_model(torch.tensor([[*prompt, *base.token_ids[:5]]])).logits[0, -1]
    best = logits.topk(2).values
    assert found["position"] == 5
    assert found["top2_gap"] == pytest.approx(
        float(best[0] - best[1]), abs=1e-4
    )  # another kernel for one row of logits
    assert not found["tie"]
