"""Controls as arms of `evaluation.run`: matched to a rule's answers, drafted by nothing, the target alone at rate 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluation.metrics import measure
from evaluation.record import read_settings
from tests.evaluation.running import arguments, invoke, run, write_questions

MARS = ("--method", "mars", "--margin", "logit-gap", "--gap", "2", "--max-new-token", "24")


@pytest.fixture(scope="module")
def rule(tiny_pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Questions, and the answers of mars to them."""
    folder = tmp_path_factory.mktemp("rule")
    questions = write_questions(folder / "q.jsonl", ["ab", "cd"], ["ef"])
    run(arguments(tiny_pair, questions, folder / "mars.jsonl", *MARS), folder / "mars.jsonl")
    return questions, folder / "mars.jsonl"


def control(pair, questions: Path, answers: Path, *more: str) -> list[str]:
    paths = ("--base-model-path", pair[0], "--ea-model-path", pair[1], "--device", "cpu", "--warm-up", "0")
    files = ("--question-file", str(questions), "--answer-file", str(answers), "--max-new-token", "24")
    return [*paths, *files, *more]


@pytest.mark.parametrize("kind", ["random-swap", "matched"])
def test_a_control_takes_margin_and_rate_from_the_rules_run(kind: str, tiny_pair, rule, tmp_path: Path) -> None:
    questions, mars = rule
    path = tmp_path / "control.jsonl"
    rows = run(control(tiny_pair, questions, path, "--method", kind, "--like", str(mars)), path)
    settings, told = read_settings(path), read_settings(mars)
    assert settings.control is not None
    assert settings.control.verify == told.verify
    assert 0 < settings.control.rate <= 1
    assert settings.verify is None
    assert {row.method for row in rows} == {kind}
    assert [len(row.choices[0].turns) for row in rows] == [2, 1]
    assert settings.model_id == f"target-{kind}-marginlogit-gap-gap2.0-temperature-0"
    assert measure(rows)["tau"].value == 1


def test_what_a_control_needs_and_refuses(tiny_pair, rule, tmp_path: Path) -> None:
    questions, mars = rule
    path = tmp_path / "c.jsonl"
    cases = [
        (("--method", "matched"), "needs --like"),
        (("--method", "ar", "--like", str(mars)), "--like is read by"),
        (("--method", "matched", "--like", str(mars), "--theta", "0.9"), "doesn't read --theta"),
        (("--method", "matched", "--like", str(mars), "--depth", "3"), "drafts nothing"),
        (("--method", "matched", "--like", str(tmp_path / "none.jsonl")), "doesn't say how none.jsonl was made"),
    ]
    for more, message in cases:
        result = invoke(control(tiny_pair, questions, path, *more))
        assert result.exit_code == 1, more
        assert message in " ".join(result.output.split()), more
