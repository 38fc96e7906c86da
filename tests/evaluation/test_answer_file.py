"""Appending, repairing and folding answer files: no finished row is lost, none is repeated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_mars.errors import ConfigError
from evaluation.answer_file import AnswerWriter, answered, exclusive, fold, part
from evaluation.answers import Answer, read_answers
from tests.evaluation.test_answers import FAILED, answer


def append(path: Path, *rows: Answer) -> None:
    with AnswerWriter(path) as writer:
        for row in rows:
            writer.append(row)


def ids(path: Path) -> list[int | str]:
    return [row.question_id for row in read_answers(path)]


@pytest.mark.parametrize("kept", [0, 1, 7, -1])
def test_a_torn_last_line_is_cut_off_and_nothing_else(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "deep" / "a.jsonl"
    append(path, answer(1))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: kept if kept >= 0 else len(whole) - 1])
    append(path, answer(2))
    assert path.read_bytes().startswith(whole)
    assert ids(path) == [1, 2]


def test_failures_are_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert answered(path) == set()
    append(path, answer(1), answer(2, FAILED))
    assert answered(path) == {1}
    append(path, answer(2))
    assert answered(path) == {1, 2}


def test_parts_are_folded_in_the_order_of_the_questions(tmp_path: Path) -> None:
    path = tmp_path / "a[7b].jsonl"  # brackets would be a pattern
    append(path, answer(5), answer(9, FAILED))
    append(part(path, 0), answer(7))
    append(part(path, 11), answer(9), answer("x", FAILED))
    with part(path, 0).open("ab") as file:
        file.write(b'{"question_id": 8, "answ')
    fold(path, [9, 7, "x", 8, 5])
    assert ids(path) == [9, 7, "x", 5]
    assert [row.error is None for row in read_answers(path)] == [True, True, False, True]
    assert list(tmp_path.glob("*part*")) == []


def test_a_kill_while_folding_repeats_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append(part(path, 0), answer(1), answer(2))
    fold(path, [1, 2])
    folded = path.read_bytes()
    append(part(path, 0), answer(1), answer(2))  # as if the part had not been removed yet
    fold(path, [1, 2])
    assert path.read_bytes() == folded


def test_an_answer_is_never_replaced_by_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append(path, answer(1))
    append(part(path, 0), answer(1, FAILED))
    fold(path, [1])
    assert [row.error for row in read_answers(path)] == [None]


def test_folding_leaves_a_finished_file_untouched(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    fold(path, [])
    assert not path.exists()
    append(path, answer(1), answer(2))
    before = path.stat()
    fold(path, [1, 2])
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_one_run_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with exclusive(path), pytest.raises(ConfigError, match="another run is writing"), exclusive(path):
        pass
    with exclusive(path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_rows_are_written_as_utf8_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append(path, answer(1, category="café\u2028"))
    (line,) = path.read_bytes().decode("utf-8").split("\n")[:-1]
    assert json.loads(line)["category"] == "café\u2028"
