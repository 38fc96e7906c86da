"""Real processes: a run that is killed goes on where it was, and two processes give what one gives."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evaluation.answers import Answer
from tests.evaluation.running import arguments, run, untimed, write_questions

Pair = tuple[str, str]
ROOT = Path(__file__).parents[2]
FLAGS = ("--max-new-token", "16", "--relaxation-threshold", "0.7")


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    turns = [[f"Question {i}", "Again"][: 1 + i % 2] for i in range(8)]
    return write_questions(tmp_path_factory.mktemp("questions") / "question.jsonl", *turns)


@pytest.fixture(scope="module")
def uninterrupted(tiny_pair: Pair, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    path = tmp_path_factory.mktemp("whole") / "a.jsonl"
    return run(arguments(tiny_pair, questions, path, *FLAGS), path)


def test_a_killed_run_resumes_without_repeating_or_losing_a_row(
    tiny_pair: Pair, questions: Path, tmp_path: Path, uninterrupted: list[Answer]
) -> None:
    path = tmp_path / "a.jsonl"
    args = arguments(tiny_pair, questions, path, *FLAGS)
    process = subprocess.Popen(
        [sys.executable, "-m", "evaluation.run", *args], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not path.is_file() or path.read_bytes().count(b"\n") < 2:
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    survived = path.read_bytes()
    rows = survived.count(b"\n")
    assert 2 <= rows < len(uninterrupted)
    with path.open("ab") as file:  # what a kill inside the write leaves
        file.write(survived[: survived.index(b"\n") - 9])
    resumed = run(args, path)
    assert untimed(resumed) == untimed(uninterrupted)
    assert path.read_bytes().split(b"\n")[:rows] == survived.split(b"\n")[:rows]


def test_two_processes_write_the_file_of_one(
    tiny_pair: Pair, questions: Path, tmp_path: Path, uninterrupted: list[Answer]
) -> None:
    path = tmp_path / "a.jsonl"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    command += ["-m", "evaluation.run", *arguments(tiny_pair, questions, path, *FLAGS, "--num-gpus-total", "2")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "process 0 of 2: 100%" in done.stderr
    assert "4/4" in done.stderr  # its half of the questions
    assert done.stdout.count('"answers": 8') == 1
    assert untimed([Answer.model_validate_json(line) for line in path.read_text("utf-8").splitlines()]) == untimed(
        uninterrupted
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.jsonl", "a.run.json"]
