"""Questions: the project's own sets are right, files and local copies of hub datasets are read, mistakes are named."""

from __future__ import annotations

import builtins
import doctest
import json
import math
from collections import Counter
from pathlib import Path

import datasets
import pytest

from eagle_mars.errors import ConfigError
from evaluation.data.hub import read_hub
from evaluation.data.questions import Question, fingerprint, read_questions
from evaluation.tasks import AIME, GSM8K, HUMANEVAL, SUMMARY, TASKS, TRANSLATION, find_task

SAFE = {name: getattr(builtins, name) for name in ("bin", "min", "pow", "range", "str", "sum")}
MINIMUM = {"mt_bench": 12, "gsm8k": 24, "humaneval": 10, "sum": 8, "wmt19": 8, "qa": 8, "mbpp": 5, "alpaca": 8}
SAMPLES = {name: read_questions(task.sample) for name, task in TASKS.items()}


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_a_set_of_its_own(name: str) -> None:
    assert len(SAMPLES[name]) >= MINIMUM.get(name, 5)
    if TASKS[name].grader not in ("judge", None):
        assert all(question.reference for question in SAMPLES[name])


@pytest.mark.parametrize("name", ["gsm8k", "aime2025"])
def test_numeric_answers_are_what_their_expressions_compute(name: str) -> None:
    for question in SAMPLES[name]:
        computed = eval(question.expression, {"__builtins__": SAFE})
        assert math.isclose(computed, float(question.reference[-1].removeprefix("#### "))), question.question_id


def test_worked_solutions_end_in_the_answer() -> None:
    for question in SAMPLES["gsm8k"]:
        *steps, last = question.reference
        answer = last.removeprefix("#### ")
        assert last.startswith("#### ")
        assert answer in steps[-1], question.question_id


@pytest.mark.parametrize("question", SAMPLES["humaneval"], ids=lambda q: q.entry_point)
def test_functions_to_complete_pass_with_their_solution_only(question: Question) -> None:
    check = f"{question.test}\ncheck({question.entry_point})\n"
    exec(question.prompt + question.canonical_solution + check, {})
    with pytest.raises(AssertionError):
        exec(question.prompt + "    return None\n" + check, {})


@pytest.mark.parametrize("question", SAMPLES["humaneval"], ids=lambda q: q.entry_point)
def test_the_examples_in_a_docstring_are_true(question: Question) -> None:
    scope: dict = {}
    exec(question.prompt + question.canonical_solution, scope)
    tests = doctest.DocTestFinder().find(scope[question.entry_point], question.entry_point, globs=scope)
    assert [doctest.DocTestRunner().run(test).failed for test in tests] == [0]
    assert tests[0].examples


@pytest.mark.parametrize("question", SAMPLES["mbpp"], ids=lambda q: q.question_id)
def test_functions_to_write_pass_their_tests(question: Question) -> None:
    solution = "\n".join(question.reference)
    exec("\n".join((solution, *question.test_list)), {})
    name = question.test_list[0].split()[1].split("(")[0]
    with pytest.raises((AssertionError, TypeError)):
        exec("\n".join((f"def {name}(*args): return None", *question.test_list)), {})


def test_mt_bench_covers_its_categories_in_two_turns() -> None:
    questions = SAMPLES["mt_bench"]
    categories = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]
    assert Counter(q.category for q in questions) == dict.fromkeys(categories, 2)
    assert all(len(q.turns) == 2 for q in questions)
    assert all(len(q.reference) == 2 for q in questions if q.category in ("math", "reasoning", "coding"))


def test_prompts_carry_the_instruction_of_their_task() -> None:
    instructions = {"gsm8k": GSM8K, "aime2025": AIME, "humaneval": HUMANEVAL, "sum": SUMMARY, "wmt19": TRANSLATION}
    for name, instruction in instructions.items():
        assert all(q.turns[0].startswith(instruction) for q in SAMPLES[name])
    assert all(q.turns[0].endswith(q.prompt) for q in SAMPLES["humaneval"])


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


ROW = {"question_id": 81, "category": "writing", "turns": ["a\u2028b", "c"], "reference": None, "origin": "x"}


def test_a_file_in_eagles_format_is_read_whole(tmp_path: Path) -> None:
    (question,) = read_questions(write(tmp_path / "q.jsonl", ROW))
    assert (question.question_id, question.turns, question.reference) == (81, ("a\u2028b", "c"), ())
    assert question.model_extra == {"origin": "x"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no question"),
        ([{**ROW, "turns": []}], "q.jsonl:1 is no question .turns"),
        ([ROW, {**ROW, "question_id": 82, "turns": [" "]}], "q.jsonl:2 is no question .*a turn is empty"),
        ([ROW, ROW], "question_id 81 twice"),
    ],
)
def test_what_is_no_question_file_is_refused(tmp_path: Path, rows: list, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_questions(write(tmp_path / "q.jsonl", *rows))
    with pytest.raises(ConfigError, match="no question file"):
        read_questions(tmp_path / "missing.jsonl")


def test_the_fingerprint_is_of_content_and_order() -> None:
    a, b = SAMPLES["qa"][:2]
    assert fingerprint([a, b]) == fingerprint([a.model_copy(), b])
    assert len({fingerprint([a, b]), fingerprint([b, a]), fingerprint([a])}) == 3


def test_tasks_are_found_by_every_name() -> None:
    assert find_task("cnn_dm") is TASKS["sum"]
    names = [name for task in TASKS.values() for name in (task.name, *task.aliases)]
    assert len(names) == len(set(names))
    with pytest.raises(ConfigError, match="no task 'mtbench'; the tasks are mt_bench, gsm8k"):
        find_task("mtbench")


# One row of every dataset, in its own columns, and the turns and the reference that must come of it.
COPIES = {
    "mt_bench": (
        {"prompt": ["one", "two"], "reference": ["r1", "r2"], "category": "math", "prompt_id": 111},
        (("one", "two"), ("r1", "r2")),
    ),
    "gsm8k": ({"question": "How many?", "answer": "1+1=2\n#### 2"}, ((GSM8K + "How many?",), ("1+1=2", "#### 2"))),
    "humaneval": (
        {
            "task_id": "HumanEval/0",
            "prompt": "def f(x):\n",
            "canonical_solution": "    y = x\n    return y\n",
            "test": "def check(c):\n    assert c(1) == 1\n",
            "entry_point": "f",
        },
        ((HUMANEVAL + "def f(x):\n",), ("    y = x", "    return y")),
    ),
    "mbpp": (
        {
            "task_id": 11,
            "text": "Add.",
            "code": "def add(a, b):\r\n  return a + b",
            "test_list": ["assert add(1, 2) == 3"],
            "test_setup_code": "",
            "challenge_test_list": ["assert add(0, 0) == 0"],
        },
        (
            ("Write a Python function for this task.\n\nAdd.\n\nIt must pass these tests:\n\nassert add(1, 2) == 3",),
            ("def add(a, b):", "  return a + b"),
        ),
    ),
    "alpaca": (
        {"instruction": "Shorten.", "input": "A long text", "output": "Text", "text": "…"},
        (("Shorten.\n\nA long text",), ("Text",)),
    ),
    "sum": ({"article": "News.", "highlights": "N.", "id": "1"}, ((SUMMARY + "News.",), ("N.",))),
    "qa": ({"question": "who is it", "answer": ["me", "I"]}, (("Who is it?",), ("me", "I"))),
    "wmt19": ({"translation": {"zh": "你好", "en": "Hello"}}, ((TRANSLATION + "你好",), ("Hello",))),
    "aime2025": ({"problem": "$1+1$", "answer": "2", "id": "0"}, ((AIME + "$1+1$",), ("2",))),
}


def local_copy(path: Path, name: str, rows: list[dict]) -> str:
    """A small repository of a dataset: parquet, and the card that names configuration and split."""
    source = TASKS[name].hub
    path.mkdir()
    datasets.Dataset.from_list(rows).to_parquet(path / "rows.parquet")
    config = source.config or "default"
    (path / "README.md").write_text(
        f"---\nconfigs:\n- config_name: '{config}'\n  data_files:\n"
        f"  - split: {source.split}\n    path: rows.parquet\n---\n"
    )
    return str(path)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("name", TASKS)
def test_a_local_copy_of_a_hub_dataset_becomes_questions(name: str, tmp_path: Path) -> None:
    row, (turns, reference) = COPIES[name]
    (question,) = read_hub(TASKS[name], local_copy(tmp_path / "copy", name, [row]))
    assert (question.turns, question.reference) == (turns, reference)
    if name == "humaneval":
        assert (question.entry_point, question.test) == ("f", row["test"])
    if name == "mbpp":
        assert question.test_list == ("assert add(1, 2) == 3",)


def test_a_dataset_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no revision of abisee/cnn_dailymail is pinned.*--dataset-revision"):
        read_hub(TASKS["sum"])
    with pytest.raises(ConfigError, match="no revision of someone/gsm8k"):
        read_hub(TASKS["gsm8k"], "someone/gsm8k")
    with pytest.raises(ConfigError, match="no local copy"):
        read_hub(TASKS["gsm8k"], str(tmp_path / "missing"))
    wrong = local_copy(tmp_path / "copy", "gsm8k", [{"problem": "?", "answer": "1"}])
    with pytest.raises(ConfigError, match="no column 'question', only problem, answer"):
        read_hub(TASKS["gsm8k"], wrong)


@pytest.mark.parametrize("name", ["gsm8k", "qa", "wmt19", "mt_bench"])
def test_a_null_in_a_dataset_is_told_with_its_row(name: str, tmp_path: Path) -> None:
    """Beside a right row, from which `datasets` infers the columns' types."""
    row, _ = COPIES[name]
    copy = local_copy(tmp_path / "copy", name, [row, dict.fromkeys(row)])
    with pytest.raises(ConfigError, match=r"row 1 of .* without a usable value"):
        read_hub(TASKS[name], copy)
