"""Writing an answer file so that killing the run at any moment neither loses a finished row nor repeats one.

A row is one write at the end of the file, followed by fsync. A kill can tear only the last line, which the next run
cuts off before it answers that question again. Several processes write a part file each, beside the answer file; the
parts are folded into it when all of them are done, and at the start of the next run if they never got that far.
"""

from __future__ import annotations

import fcntl
import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from eagle_mars.errors import ConfigError
from evaluation.answers import Answer, QuestionId, read_answers
from evaluation.provenance import write_atomically


class AnswerWriter:
    """Appends rows to a file. Close it, or use it as a context."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        repair(path)
        self._file = path.open("ab")

    def __enter__(self) -> AnswerWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, row: Answer) -> None:
        """The row is on the disk when this returns."""
        self._file.write(row.model_dump_json().encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def repair(path: Path) -> None:
    """Cut off a last line without its newline, which only a killed run leaves behind."""
    if not path.is_file():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
            os.fsync(file.fileno())


def part(path: Path, rank: int) -> Path:
    """Where process `rank` of several writes. Not `*.jsonl`, so FastChat's tools don't take it for a model."""
    return path.with_name(f"{path.name}.part-{rank:05d}")


def fold(path: Path, order: Sequence[QuestionId]) -> None:
    """Put the rows of the answer file and of its parts into one file, in the order of the questions.

    A question that was answered both here and there (the run was killed while folding) keeps its first answer: the
    settings are the same, so both hold the same text. An answer replaces a failure.
    """
    parts = sorted(path.parent.glob(f"{glob.escape(path.name)}.part-*"))
    sources = [source for source in (path, *parts) if source.is_file()]
    rows: dict[QuestionId, Answer] = {}
    for source in sources:
        repair(source)
        for row in read_answers(source):
            if row.question_id not in rows or rows[row.question_id].error:
                rows[row.question_id] = row
    places = {question_id: place for place, question_id in enumerate(order)}
    ordered = sorted(rows.values(), key=lambda row: places.get(row.question_id, len(places)))
    text = "".join(row.model_dump_json() + "\n" for row in ordered)
    if sources and (parts or text != path.read_text("utf-8")):
        write_atomically(path, text)
    for source in parts:
        source.unlink()


def answered(path: Path) -> set[QuestionId]:
    """Questions that need no further run; failures are tried again."""
    return {row.question_id for row in read_answers(path) if row.error is None} if path.is_file() else set()


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """One run at a time on an answer file; the kernel releases the lock of a killed one. Raises ConfigError."""
    lock = path.with_name(f".{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        raise ConfigError(f"can't write answers to {path} ({error.strerror}); give another --answer-file.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another run is writing {path}; wait for it, or give another --answer-file.") from None
        yield
    lock.unlink(missing_ok=True)
