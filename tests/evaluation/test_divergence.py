"""The paired report: where answers part and why, flips, and scores where the rule fired."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from eagle_mars import EaModel
from evaluation.answers import Answer
from evaluation.data.questions import Question
from evaluation.differences import Difference, diverge
from evaluation.divergence import app, flip_cells
from evaluation.gaps import Gaps, top2_gap
from evaluation.models import ModelConfig
from evaluation.settings import RunSettings
from tests.evaluation.rows import answer, failed, turn
from tests.evaluation.test_score import sums, write_answers, write_questions


class FixedGaps(Gaps):
    """Knows a gap by position, and refuses to be asked about anything else."""

    def __init__(self, known: dict[int, float]) -> None:
        self.known = known

    def at(self, answer: Answer, choice: int, turn: int, position: int) -> float:
        return self.known[position]


def only(ours, base, gaps: Gaps | None = None) -> Difference:
    (found,) = diverge([answer(1, ours)], [answer(1, base, method="exact")], gaps).differences
    return found


def test_identical_answers_are_counted_and_choices_are_paired() -> None:
    same, other = turn("ttt"), turn("ttt", tokens=(0, 5, 2))
    found = diverge([answer(1, same, same), answer(2, same), failed(3)], [answer(1, same, other), answer(2, same)])
    assert found.identical == 2
    assert [(d.question_id, d.choice, d.position) for d in found.differences] == [(1, 1, 1)]


@pytest.mark.parametrize(
    ("ours", "base", "position", "reason"),
    [
        (turn("ttr", tokens=(1, 2, 3)), turn("ttt", tokens=(1, 2, 9)), 2, "relaxed"),
        (turn("trt", tokens=(1, 2, 3)), turn("ttt", tokens=(1, 2, 9)), 2, "relaxed"),
        (turn("ttr", tokens=(1, 8, 3)), turn("ttt", tokens=(1, 2, 3)), 1, "unmeasured"),
        (turn("tt", tokens=(1, 2)), turn("ttt", tokens=(1, 2, 9)), 2, "ended"),
        (turn("ttt", tokens=(1, 2, 9), temperature=1.0), turn("ttt", tokens=(4, 2, 9), temperature=1.0), 0, "sampling"),
        (turn("tr", tokens=(1, 2), temperature=1.0), turn("tt", tokens=(1, 9), temperature=1.0), 1, "relaxed"),
    ],
)
def test_why_answers_part(ours, base, position: int, reason: str) -> None:
    found = only(ours, base)
    assert (found.position, found.reason) == (position, reason)


def test_a_measured_gap_tells_a_tie_from_a_defect() -> None:
    ours, base = turn("ttt", tokens=(1, 8, 3)), turn("ttt", tokens=(1, 2, 3))
    assert only(ours, base, FixedGaps({1: 1e-5})).reason == "tie"
    found = only(ours, base, FixedGaps({1: 0.4}))
    assert (found.reason, found.gap) == ("unexplained", 0.4)
    relaxed = turn("trt", tokens=(1, 8, 3))
    assert only(relaxed, base, FixedGaps({})).reason == "relaxed"  # nobody asks for a gap there


def test_only_the_first_different_turn_counts() -> None:
    ours = [turn("tt"), turn("tr", tokens=(1, 5)), turn("tr", tokens=(7, 8))]
    base = [turn("tt"), turn("tt", tokens=(1, 2)), turn("tt", tokens=(1, 2))]
    assert only(ours, base) == Difference(1, 0, 1, 1, "relaxed")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Exact solves 1, 2, 3 of 0..4; the rule fires on 2, 3, 4, loses 2, wins 4."""

    def rows(method: str, *texts: tuple[str, str]) -> list[Answer]:
        made = []
        for n, (kind, text) in enumerate(texts):
            tokens = tuple(7 * ord(letter) + i for i, letter in enumerate(kind))  # relaxed tokens are other tokens
            made.append(answer(n, turn(kind, tokens=tokens, text=f"#### {text}", low_margin=4), method=method))
        return made

    exact = rows("exact", ("tee", "0"), ("tee", "6"), ("tee", "7"), ("tee", "8"), ("tee", "0"))
    mars = rows("mars", ("tee", "0"), ("tee", "6"), ("ter", "0"), ("ter", "8"), ("trr", "9"))
    return {
        "questions": write_questions(tmp_path / "q.jsonl", *sums(5, 6, 7, 8, 9)),
        "exact": write_answers(tmp_path / "exact.jsonl", *exact),
        "mars": write_answers(tmp_path / "mars.jsonl", *mars),
        "null": write_answers(tmp_path / "null.jsonl", *exact),
    }


def run(files: dict[str, Path], *more: str, out: Path):
    given = [files["exact"], files["mars"], files["null"], "--question-file", files["questions"], "--out", out]
    return CliRunner().invoke(app, [*map(str, given), "--margin", "0.1", *more])


def test_the_report(files: dict[str, Path], tmp_path: Path) -> None:
    done = run(files, out=tmp_path / "out")
    assert done.exit_code == 0, done.output
    told = json.loads((tmp_path / "out" / "divergence.json").read_text())
    mars, null = told["arms"]
    value = {name: cell.get("value") for part in ("texts", "scores") for name, cell in mars[part].items()}
    assert (value["identical"], value["relaxed"], value["unexplained"]) == (2, 3, 0)
    assert (value["first difference"], value["relaxed per low margin"]) == (2, 4 / 20)
    assert (value["base score"], value["score"], value["difference"]) == pytest.approx((0.6, 0.6, 0))
    assert (value["lost"], value["won"], value["McNemar p"]) == (1, 1, 1)
    assert value["lower bound"] < 0
    assert value["p(loss >= margin)"] > 0.05
    fired = {group: {name: cell.get("value") for name, cell in cells.items()} for group, cells in mars["fired"].items()}
    assert (fired["fired"]["n"], fired["fired"]["base score"], fired["fired"]["score"]) == pytest.approx(
        (3, 2 / 3, 2 / 3)
    )
    assert (fired["not fired"]["n"], fired["not fired"]["difference"]) == (2, 0)
    assert mars["differences"][0] == {
        "question_id": 2, "choice": 0, "turn": 0, "position": 2, "reason": "relaxed", "gap": None
    }  # fmt: skip
    assert null["texts"]["identical"]["value"] == 5
    assert "nothing flips" in null["scores"]["prompts needed"]["reason"]
    assert null["fired"]["fired"]["difference"]["reason"] == "no question"
    assert (tmp_path / "out" / "divergence.md").read_text().strip() == done.output.strip()


def test_shares_are_compared_but_never_flip() -> None:
    cells = flip_cells({1: 0.5}, {1: 1.0}, 0.1)
    assert {cell.value for cell in cells.values()} == {None}


def test_a_margin_of_nothing_is_refused(files: dict[str, Path], tmp_path: Path) -> None:
    done = run(files, "--margin", "0", out=tmp_path)
    assert done.exit_code == 1
    assert "has to be above 0" in " ".join(done.output.split())


def test_ties_need_the_record_of_the_run(files: dict[str, Path], tmp_path: Path) -> None:
    done = run(files, "--ties", out=tmp_path)
    assert done.exit_code == 1
    assert "doesn't say how exact.jsonl was made" in " ".join(done.output.split())


def test_the_gap_is_the_targets_own_after_the_same_conversation(tiny_pair) -> None:
    target, head = tiny_pair
    settings = RunSettings(
        model_id="m",
        bench_name="mt_bench",
        task_version=1,
        model=ModelConfig(target=target, head=head),
        method="exact",
        verify=None,
        temperature=0,
        max_new_tokens=8,
    )
    ea = EaModel.from_pretrained(target, head, total_token=8, depth=2, top_k=3)
    question = Question(question_id=1, turns=("ab", "cd"))
    told = answer(1, [turn("tt", text="xy"), turn("ttt", tokens=(70, 71, 72))])
    gap = Gaps(ea, settings, [question]).at(told, 0, 1, 2)
    messages = [{"role": r, "content": c} for r, c in (("user", "ab"), ("assistant", "xy"), ("user", "cd"))]
    ids = torch.tensor([[*ea.chat_ids(messages), 70, 71]])
    with torch.no_grad():
        best = ea.base_model(ids).logits[0, -1].topk(2).values
    assert gap == pytest.approx(float(best[0] - best[1]), abs=1e-5)  # fp32, other kernels
    assert gap == top2_gap(ea, ids)
