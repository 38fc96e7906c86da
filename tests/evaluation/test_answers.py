"""The answer file's schema: FastChat's and EAGLE's fields, consistency, and a reader that loses nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from eagle_mars.errors import ConfigError
from eagle_mars.result import GenerationResult
from evaluation.answers import Answer, Choice, Failure, TurnStats, read_answers


def result(**changes) -> GenerationResult:
    values = {
        "prompt_tokens": 5,
        "token_ids": (7, 8, 9, 2),
        "provenance": ("target", "exact", "relaxed", "target"),
        "text": "text",
        "pieces": (("text", "target"),),
        "finish_reason": "stop",
        "accepted_lengths": (2, 0),
        "regret": 0.25,
        "low_margin": 3,
        "rescued": 1,
        "nonpositive_top": 0,
        "prefill_seconds": 0.5,
        "decode_seconds": 1.0,
        "rule": "mars",
    }
    return GenerationResult(**{**values, **changes})


def answer(question_id: int = 81, error: Failure | None = None, **changes) -> Answer:
    stats = TurnStats.of(result(), temperature=0.0, seed=3)
    values = {
        "question_id": question_id,
        "answer_id": "a",
        "model_id": "tiny",
        "bench_name": "mt_bench",
        "method": "mars",
        "choices": () if error else (Choice.of(0, ["text"], [stats]),),
        "error": error,
        "tstamp": 1.0,
    }
    return Answer(**{**values, **changes})


FAILED = Failure(kind="ContextLengthError", message="too long", choice=0, turn=1)


def write(path: Path, *rows: Answer) -> Path:
    path.write_text("".join(row.model_dump_json() + "\n" for row in rows), "utf-8")
    return path


def test_a_row_has_the_fields_of_fastchat_and_eagle() -> None:
    row = json.loads(answer().model_dump_json())
    assert {"question_id", "answer_id", "model_id", "choices", "tstamp"} <= set(row)
    choice = row["choices"][0]
    assert choice["turns"] == ["text"]
    assert (choice["idxs"], choice["new_tokens"], choice["wall_time"]) == ([1], [4], [1.5])
    stats = choice["stats"][0]
    assert (stats["provenance"], stats["relaxed"], stats["exact_prefix"]) == ("tert", 1, 2)
    assert stats["accepted_lengths"] == [2, 0]


def test_reading_gives_back_what_was_written_other_tools_fields_included(tmp_path: Path) -> None:
    rows = [answer(81, judged_by="someone"), answer(82, FAILED)]
    assert read_answers(write(tmp_path / "a.jsonl", *rows)) == rows


def test_only_a_failure_is_replaced_by_a_later_row(tmp_path: Path) -> None:
    mended = write(tmp_path / "a.jsonl", answer(81, FAILED), answer(82), answer(81))
    assert [(row.question_id, row.error) for row in read_answers(mended)] == [(82, None), (81, None)]
    with pytest.raises(ConfigError, match=r"a\.jsonl:2 answers question 81 a second time"):
        read_answers(write(tmp_path / "a.jsonl", answer(81), answer(81)))


def test_a_separator_inside_a_text_does_not_cut_a_line(tmp_path: Path) -> None:
    stats = TurnStats.of(result(), temperature=0.0, seed=3)
    row = answer(choices=(Choice.of(0, ["one\u2028two\x85three"], [stats]),))
    assert read_answers(write(tmp_path / "a.jsonl", row)) == [row]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (answer().model_dump_json(), "is torn"),
        ("{}\n", "question_id: Field required"),
        ("\n", "no answer row"),
        ("nonsense\n", "no answer row"),
    ],
)
def test_what_is_no_answer_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=message):
        read_answers(path)
    with pytest.raises(ConfigError, match="no answer file"):
        read_answers(tmp_path / "missing.jsonl")


@pytest.mark.parametrize("changes", [{"provenance": "te"}, {"relaxed": 2}, {"provenance": "texx"}])
def test_statistics_that_contradict_themselves_are_refused(changes: dict) -> None:
    values = TurnStats.of(result(), temperature=0.0, seed=3).model_dump()
    with pytest.raises(ValidationError):
        TurnStats(**{**values, **changes})


def test_a_row_is_an_answer_or_an_error() -> None:
    with pytest.raises(ValidationError, match="never both"):
        answer(choices=())
    with pytest.raises(ValidationError, match="never both"):
        answer(error=FAILED, choices=answer().choices)
