from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from eagle_mars import EaModel
from evaluation.matching import REFERENCE, Matched
from evaluation.rules import app, log_probabilities, read_answers

MATCHED = Matched(
    temperature=0,
    cycles=1,
    nodes=1,
    firing_rate_theta_90=0.5,
    firing_rate_theta_96=0.5,
    gap_for_theta_90=1.0,
    gap_for_theta_96=0.5,
    delta=0.5,
    rho=0.25,
    epsilon=0.09,
    alpha=0.3,
    accepted={},
)


@pytest.fixture
def options(tiny_pair, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ab\ncd\n")
    target, head = tiny_pair
    return ["--prompts", str(prompts), "--tree", "8,2,3", "--max-new-tokens", "8", "--model", target, "--head", head]


def invoke(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return done.output


def test_every_rule_has_a_row_and_exact_is_the_yardstick(options: list[str], tmp_path: Path) -> None:
    matched, answers = tmp_path / "matched.json", tmp_path / "answers.jsonl"
    matched.write_text(MATCHED.model_dump_json())
    for temperature in ("0", "1"):
        file = answers.with_suffix(f".t{temperature}")
        run = ["run", *options, "--temperature", temperature, "--matched", str(matched), "--answers", str(file)]
        invoke(*run, "--part", "0/2")
        first_half = file.read_text()
        invoke(*run)  # the other half; what is there is neither repeated nor changed
        assert file.read_text().startswith(first_half)
        assert "\n" in first_half
        keys = [(row["prompt"], row["rule"]) for row in read_answers([file])]
        assert len(set(keys)) == len(keys)
        invoke("table", str(file), "--out", str(tmp_path))
        assert (tmp_path / f"rules-t{temperature}.md").is_file()
    greedy, sampled = (json.loads(line)["rules"] for line in (tmp_path / "rules.jsonl").read_text().splitlines())
    for rows in (greedy, sampled):
        exact = {column: cell.get("value") for column, cell in rows["exact"].items()}
        assert exact["relaxed per 1000"] == exact["regret per 1000"] == 0
        assert exact["length ratio"] == exact["tok/s against exact"] == exact["tau against exact"] == 1
        assert exact["log-probability"] < 0
    assert sampled["exact"]["TV per node"]["value"] == 0
    assert sampled["released q draft, ratio off"]["TV per node"]["value"] > 0
    # without q and ratio the released code is exact
    assert sampled["released q 1, ratio off"]["TV per node"]["value"] == 0


def test_answers_of_other_settings_are_refused(options: list[str], tmp_path: Path) -> None:
    matched, answers = tmp_path / "matched.json", tmp_path / "answers.jsonl"
    matched.write_text(MATCHED.model_dump_json())
    run = ["run", *options, "--matched", str(matched), "--answers", str(answers)]
    invoke(*run)
    done = CliRunner().invoke(app, [*run, "--seed", "1"])
    assert done.exit_code == 1
    assert "new file" in done.stderr
    missing = CliRunner().invoke(app, ["table", str(tmp_path / "none.jsonl")])
    assert missing.exit_code == 1
    assert "can't read" in missing.stderr


def test_matched_options_do_as_much_as_the_reference(options: list[str], tmp_path: Path) -> None:
    out = tmp_path / "matched.json"
    invoke("match", *options, "--temperature", "1", "--out", str(out))
    values = json.loads(out.read_text())
    assert values.pop("provenance")["commit"]
    matched = Matched.model_validate(values)
    assert matched.firing_rate_theta_96 <= matched.firing_rate_theta_90
    assert matched.gap_for_theta_96 <= matched.gap_for_theta_90
    others = [value for name, value in matched.accepted.items() if name != REFERENCE]
    assert len(others) == 3


def test_log_probabilities_are_the_targets(tiny_pair) -> None:
    ea = EaModel.from_pretrained(*tiny_pair, total_token=8, depth=2, top_k=3)
    prompt = ea.chat_ids("ab")
    result = ea.generate(prompt, max_new_tokens=5, method="autoregressive")
    with torch.no_grad():
        logits = ea.base_model(torch.tensor([[*prompt, *result.token_ids]])).logits[0, len(prompt) - 1 : -1]
    expected = [float(row.log_softmax(-1)[token]) for row, token in zip(logits, result.token_ids, strict=True)]
    assert log_probabilities(ea, prompt, result) == pytest.approx(expected, abs=1e-4)  # fp32, other kernels
