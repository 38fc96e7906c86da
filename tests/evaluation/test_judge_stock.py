"""FastChat's own gen_judgment on the same answers: our judgments must be row for row what it writes.

It can't run beside openai >= 1 as it is: it calls `openai.ChatCompletion` and imports anthropic unconditionally. The
script below gives those two names back; FastChat's code is left alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from evaluation.judge.__main__ import app
from evaluation.judge.prompts import OWN
from tests.evaluation.judge_server import judge_server
from tests.evaluation.test_judge import QUESTIONS, read_jsonl, write_jsonl

pytest.importorskip("fastchat", reason="FastChat isn't installed: pip install 'eagle-mars[chat]'")

STOCK = """
import runpy, sys, types
import openai
sys.modules["anthropic"] = types.ModuleType("anthropic")
openai.error = types.SimpleNamespace(OpenAIError=openai.OpenAIError)
create = lambda **body: openai.OpenAI().chat.completions.create(**body).model_dump()
openai.ChatCompletion = types.SimpleNamespace(create=create)
for mode in ("single", "pairwise-all"):
    sys.argv = ["gen_judgment", "--mode", mode]
    runpy.run_module("fastchat.llm_judge.gen_judgment", run_name="__main__")
"""
STOCK_NAMES = {
    "single-1": "single-v1",
    "single-math-1": "single-math-v1",
    "pair-1": "pair-v2",
    "pair-math-1": "pair-math-v1",
}


def judgment(body: dict[str, Any]) -> str:
    """Decided by what the judge is shown, so that both programs get the same."""
    content = body["messages"][1]["content"]
    if "[[A]]" in body["messages"][0]["content"]:
        return "So [[B]]" if content.index("alpha") < content.index("beta") else "So [[C]]"
    return f"Rated [[{len(content) % 10}.5]]" if "alpha" in content else "No mark."


def lay_out(directory: Path) -> None:
    """The files that FastChat looks for below the current directory."""
    data = directory / "data"
    prompts = []
    for prompt in read_jsonl(OWN):
        name, turn, _ = prompt["name"].removeprefix("eagle-mars-").partition("-multi-turn")
        prompts.append({**prompt, "name": STOCK_NAMES[name] + turn})
    write_jsonl(data / "judge_prompts.jsonl", prompts)
    bench = data / "mt_bench"
    questions = [question for question in QUESTIONS if len(question["turns"]) == 2]
    write_jsonl(bench / "question.jsonl", questions)
    for model, folder in (("alpha", "model_answer"), ("beta", "model_answer"), ("gpt-4", "reference_answer")):
        rows = [
            {
                "question_id": question["question_id"],
                "answer_id": "x",
                "model_id": model,
                "choices": [{"index": 0, "turns": [f"{model} says {turn}" for turn in (1, 2)]}],
                "tstamp": 0.0,
            }
            for question in questions
        ]
        write_jsonl(bench / folder / f"{model}.jsonl", rows)


def rows(path: Path) -> list[list[tuple[str, Any]]]:
    """Keys in their order and values, whichever order the rows were judged in."""
    told = [[(key, value) for key, value in row.items() if key != "tstamp"] for row in read_jsonl(path)]
    return sorted(told, key=str)


def test_our_judgments_are_stock_fastchats(tmp_path: Path) -> None:
    lay_out(tmp_path)
    bench = tmp_path / "data" / "mt_bench"
    with judge_server(judgment) as server:
        key = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": server.url, "LOGDIR": ""}
        done = subprocess.run(
            [sys.executable, "-c", STOCK], cwd=tmp_path, env={**os.environ, **key}, input="\n\n", text=True,
            capture_output=True, timeout=500,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        asked_by_stock, server.requests[:] = list(server.requests), []
        for mode in ("single", "pairwise"):
            answers = [str(bench / "model_answer" / f"{model}.jsonl") for model in ("alpha", "beta")]
            files = {
                "--question-file": bench / "question.jsonl",
                "--reference-file": bench / "reference_answer" / "gpt-4.jsonl",
                "--prompts": tmp_path / "data" / "judge_prompts.jsonl",
                "--out": tmp_path / "ours",
            }
            options = [str(part) for option in files.items() for part in option]
            ours = CliRunner().invoke(
                app, [mode, *answers, *options, "--judge-model", "gpt-4", "--base-url", server.url]
            )
            assert ours.exit_code == 0, ours.output
        shown = [sorted(str(body["messages"]) for body in bodies) for bodies in (server.requests, asked_by_stock)]
    assert shown[0] == shown[1]
    for name in ("gpt-4_single.jsonl", "gpt-4_pair.jsonl"):
        assert rows(tmp_path / "ours" / name) == rows(bench / "model_judgment" / name)
