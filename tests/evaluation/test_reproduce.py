"""A table from plan to pictures with a tiny pair, the log of nodes behind the statistics, and the θ card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from eagle_mars import VerifyConfig
from eagle_mars.errors import ConfigError
from eagle_mars.tree import DraftTree
from evaluation import models, reproduce, tables, theta_card
from evaluation.calibration import Prediction, choose
from evaluation.metrics import Cell
from evaluation.nodes import LoggedNode, NodeLog
from evaluation.table_result import FilledTable

TABLE = {
    "title": "tiny",
    "source": "nobody",
    "parts": [
        {
            "title": "speed",
            "models": ["tiny", "absent", "headless"],
            "tasks": ["gsm8k", "alpaca"],
            "mean": True,
            "arms": {"strict": {"method": "exact"}, "θ = 0.7": {"method": "mars", "options": {"theta": 0.7}}},
            "temperatures": [0.0],
            "metrics": ["strict", "speed-up", "tau", "relaxed per 1000"],
            "unpublished": "nobody says",
            "published": [{"model": "tiny", "task": "mean", "arms": ["θ = 0.7"], "values": {"tau": 9.0}}],
        },
        {
            "title": "nodes",
            "models": ["tiny"],
            "tasks": ["gsm8k"],
            "arms": {"strict": {"method": "exact"}},
            "nodes": True,
            "metrics": ["nodes", "low margin", "rejected at low margin", "median z1"],
            "unpublished": "nobody says",
        },
    ],
}


PAIRS = {
    "title": "pairs",
    "source": "nobody",
    "parts": [
        {
            "title": "answers",
            "models": ["tiny"],
            "tasks": ["gsm8k"],
            "questions": {"gsm8k": 3},
            "margin": 0.05,
            "arms": {
                "alone": {"method": "ar"},
                "strict": {"method": "exact"},
                "θ = 0.7": {"method": "mars", "options": {"theta": 0.7}},
            },
            "temperatures": [0.0],
            "metrics": ["strict", "tau", "regret per 1000"],
            "unpublished": "nobody says",
        }
    ],
}


@pytest.fixture
def configs(tmp_path: Path, tiny_pair, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`configs` with three tables, the tiny pair, and two models that can't be run."""
    target, head = tiny_pair
    tree = {"total_token": 8, "depth": 2, "top_k": 3}
    for folder, name, value in (
        ("tables", "tiny", TABLE),
        ("tables", "pairs", PAIRS),
        ("tables", "more", {**PAIRS, "parts": [{**PAIRS["parts"][0], "questions": {"gsm8k": 5}}]}),
        ("models", "tiny", {"target": target, "head": head, "tree": tree}),
        ("models", "absent", {"target": str(tmp_path / "nowhere"), "head": head}),
        ("models", "headless", {"target": target, "head": None}),
    ):
        path = tmp_path / folder / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(value))
    monkeypatch.setattr(tables, "CONFIGS", tmp_path / "tables")
    monkeypatch.setattr(models, "CONFIGS", tmp_path / "models")
    return tmp_path


def invoke(configs: Path, *more: str, table: str = "tiny", limit: int = 2) -> str:
    paths = ["--work", str(configs / "work"), "--out", str(configs / "out")]
    options = ["--table", table, "--limit", str(limit), "--max-new-tokens", "10", "--device", "cpu"]
    done = CliRunner().invoke(reproduce.app, [*options, *paths, *more])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_plan_runs_nothing(configs: Path) -> None:
    output = invoke(configs, "--plan", "--models", "tiny")
    # per task ar, strict and mars; the nodes are of strict gsm8k answers at T = 1
    assert "tiny: 7 runs, 14 answers, at most 140 new tokens" in " ".join(output.split())
    assert not (configs / "work").exists()


def test_a_table_is_filled_rendered_and_resumed(configs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invoke(configs)
    folder = configs / "out" / "tiny"
    table = FilledTable.model_validate_json((folder / "table.json").read_text())
    cells = {(f.row.model, f.row.task, f.row.arm): f for f in table.parts[0].rows}
    strict, relaxed = cells["tiny", "alpaca", "strict"], cells["tiny", "alpaca", "θ = 0.7"]
    assert strict.ours["relaxed per 1000"].value == 0 < (relaxed.ours["relaxed per 1000"].value or 0)
    assert strict.ours["strict"] == Cell.empty("not a metric of alpaca")
    mean = cells["tiny", "mean", "θ = 0.7"]
    both = [cells["tiny", task, "θ = 0.7"].ours["tau"].value or 0 for task in ("gsm8k", "alpaca")]
    assert mean.ours["tau"].value == pytest.approx(sum(both) / 2)
    assert mean.cells("tau")[2].value == pytest.approx(sum(both) / 2 - 9)
    assert "nowhere" in cells["absent", "gsm8k", "strict"].ours["tau"].reason
    assert "no draft head is known" in cells["headless", "mean", "strict"].ours["tau"].reason
    nodes = table.parts[1].rows[0].ours
    assert (nodes["nodes"].value or 0) > 2
    assert 0 <= (nodes["low margin"].value or 0) <= 1
    pictures = sorted(file.stem for file in folder.glob("*.png"))
    assert pictures == ["accepted_lengths", "first_divergence", "margins", "pareto-1", "theta-1"]
    text = (folder / "table.md").read_text()
    assert all(f"]({picture}.png)" in text for picture in pictures)

    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError("everything is answered, so nothing may be loaded")

    monkeypatch.setattr(reproduce, "load_pair", fail)
    invoke(configs, "--models", "tiny")
    again = FilledTable.model_validate_json((folder / "table.json").read_text())
    assert again.parts[0].rows[0] == table.parts[0].rows[0]
    assert cells["absent", "gsm8k", "strict"].row == again.parts[0].rows[6].row
    assert again.parts[0].rows[6].ours["tau"] == Cell.empty("not run: left out by --models")
    invoke(configs, "--models", "tiny", "--limit", "1")
    one = FilledTable.model_validate_json((folder / "table.json").read_text()).parts[0].rows[0]
    assert one.questions == 1
    assert one.ours["tau"].low is None  # one question has no interval: the other answer in the file doesn't count


def test_a_part_with_a_margin_pairs_its_arms_with_the_strict_one(configs: Path) -> None:
    invoke(configs, "--batch-size", "2", "--table", "more", table="pairs", limit=9)
    folder = configs / "out" / "pairs"
    table = FilledTable.model_validate_json((folder / "table.json").read_text())
    assert {filled.questions for filled in table.parts[0].rows} == {3}  # the part's own limit is the lower one
    assert table.parts[0].rows[1].ours["tau"].value != table.parts[0].rows[2].ours["tau"].value
    paired = (folder / "paired.md").read_text()
    assert "tiny, gsm8k, T = 0" in paired
    columns = next(line for line in paired.splitlines() if "identical" in line).split(" | ")
    texts = [line.split(" | ") for line in paired.splitlines() if line.startswith(("| alone |", "| θ = 0.7 |"))]
    assert [line[columns.index("identical")] for line in texts[:2]] == ["3", "0"]
    assert "(paired.md)" in (folder / "table.md").read_text()
    more = FilledTable.model_validate_json((configs / "out" / "more" / "table.json").read_text())
    assert [filled.questions for filled in more.parts[0].rows] == [5, 5, 5]
    three, five = (filled.parts[0].rows[2].ours["regret per 1000"] for filled in (table, more))
    assert three != five  # each table has the cells of its own questions
    answers = next((configs / "work").glob("answers/gsm8k/*exact*.jsonl")).read_text().splitlines()
    assert len(answers) == 5
    record = json.loads(next((configs / "work").glob("answers/gsm8k/*exact*.run.json")).read_text())
    assert (record["settings"]["batch_size"], record["settings"]["model"]["cpu_pack"]) == (2, False)


def test_an_unknown_model_is_one_sentence(configs: Path) -> None:
    done = CliRunner().invoke(reproduce.app, ["--table", "tiny", "--models", "tini"])
    assert done.exit_code == 1
    assert "tini is in none of these tables" in " ".join(done.output.split())


def test_the_node_log_sees_rejections_and_runners_up() -> None:
    """Root with children 5 and 6; the target wants 5, then 8 where only its runner-up 7 was drafted."""
    tree = DraftTree.from_parents(torch.tensor([[1, 5, 6, 7]]), torch.tensor([[-1, 0, 0, 1]]), max_depth=2)
    logits = torch.zeros(1, 4, 10)
    logits[0, 0, 5], logits[0, 0, 6] = 4.0, 1.0
    logits[0, 1, 8], logits[0, 1, 7] = 5.0, 4.75
    log = NodeLog()
    verdict = log(tree, logits, VerifyConfig(rule="exact"))
    assert verdict.n_accepted.tolist() == [1]
    assert log.nodes == [LoggedNode(4.0, 1.0, False, True), LoggedNode(5.0, 4.75, True, True)]
    assert [node.fires(0.9) for node in log.nodes] == [False, True]


def test_the_theta_card_chooses_inside_the_budget_and_confirms(configs: Path) -> None:
    prompts = configs / "prompts.txt"
    prompts.write_text("ab\ncd\nef\n")
    out = configs / "card.json"
    options = ["--prompts", str(prompts), "--model", "tiny", "--max-new-tokens", "16", "--budget", "0.3"]
    done = CliRunner().invoke(theta_card.app, [*options, "--margin", "logit-ratio", "--out", str(out)])
    assert done.exit_code == 0, done.output
    card = json.loads(out.read_text())
    replayed = {row["name"]: row for row in card["replayed"]}
    thetas = [row for row in card["replayed"] if row["name"].startswith("mars θ")]
    taus = [row["tau"]["value"] for row in thetas]
    assert taus == sorted(taus, reverse=True)  # a lower θ accepts no less at the same trees
    rates = [row["fires"] for row in thetas]
    assert rates == sorted(rates, reverse=True)
    chosen = replayed[card["chosen"]["name"]]
    assert chosen["regret"]["value"] <= 0.3
    assert chosen["tau"]["value"] == max(row["tau"]["value"] for row in thetas if row["regret"]["value"] <= 0.3)
    assert card["chosen"]["equivalents"]["theta"] == card["chosen"]["verify"]["theta"]
    told = card["confirmed"]
    assert told["prompts"] == 3
    assert told["tau_gain"]["value"] == pytest.approx(told["tau"][1]["value"] / told["tau"][0]["value"])
    assert told["quality"]["value"] == pytest.approx(
        told["log_probability"][1]["value"] - told["log_probability"][0]["value"]
    )
    assert 0 <= told["power"] <= 1
    assert len(card["model"]["head checkpoint"]["sha256"]) == 64
    assert card["chosen"]["name"] in out.with_suffix(".md").read_text()


def test_the_choice_keeps_to_the_budget() -> None:
    def prediction(theta: float, tau: float, regret: float) -> Prediction:
        return Prediction(f"{theta:g}", VerifyConfig(theta=theta), Cell(tau), Cell(regret), 0.1)

    offered = [prediction(0.8, 3.0, 0.2), prediction(0.9, 2.5, 0.1), prediction(0.95, 2.5, 0.05)]
    assert choose(offered, "logit-ratio", 0.3).name == "0.8"
    assert choose(offered, "logit-ratio", 0.15).name == "0.95"  # as good for less
    with pytest.raises(ConfigError, match=r"the least is 0.05: raise --budget"):
        choose(offered, "logit-ratio", 0.01)
