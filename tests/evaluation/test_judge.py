"""Judging against a judge on loopback: FastChat's formats, both orders, resuming, refusals, `show`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from evaluation.judge.__main__ import app
from evaluation.judge.client import Judge, JudgeError
from evaluation.judge.prompts import OWN, rating, read_prompts, verdict
from evaluation.judge.records import PairJudgment, SingleJudgment, read_rows
from evaluation.judge.show import pair_results, question_scores, single_results
from tests.evaluation.judge_server import JudgeServer, judge_server

SINGLE_KEYS = ["question_id", "model", "judge", "user_prompt", "judgment", "score", "turn", "tstamp"]
PAIR_KEYS = [
    *("question_id", "model_1", "model_2", "g1_winner", "g2_winner", "judge"),
    *("g1_user_prompt", "g1_judgment", "g2_user_prompt", "g2_judgment", "turn", "tstamp"),
]
QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["Write {braces}.", "Shorter."]},
    {"question_id": 2, "category": "math", "turns": ["2 + 2?", "times 3?"], "reference": ["4 it is", "12 it is"]},
    {"question_id": 3, "category": "math", "turns": ["Only one turn?"]},
]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "question.jsonl", QUESTIONS)
    for model in ("alpha", "beta"):
        rows = [
            {"question_id": q["question_id"], "answer_id": "x", "model_id": "ignored", "tstamp": 0.0,
             "choices": [{"index": 0, "turns": [f"{model} says {n}" for n in range(len(q["turns"]))]}]}
            for q in QUESTIONS
        ]  # fmt: skip
        write_jsonl(tmp_path / "answers" / f"{model}.jsonl", rows)
    failed = {"question_id": 9, "choices": [], "error": {"kind": "x", "message": "y", "choice": 0, "turn": 0}}
    with (tmp_path / "answers" / "beta.jsonl").open("a") as file:
        file.write(json.dumps(failed) + "\n")
    return tmp_path


def invoke(bench: Path, server: JudgeServer, mode: str, *more: str):
    files = [str(bench / "answers" / f"{model}.jsonl") for model in ("alpha", "beta")]
    asked = ["--question-file", str(bench / "question.jsonl"), "--judge-model", "local/judge", "--base-url", server.url]
    return CliRunner().invoke(app, [mode, *files, *asked, "--out", str(bench / "out"), *more])


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)


def marks(body: dict[str, Any]) -> str:
    return "Fine. [[8]]" if "alpha" in body["messages"][1]["content"] else "Hm. [[4.5]]"


def test_single_gives_every_turn_a_mark_in_fastchats_format(bench: Path) -> None:
    with judge_server(marks) as server:
        done = invoke(bench, server, "single", "--parallel", "3")
        assert done.exit_code == 0, done.output
        rows = read_jsonl(bench / "out" / "local--judge_single.jsonl")
        assert len(rows) == len(server.requests) == 2 * (2 + 2 + 1)
    assert [list(row) for row in rows] == [SINGLE_KEYS] * len(rows)
    assert {(row["model"], row["score"]) for row in rows} == {("alpha", 8), ("beta", 4.5)}
    assert "| alpha | 8 | 8 | 8 | 0 |" in done.output
    by_key = {(row["question_id"], row["model"], row["turn"]): row for row in rows}
    assert by_key[1, "alpha", 1]["judge"] == ["local/judge", "eagle-mars-single-1"]
    assert "Write {braces}." in by_key[1, "alpha", 1]["user_prompt"]
    second = by_key[1, "alpha", 2]["user_prompt"]
    assert [part in second for part in ("alpha says 0", "Shorter.", "alpha says 1")] == [True] * 3
    assert "4 it is" in by_key[2, "beta", 1]["user_prompt"]
    assert "12 it is" in by_key[2, "beta", 2]["user_prompt"]
    assert by_key[3, "beta", 1]["judge"][1] == "eagle-mars-single-1"  # math, but no reference to show


def test_pairwise_asks_in_both_orders_and_only_agreement_wins(bench: Path) -> None:
    def prefers_a_but_alpha_in_maths(body: dict[str, Any]) -> str:
        content = body["messages"][1]["content"]
        if "it is" in content:
            return "[[A]]" if content.index("alpha") < content.index("beta") else "[[B]]"
        return "[[C]]" if "Only one" in content else "[[A]]"

    with judge_server(prefers_a_but_alpha_in_maths) as server:
        done = invoke(bench, server, "pairwise")
        assert done.exit_code == 0, done.output
        assert len(server.requests) == 2 * 5
    rows = read_jsonl(bench / "out" / "local--judge_pair.jsonl")
    assert [list(row) for row in rows] == [PAIR_KEYS] * 5
    games = {(row["question_id"], row["turn"]): (row["g1_winner"], row["g2_winner"]) for row in rows}
    assert games[1, 1] == games[1, 2] == ("model_1", "model_2")  # place, not quality: a tie
    assert games[2, 1] == games[2, 2] == ("model_1", "model_1")
    assert games[3, 1] == ("tie", "tie")
    assert {(row["model_1"], row["model_2"]) for row in rows} == {("alpha", "beta")}
    assert "| alpha | 0.4 | 0 | 0.6 | 0.7 | 0 |" in done.output
    shown = CliRunner().invoke(app, ["show", str(bench / "out" / "local--judge_pair.jsonl")])
    assert shown.output.strip() in done.output


def test_a_second_run_asks_only_what_is_missing(bench: Path) -> None:
    with judge_server(marks) as server:
        assert invoke(bench, server, "single").exit_code == 0
        path = bench / "out" / "local--judge_single.jsonl"
        whole = path.read_text()
        lines = whole.splitlines(keepends=True)
        path.write_text("".join(lines[:6]) + lines[6][:20])  # killed while it wrote the seventh
        server.requests.clear()
        assert invoke(bench, server, "single").exit_code == 0
        assert len(server.requests) == 4
        keys = [row.key for row in read_rows(path, SingleJudgment)]
        assert len(keys) == len(set(keys)) == 10
        server.requests.clear()
        assert invoke(bench, server, "single").exit_code == 0
        assert server.requests == []


def test_a_failure_is_no_judgment_and_is_tried_again(bench: Path) -> None:
    def fails_for_beta(body: dict[str, Any]):
        if "beta" in body["messages"][1]["content"]:
            return 500, {"error": {"message": "overloaded"}}
        return "[[7]]"

    path = bench / "out" / "local--judge_single.jsonl"
    with judge_server(fails_for_beta) as server:
        done = invoke(bench, server, "single")
        assert done.exit_code == 1
        assert "5 of 10 judgments failed, run again to resume" in done.output
        assert {row["model"] for row in read_jsonl(path)} == {"alpha"}
        server.reply = marks
        assert invoke(bench, server, "single").exit_code == 0
    assert len(read_jsonl(path)) == 10


def test_a_judge_that_takes_other_options_is_asked_without_them() -> None:
    def reasoning(body: dict[str, Any]):
        for name in ("max_tokens", "temperature"):
            if name in body:
                return 400, {"error": {"message": f"Unsupported parameter: '{name}'", "param": name}}
        return "[[9]]"

    with judge_server(reasoning) as server:
        judge = Judge("o", server.url, max_tokens=99)
        assert judge.ask("s", "u") == "[[9]]"
        assert server.requests[-1]["max_completion_tokens"] == 99
        server.requests.clear()
        assert judge.ask("s", "u") == "[[9]]"
        assert len(server.requests) == 1  # it remembers


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((400, {"error": {"message": "no such model"}}), "refuses the request.*no such model"),
        ((401, {"error": {"message": "who are you"}}), "can't be asked.*who are you"),
        ("", "answered with nothing"),
    ],
)
def test_errors_of_the_endpoint_are_one_sentence(reply, message: str) -> None:
    with judge_server(lambda body: reply) as server, pytest.raises(JudgeError, match=message):
        Judge("o", server.url, retries=0).ask("s", "u")


@pytest.mark.parametrize(
    ("judgment", "mark", "winner"),
    [
        ("[[7]]", 7, "error"),
        ("Rating: [[8.5]].", 8.5, "error"),
        ("Not [[3]], rather [[9]]", 9, "error"),
        ("[6]", 6, "error"),
        ("ten out of ten", -1, "error"),
        ("[[A]]", -1, "A"),
        ("So [[B]] it is", -1, "B"),
        ("[[C]]", -1, "tie"),
        ("[[A]] or [[B]]", -1, "error"),
        ("[[A]], yes [[A]]", -1, "A"),
        ("", -1, "error"),
    ],
)
def test_reading_a_judgment(judgment: str, mark: float, winner: str) -> None:
    assert rating(judgment) == mark
    assert verdict(judgment) == winner


def test_marks_that_nobody_gave_count_for_no_mean(tmp_path: Path) -> None:
    row = dict.fromkeys(SINGLE_KEYS, "") | {"judge": ["j", "p"], "tstamp": 0.0, "model": "m"}
    rows = [
        {**row, "question_id": q, "turn": t, "score": s} for q, t, s in [(1, 1, 4), (1, 2, 6), (2, 1, 8), (2, 2, -1)]
    ]
    path = write_jsonl(tmp_path / "j_single.jsonl", rows)
    result = single_results(read_rows(path, SingleJudgment))["m"]
    assert {name: cell.value for name, cell in result.items()} == {"turn 1": 6, "turn 2": 6, "mean": 6, "unparsed": 1}
    assert question_scores(path, "m", {1, 2, 9}) == {1: 5, 2: 8}
    assert question_scores(path, "m", {2}) == {2: 8}
    only = single_results([SingleJudgment(**{**row, "question_id": 1, "turn": 1, "score": -1})])["m"]
    assert only["mean"].reason == "no judgment with a mark"


def test_an_unparsed_game_decides_nothing() -> None:
    row = dict.fromkeys(PAIR_KEYS, "") | {"judge": ("j", "p"), "tstamp": 0.0, "model_1": "a", "model_2": "b", "turn": 1}
    games = [("model_1", "model_1"), ("model_1", "error"), ("model_2", "model_2"), ("tie", "model_1")]
    rows = [PairJudgment(**{**row, "question_id": n, "g1_winner": x, "g2_winner": y}) for n, (x, y) in enumerate(games)]
    result = pair_results(rows)["a"]
    assert {name: cell.value for name, cell in result.items()} == pytest.approx(
        {"win": 1 / 3, "loss": 1 / 3, "tie": 1 / 3, "win adjusted": 1 / 2, "unparsed": 1}
    )


def test_fastchats_own_show_reads_both_files(bench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show = pytest.importorskip("fastchat.llm_judge.show_result")
    with judge_server(lambda body: "[[A]]" if "of B" in body["messages"][1]["content"] else "[[6]]") as server:
        assert invoke(bench, server, "single").exit_code == invoke(bench, server, "pairwise").exit_code == 0
    arguments = {"bench_name": "mt_bench", "model_list": None, "baseline_model": None}
    for name, display in (("single", show.display_result_single), ("pair", show.display_result_pairwise)):
        path = bench / "out" / f"local--judge_{name}.jsonl"
        display(type("Arguments", (), {**arguments, "input_file": str(path)}))
    printed = capsys.readouterr().out
    assert "6.0" in printed
    assert "win_rate_adjusted" in printed


def test_own_prompts_cover_every_case_and_name_their_format() -> None:
    prompts = read_prompts(OWN)
    cases = {(p.type, p.for_second_turn, p.wants_reference) for p in prompts}
    assert len(cases) == len(prompts) == 8
    for prompt in prompts:
        assert ("[[5]]" if prompt.type == "single" else "[[C]]") in prompt.system_prompt


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["single", "{bench}/answers/none.jsonl"], "there is no answer file"),
        (["pairwise", "{bench}/answers/alpha.jsonl"], "answer files of two models"),
        (["pairwise", "{bench}/answers/alpha.jsonl", "--baseline", "gamma"], "'gamma' isn't among the models"),
        (["single", "{bench}/answers/alpha.jsonl", "--prompts", "{bench}/none"], "holds no judge prompts"),
    ],
)
def test_mistakes_are_one_sentence(bench: Path, arguments: list[str], message: str) -> None:
    asked = ["--question-file", str(bench / "question.jsonl"), "--judge-model", "j", "--base-url", "http://127.0.0.1:9"]
    done = CliRunner().invoke(app, [part.format(bench=bench) for part in arguments] + asked)
    assert done.exit_code == 1
    assert message in " ".join(done.output.split())
    keyless = CliRunner().invoke(app, ["single", str(bench / "answers" / "alpha.jsonl"), *asked[:4]])
    assert "set OPENAI_API_KEY" in " ".join(keyless.output.split())
