"""The registry of tasks: where questions come from, how they become turns, how long an answer may be, what grades it.

Turns are complete prompts. Files in EAGLE's format hold them ready; rows of a hub dataset get the instruction that the
released question files of EAGLE and MARS use, so both ways ask a model the same thing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eagle_mars.errors import ConfigError
from evaluation.data.questions import Question

SAMPLES = Path(__file__).parent / "data"

# judge: a language model gives marks. number: the final number. boxed: the content of \boxed{}. code: hidden tests.
# rouge: ROUGE-L. bleu: BLEU and chrF.
Grader = Literal["judge", "number", "boxed", "code", "rouge", "bleu"]
Row = dict[str, Any]


@dataclass(frozen=True)
class HubSource:
    """A dataset of the hub.

    revision: the commit that is read. None where this project knows of none from a source it could check: then
    `--dataset-revision` is asked for. The revisions below are those that inspect_evals 0.28.0 (PyPI) pins.
    question: row number and row -> question.
    """

    path: str
    config: str | None
    split: str
    revision: str | None
    question: Callable[[int, Row], Question]


@dataclass(frozen=True)
class Task:
    """One benchmark.

    name: EAGLE's bench name. version: grows when prompts or grading change, so that old answers aren't mixed with new.
    grader: None where the benchmark is decoded for its speed only. reference: what `Question.reference` holds.
    max_new_tokens: the default limit of a turn. stop: strings that end a turn besides the stop ids.
    """

    name: str
    version: int
    grader: Grader | None
    reference: str
    max_new_tokens: int
    hub: HubSource
    stop: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def sample(self) -> Path:
        """The project's own small set for this task."""
        return SAMPLES / f"{self.name}.jsonl"


GSM8K = (
    "Solve the following math problem step by step.  At the end, output your final numeric answer in this format: "
    "#### <final_answer>.\n\n"
)
AIME = (
    "Solve the following math problem step by step. At the end, Present the answer in LaTeX format: "
    "\\boxed{Your answer}.\n\n"
)
HUMANEVAL = "Complete the code I provided.\n\n"
MBPP = "Write a Python function for this task.\n\n{text}\n\nIt must pass these tests:\n\n{tests}"
SUMMARY = "Summarize: "
TRANSLATION = "Translate the following Chinese text to English.\n\n"


def _mt_bench(index: int, row: Row) -> Question:
    return Question(
        question_id=row["prompt_id"], category=row["category"], turns=row["prompt"], reference=row["reference"]
    )


def _gsm8k(index: int, row: Row) -> Question:
    return Question(
        question_id=index, category="math", turns=(GSM8K + row["question"],), reference=row["answer"].split("\n")
    )


def _humaneval(index: int, row: Row) -> Question:
    return Question(
        question_id=index,
        category="code",
        turns=(HUMANEVAL + row["prompt"],),
        reference=row["canonical_solution"].rstrip("\n").split("\n"),
        task_id=row["task_id"],
        prompt=row["prompt"],
        entry_point=row["entry_point"],
        canonical_solution=row["canonical_solution"],
        test=row["test"],
    )


def _mbpp(index: int, row: Row) -> Question:
    tests = "\n".join(row["test_list"])
    return Question(
        question_id=row["task_id"],
        category="code",
        turns=(MBPP.format(text=row["text"], tests=tests),),
        reference=row["code"].replace("\r\n", "\n").rstrip("\n").split("\n"),
        test_list=row["test_list"],
        test_setup_code=row["test_setup_code"],
    )


def _alpaca(index: int, row: Row) -> Question:
    turn = f"{row['instruction']}\n\n{row['input']}" if row["input"] else row["instruction"]
    return Question(question_id=index, turns=(turn,), reference=(row["output"],))


def _summary(index: int, row: Row) -> Question:
    return Question(
        question_id=index,
        category="summarization",
        turns=(SUMMARY + row["article"],),
        reference=(row["highlights"],),
    )


def _qa(index: int, row: Row) -> Question:
    question = row["question"]
    return Question(
        question_id=index,
        category="qa",
        turns=(f"{question[0].upper()}{question[1:].removesuffix('?')}?",),
        reference=row["answer"],
    )


def _translation(index: int, row: Row) -> Question:
    pair = row["translation"]
    return Question(
        question_id=index, category="translation", turns=(TRANSLATION + pair["zh"],), reference=(pair["en"],)
    )


def _aime(index: int, row: Row) -> Question:
    return Question(question_id=index, category="math", turns=(AIME + row["problem"],), reference=(str(row["answer"]),))


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="mt_bench",
            version=1,
            grader="judge",
            reference="an answer per turn, for categories with right answers",
            max_new_tokens=1024,
            hub=HubSource("HuggingFaceH4/mt_bench_prompts", None, "train", None, _mt_bench),
        ),
        Task(
            name="gsm8k",
            version=1,
            grader="number",
            reference="lines of the solution, the last one is `#### answer`",
            max_new_tokens=512,
            hub=HubSource("openai/gsm8k", "main", "test", "cc7b047b6e5bb11b4f1af84efc572db110a51b3c", _gsm8k),
        ),
        Task(
            name="humaneval",
            version=1,
            grader="code",
            reference="lines of the solution; the tests are in `test` and `entry_point`",
            max_new_tokens=512,
            hub=HubSource(
                "openai/openai_humaneval", None, "test", "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544", _humaneval
            ),
            aliases=("human_eval",),
        ),
        Task(
            name="mbpp",
            version=1,
            grader="code",
            reference="lines of the solution; the tests are in `test_list` and `test_setup_code`",
            max_new_tokens=512,
            hub=HubSource(
                "google-research-datasets/mbpp", "full", "test", "4bb6404fdc6cacfda99d4ac4205087b89d32030c", _mbpp
            ),
        ),
        Task(
            name="alpaca",
            version=1,
            grader=None,
            reference="one possible answer",
            max_new_tokens=512,
            hub=HubSource("tatsu-lab/alpaca", None, "train", None, _alpaca),
        ),
        Task(
            name="sum",
            version=1,
            grader="rouge",
            reference="one summary",
            max_new_tokens=512,
            hub=HubSource("abisee/cnn_dailymail", "3.0.0", "test", None, _summary),
            aliases=("cnn_dm", "cnn_dailymail"),
        ),
        Task(
            name="qa",
            version=1,
            grader=None,
            reference="every accepted answer",
            max_new_tokens=512,
            hub=HubSource("google-research-datasets/nq_open", None, "validation", None, _qa),
        ),
        Task(
            name="wmt19",
            version=1,
            grader="bleu",
            reference="one translation",
            max_new_tokens=512,
            hub=HubSource("wmt/wmt19", "zh-en", "validation", None, _translation),
            aliases=("wmt19_zh_en",),
        ),
        Task(
            name="aime2025",
            version=1,
            grader="boxed",
            reference="the answer",
            max_new_tokens=4096,
            hub=HubSource("math-ai/aime25", None, "test", "563bb8404243c5f09de6ec262f2db674fe5bce9b", _aime),
            aliases=("aime", "aime25"),
        ),
    )
}


def find_task(name: str) -> Task:
    """The task of that name or alias. Raises ConfigError, naming all of them."""
    for task in TASKS.values():
        if name in (task.name, *task.aliases):
            return task
    raise ConfigError(f"there is no task {name!r}; the tasks are {', '.join(TASKS)}.")
