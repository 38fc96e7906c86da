"""Answer files in, table out: every question counts, nothing is invented, other people's questions are refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from evaluation.answers import Answer
from evaluation.data.questions import Question, fingerprint, read_questions
from evaluation.graders.grade import grade
from evaluation.graders.problems import with_problems
from evaluation.score import app
from evaluation.tasks import find_task
from tests.evaluation.rows import answer, failed, turn


def write_answers(path: Path, *rows: Answer) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(row.model_dump_json() + "\n" for row in rows), "utf-8")
    return path


def write_questions(path: Path, *questions: Question) -> Path:
    path.write_text("".join(q.model_dump_json(exclude_defaults=True) + "\n" for q in questions), "utf-8")
    return path


def sums(*golds: int) -> list[Question]:
    return [Question(question_id=n, turns=(f"{gold}?",), reference=(f"#### {gold}",)) for n, gold in enumerate(golds)]


def score(*arguments: str):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def gsm8k(tmp_path: Path) -> dict[str, Path]:
    """Four questions; `ar` is right on three, `mars` on two by form and three by value, and failed at one."""
    questions = write_questions(tmp_path / "q.jsonl", *sums(5, 6, 7, 8))
    ar = [
        answer(n, turn("tttt", seconds=4.0, text=f"#### {given}"), method="ar") for n, given in enumerate((5, 6, 7, 0))
    ]
    mars = [
        answer(0, turn("ter", accepted=(1,), seconds=1.5, text="#### 5")),
        answer(1, turn("tee", accepted=(1,), seconds=1.5, text="It is 6")),
        failed(2),
        answer(3, turn("tee", accepted=(2,), seconds=1.5, text="#### 8")),
    ]
    return {
        "questions": questions,
        "ar": write_answers(tmp_path / "ar.jsonl", *ar),
        "mars": write_answers(tmp_path / "mars.jsonl", *mars),
    }


def test_one_command_gives_scores_costs_and_pairs(gsm8k: dict[str, Path], tmp_path: Path) -> None:
    done = score(gsm8k["ar"], gsm8k["mars"], "--question-file", gsm8k["questions"], "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    told = json.loads((tmp_path / "out" / "scores.json").read_text())
    ar, mars = ({name: cell.get("value") for name, cell in row["cells"].items()} for row in told["rows"])
    assert (ar["strict"], ar["flexible"], ar["tau"], ar["speed-up"]) == (0.75, 0.75, 1, 1)
    assert (mars["strict"], mars["flexible"], mars["errors"], mars["unanswered"]) == (0.5, 0.75, 1, 0)
    assert mars["speed-up"] == pytest.approx(2)
    assert mars["length ratio"] == pytest.approx(9 / 12)
    assert mars["relaxed per 1000"] == pytest.approx(1000 / 9)
    assert mars["seconds per solved"] == pytest.approx(4.5 / 2)
    assert told["baseline"] == "ar"
    assert told["provenance"]["command"]
    table = (tmp_path / "out" / "scores.md").read_text()
    assert table.strip() == done.output.strip()
    assert "| mars | 0.5 [0, 1] |" in table


def test_a_question_without_an_answer_is_wrong_and_told(gsm8k: dict[str, Path], tmp_path: Path) -> None:
    few = write_answers(tmp_path / "few.jsonl", answer(0, turn("t", text="#### 5")))
    asked = ["--question-file", gsm8k["questions"], "--out", tmp_path]
    assert score(few, *asked).exit_code == 0
    cells = json.loads((tmp_path / "scores.json").read_text())["rows"][0]["cells"]
    assert (cells["strict"]["value"], cells["unanswered"]["value"]) == (0.25, 3)
    assert "no baseline" in cells["speed-up"]["reason"]
    assert score(few, *asked, "--question-end", "1").exit_code == 0
    assert json.loads((tmp_path / "scores.json").read_text())["rows"][0]["cells"]["strict"]["value"] == 1


def test_the_runs_record_names_and_guards_the_questions(gsm8k: dict[str, Path], tmp_path: Path) -> None:
    assert "name the questions by --question-file" in " ".join(score(gsm8k["ar"]).output.split())
    questions = read_questions(gsm8k["questions"])
    record = {"dataset": {"source": str(gsm8k["questions"]), "sha256": fingerprint(questions)}}
    gsm8k["ar"].with_suffix(".run.json").write_text(json.dumps(record))
    assert score(gsm8k["ar"]).exit_code == 0
    others = write_questions(tmp_path / "others.jsonl", *sums(5, 6, 7, 9))
    done = score(gsm8k["ar"], "--question-file", others)
    assert done.exit_code == 1
    assert "answers other questions" in done.output
    own = {"dataset": {"source": "the project's own gsm8k", "sha256": "0"}}
    gsm8k["ar"].with_suffix(".run.json").write_text(json.dumps(own))
    assert "answers other questions" in score(gsm8k["ar"]).output


def test_seconds_of_questions_decoded_together_are_not_held_against_others(
    gsm8k: dict[str, Path], tmp_path: Path
) -> None:
    questions = read_questions(gsm8k["questions"])
    record = {"dataset": {"source": str(gsm8k["questions"]), "sha256": fingerprint(questions)}}
    record["settings"] = {"batch_size": 8}
    gsm8k["mars"].with_suffix(".run.json").write_text(json.dumps(record))
    asked = ["--question-file", gsm8k["questions"], "--out", tmp_path]
    assert score(gsm8k["ar"], gsm8k["mars"], *asked).exit_code == 0
    cells = json.loads((tmp_path / "scores.json").read_text())["rows"][1]["cells"]
    assert "decoded 8 at a time and the baseline 1" in cells["speed-up"]["reason"]
    assert "seconds don't compare" in cells["time ratio"]["reason"]
    assert cells["length ratio"]["value"] == pytest.approx(9 / 12)


def test_mixed_tasks_and_strangers_are_refused(gsm8k: dict[str, Path], tmp_path: Path) -> None:
    other = write_answers(tmp_path / "other.jsonl", answer(0, turn("t"), bench_name="sum"))
    assert "of different tasks (gsm8k, sum)" in score(gsm8k["ar"], other).output
    stranger = write_answers(tmp_path / "stranger.jsonl", answer(77, turn("t")))
    done = score(stranger, "--question-file", gsm8k["questions"])
    assert "answers question 77, which isn't among those" in " ".join(done.output.split())


def test_pass_at_k_of_several_choices() -> None:
    test = "def check(f):\n    assert f(2) == 4\n"
    question = Question(
        question_id=1, turns=("?",), prompt="def double(x):\n", test=test, entry_point="double", canonical_solution=""
    )
    good, bad = (turn("t", text=f"```python\ndef double(x): return {body}\n```") for body in ("2 * x", "x"))
    missing = question.model_copy(update={"question_id": 2})
    graded = grade(find_task("humaneval"), [question, missing], [answer(1, good, bad, bad, good)], ks=(1, 2, 8))
    assert graded.questions["pass@1"] == {1: 0.5, 2: 0.0}
    assert graded.questions["pass@2"][1] == pytest.approx(1 - 1 / 6)
    assert "needs at least 8 choices" in graded.reasons["pass@8"]
    assert graded.solved == "pass@1"


def test_humaneval_without_tests_has_no_score_until_the_problems_are_given(tmp_path: Path) -> None:
    problem = {
        "task_id": "HumanEval/7", "prompt": "\n\ndef double(x):\n", "entry_point": "double",
        "canonical_solution": "    return 2 * x\n", "test": "def check(f):\n    assert f(2) == 4\n",
    }  # fmt: skip
    asked = Question(question_id=0, turns=("Complete the code I provided.\n\n\n\ndef double(x):\n",))
    given = [answer(0, turn("t", text="    return x + x"))]
    task = find_task("humaneval")
    assert "hold no tests" in grade(task, [asked], given).reasons["pass@1"]
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(problem).encode() + b"\n"))
    completed = with_problems([asked], path)
    assert completed[0].task_id == "HumanEval/7"
    assert grade(task, completed, given).questions["pass@1"] == {0: 1.0}
    with pytest.raises(ValueError, match="ends with no prompt"):
        with_problems([Question(question_id=0, turns=("def triple(x):",))], path)
    with pytest.raises(ValueError, match="isn't HumanEval's problem file"):
        with_problems([asked], write_questions(tmp_path / "q.jsonl", asked))
    path.write_bytes(path.read_bytes()[:-20])  # a broken download
    with pytest.raises(ValueError, match="isn't HumanEval's problem file"):
        with_problems([asked], path)


def test_texts_are_scored_by_question_and_as_a_corpus() -> None:
    questions = [Question(question_id=n, turns=("?",), reference=("the cat sat on the mat",)) for n in (0, 1)]
    given = [answer(0, turn("t", text="the cat sat on the mat"))]
    assert grade(find_task("sum"), questions, given).questions["ROUGE-L"] == {0: 1.0, 1: 0.0}
    graded = grade(find_task("wmt19"), questions, given)
    assert graded.questions["sentence chrF"] == {0: pytest.approx(100), 1: 0.0}
    assert 0 < graded.corpus["BLEU"].score < 100  # the missing one counts: brevity
    unreferenced = [Question(question_id=0, turns=("?",))]
    assert grade(find_task("sum"), unreferenced, given).reasons == {"ROUGE-L": "question 0 has no reference"}


@pytest.mark.parametrize("task", ["mt_bench", "alpaca"])
def test_what_has_no_grader_has_a_reason(task: str) -> None:
    graded = grade(find_task(task), sums(5), [answer(0, turn("t"))])
    assert not graded.questions
    assert all(graded.reasons.values())


def test_the_projects_own_references_are_graded_right() -> None:
    """Every own question, answered with its own reference, is right."""
    for name in ("gsm8k", "aime2025", "humaneval", "mbpp"):
        task = find_task(name)
        questions = read_questions(task.sample)
        boxed = "\\boxed{%s}" if name == "aime2025" else "%s"
        given = [answer(q.question_id, turn("t", text=boxed % "\n".join(q.reference))) for q in questions]
        graded = grade(task, questions, given)
        assert graded.solved
        assert set(graded.questions[graded.solved].values()) == {1.0}, name


def test_judgments_join_the_table(tmp_path: Path) -> None:
    questions = [Question(question_id=n, category="writing", turns=("?",)) for n in (1, 2)]
    row = {"question_id": 1, "model": "mars", "judge": ["j", "p"], "user_prompt": "", "judgment": "[[7]]", "turn": 1}
    judged = tmp_path / "j_single.jsonl"
    other = {**row, "question_id": 3}  # judged once, and not asked here
    judged.write_text("".join(json.dumps({**r, "score": s, "tstamp": 0.0}) + "\n" for r, s in ((row, 7), (other, 1))))
    answers = write_answers(tmp_path / "mars.jsonl", answer(1, turn("t"), bench_name="mt_bench"))
    asked = ["--question-file", write_questions(tmp_path / "q.jsonl", *questions), "--out", tmp_path]
    assert "| mars | 7 |" in score(answers, *asked, "--judgments", judged).output
    cells = json.loads((tmp_path / "scores.json").read_text())["rows"][0]["cells"]
    assert cells["unjudged"]["value"] == cells["unanswered"]["value"] == 1
    assert "a judge gives marks" in score(answers, *asked).output
