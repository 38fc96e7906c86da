"""`evaluation.run` with a tiny pair: conversations, methods, seeds, flags, error rows, resuming, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from eagle_mars import DraftConfig, EaModel
from evaluation.answers import Answer, TurnStats
from evaluation.models import ModelConfig, load_pair
from evaluation.settings import CATEGORY_TEMPERATURES, turn_seed
from tests.evaluation.running import arguments, invoke, run, untimed, write_questions

Pair = tuple[str, str]


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("questions") / "question.jsonl"
    return write_questions(path, ["Hello", "More"], ["Why?"], ["Name three"])


@pytest.fixture(scope="module")
def model(tiny_pair: Pair) -> EaModel:
    return load_pair(ModelConfig(target=tiny_pair[0], head=tiny_pair[1], tree=DraftConfig(total_token=2, depth=0)))


@pytest.fixture
def answer(tiny_pair: Pair, questions: Path, tmp_path: Path):
    """Runs with more flags, each into a file of its own."""
    counter = iter(range(100))

    def answer(*more: str) -> list[Answer]:
        path = tmp_path / f"{next(counter)}.jsonl"
        return run(arguments(tiny_pair, questions, path, *more), path)

    return answer


def turns(rows: list[Answer]) -> list[tuple[str, ...]]:
    return [choice.turns for row in rows for choice in row.choices]


def stats(rows: list[Answer]) -> list[TurnStats]:
    return [turn for row in rows for choice in row.choices for turn in choice.stats]


def test_the_second_turn_follows_the_first_answer(answer, model: EaModel) -> None:
    (row,) = answer("--question-end", "1", "--method", "exact")
    first, second = row.choices[0].turns
    dialogue = [{"role": "user", "content": "Hello"}]
    assert model.generate(model.chat_ids(dialogue), max_new_tokens=12).text.strip()  # the model does say something
    dialogue += [{"role": "assistant", "content": first}, {"role": "user", "content": "More"}]
    alone = model.generate(model.chat_ids(dialogue), max_new_tokens=12, method="autoregressive")
    assert second == alone.text.strip()
    assert row.choices[0].stats[1].prompt_tokens == alone.prompt_tokens


def test_ar_and_exact_give_the_same_texts_and_say_how(answer) -> None:
    plain, exact = answer("--method", "ar"), answer("--method", "exact")
    assert turns(plain) == turns(exact)
    assert all(not turn.accepted_lengths and set(turn.provenance) == {"t"} for turn in stats(plain))
    assert sum(sum(turn.accepted_lengths) for turn in stats(exact)) > 0
    assert {row.method for row in plain} == {"ar"}


@pytest.mark.parametrize(
    "method", ["mars", "mars-paper", "mars-released", "typical", "topk-delta", "prob-ratio", "exact", "ar"]
)
def test_every_method_answers_every_turn(answer, method: str) -> None:
    rows = answer("--method", method, "--temperature", "1", "--question-end", "2", "--max-new-token", "6")
    assert [len(choice) for choice in turns(rows)] == [2, 1]
    assert all(turn.new_tokens == 6 for turn in stats(rows))
    assert [(row.question_id, row.method) for row in rows] == [(81, method), (82, method)]


def test_relaxation_is_counted_and_can_be_switched_off(answer) -> None:
    relaxed = answer("--relaxation-threshold", "0.5")
    assert sum(turn.relaxed for turn in stats(relaxed)) > 0
    off = answer("--relaxation-threshold", "1")
    assert turns(off) == turns(answer("--method", "exact"))
    assert sum(turn.relaxed for turn in stats(off)) == 0
    capped = answer("--relaxation-threshold", "0.5", "--max-relaxed-per-cycle", "0")
    assert turns(capped) == turns(off)


def test_a_turns_text_does_not_depend_on_what_else_is_run(answer) -> None:
    sampled = ("--temperature", "1", "--num-choices", "2")
    whole = answer(*sampled)
    assert untimed(answer(*sampled, "--question-begin", "2")) == untimed(whole[2:])
    assert untimed(answer(*sampled, "--question-begin", "1", "--question-end", "2")) == untimed(whole[1:2])
    first, second = whole[0].choices
    assert first.turns != second.turns
    assert len({turn.seed for turn in stats(whole)}) == len(stats(whole)) == 8
    assert turns(answer(*sampled, "--seed", "1")) != turns(whole)
    assert stats(whole)[0].seed == turn_seed(0, 81, 0, 0)


@pytest.mark.parametrize("temperature", ["0", "0.9"])
@pytest.mark.parametrize("method", [("mars", "--theta", "0.5"), ("ar",)])
def test_questions_decoded_together_get_the_answers_they_get_alone(answer, method, temperature: str) -> None:
    flags = ("--method", *method, "--temperature", temperature)
    alone, together = answer(*flags), answer(*flags, "--batch-size", "2")
    assert turns(together) == turns(alone)
    assert [turn.accepted_lengths for turn in stats(together)] == [turn.accepted_lengths for turn in stats(alone)]


def test_tree_flags_shape_the_tree(answer) -> None:
    """Every letter that the tiny target says is among sixteen: a tree that holds all of them always hits."""
    narrow = answer("--method", "exact", "--top-k", "1", "--total-token", "2", "--depth", "0")
    wide = answer("--method", "exact", "--top-k", "16", "--total-token", "17", "--depth", "0")
    deep = answer("--method", "exact", "--top-k", "16", "--total-token", "200", "--depth", "1")
    assert [min(turn.accepted_lengths) for turn in stats(narrow)] == [0] * 4
    assert {n for turn in stats(wide) for n in turn.accepted_lengths} == {1}
    assert max(n for turn in stats(deep) for n in turn.accepted_lengths) == 2
    assert turns(narrow) == turns(wide) == turns(deep)


def test_stop_strings_limits_and_system_messages_work(answer) -> None:
    plain = answer("--method", "exact", "--question-end", "1")
    text = plain[0].choices[0].turns[0]
    stopped = answer("--method", "exact", "--question-end", "1", "--stop", text[5])
    assert stopped[0].choices[0].turns[0] == text[: text.index(text[5])]
    assert stopped[0].choices[0].stats[0].finish_reason == "stop"
    assert all(turn.new_tokens == 3 for turn in stats(answer("--max-new-token", "3")))
    instructed = answer("--method", "exact", "--question-end", "1", "--system-prompt", "abc")
    assert (
        stats(instructed)[0].prompt_tokens == stats(plain)[0].prompt_tokens + len("abc") + 2
    )  # and the two special tokens around it


def test_category_temperatures_are_fastchats(answer) -> None:
    short = ("--max-new-token", "2")
    by_category = answer("--category-temperatures", "--num-choices", "2", *short)
    assert {turn.temperature for turn in stats(by_category)} == {CATEGORY_TEMPERATURES["writing"]}
    assert {turn.temperature for turn in stats(answer(*short))} == {0.0}


def test_names_default_to_what_was_run(answer, tiny_pair: Pair, questions: Path, tmp_path: Path, monkeypatch) -> None:
    short = ("--max-new-token", "1", "--question-end", "1")
    assert answer("--method", "exact", *short)[0].model_id == "target-exact-temperature-0"
    warm = answer("--theta", "0.96", "--temperature", "1", *short)
    assert warm[0].model_id == "target-mars-theta0.96-temperature-1"
    assert answer("--model-id", "mine", *short)[0].model_id == "mine"
    monkeypatch.chdir(tmp_path)
    args = arguments(tiny_pair, questions, Path("ignored"), "--bench-name", "alpaca", *short)
    at = args.index("--answer-file")
    done = invoke(args[:at] + args[at + 2 :])
    assert json.loads(done.stdout.splitlines()[-1])["answer_file"] == (
        "runs/answers/alpaca/target-mars-theta0.9-temperature-0.jsonl"
    )


def test_the_last_line_sums_the_run_up_and_the_record_says_where_it_comes_from(
    tiny_pair: Pair, questions: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    args = arguments(tiny_pair, questions, path, "--method", "exact")
    summary = json.loads(invoke(args).stdout.splitlines()[-1])
    assert (summary["answers"], summary["errors"], summary["new_tokens"]) == (3, 0, 48)
    assert summary["tau"] > 1
    record = json.loads((tmp_path / "a.run.json").read_text())
    assert record["settings"]["verify"]["rule"] == "exact"
    assert record["dataset"]["questions"] == 3
    assert all(len(found["sha256"]) == 64 for found in (record["dataset"], *record["checkpoints"].values()))
    (session,) = record["sessions"]
    assert {"command", "commit", "cpu", "threads", "packages", "device", "processes"} <= set(session)
    assert session["finished"]
    assert session["summary"] == {name: value for name, value in summary.items() if name != "answer_file"}


def test_a_failure_is_a_row_and_is_tried_again(tiny_pair: Pair, tmp_path: Path) -> None:
    questions = write_questions(tmp_path / "q.jsonl", ["x" * 1100], ["Hi", "y" * 1100], ["Hi"])
    path = tmp_path / "a.jsonl"
    args = arguments(tiny_pair, questions, path)
    result = invoke(args)
    assert result.exit_code == 1
    assert "2 of 3 questions have no answer" in result.stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["question_id"] for row in rows] == [81, 82, 83]
    assert [row["error"] and (row["error"]["kind"], row["error"]["turn"]) for row in rows] == [
        ("ContextLengthError", 0),
        ("ContextLengthError", 1),
        None,
    ]
    answered = path.read_text().splitlines()[2]
    assert invoke(args).exit_code == 1
    assert len(path.read_text().splitlines()) == 3
    assert path.read_text().splitlines()[2] == answered


def test_a_finished_run_is_left_alone_and_a_larger_slice_goes_on(
    tiny_pair: Pair, questions: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    first = run(arguments(tiny_pair, questions, path, "--question-begin", "1"), path)
    again = run(arguments(tiny_pair, questions, path, "--question-begin", "1"), path)
    assert first == again
    larger = run(arguments(tiny_pair, questions, path), path)
    assert [row.question_id for row in larger] == [81, 82, 83]
    assert larger[1:] == first
    assert len(json.loads((tmp_path / "a.run.json").read_text())["sessions"]) == 3


def test_an_answer_file_is_not_continued_under_other_settings(tiny_pair: Pair, questions: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    run(arguments(tiny_pair, questions, path, "--model-id", "m"), path)
    before = path.read_bytes()
    hotter = invoke(arguments(tiny_pair, questions, path, "--model-id", "m", "--temperature", "0.5"))
    assert hotter.exit_code == 1
    assert "was begun with settings.temperature=0.0, and this run says 0.5" in hotter.stderr
    other = write_questions(tmp_path / "q.jsonl", ["Hello"])
    assert "dataset.questions=3" in invoke(arguments(tiny_pair, other, path, "--model-id", "m")).stderr
    (tmp_path / "a.run.json").unlink()
    lost = invoke(arguments(tiny_pair, questions, path, "--model-id", "m"))
    assert "holds answers, but a.run.json" in lost.stderr
    assert path.read_bytes() == before


REFUSED = [
    (["--method", "mars", "--delta", "0.1"], "--method mars doesn't read --delta; .* --method topk-delta"),
    (["--method", "exact", "--relaxation-threshold", "0.9"], "--method exact doesn't read --theta"),
    (["--method", "ar", "--depth", "3"], "--method ar drafts nothing"),
    (["--temperature", "-1"], "temperature=-1.0 is not usable"),
    (["--top-p", "0"], "top_p=0.0 is not usable"),
    (["--max-new-token", "0"], "max_new_tokens=0 is not usable"),
    (["--num-choices", "2"], "2 times the same answer"),
    (["--temperature", "1", "--category-temperatures"], "both name the temperature"),
    (["--margin", "logit-gap"], "needs gap in nats"),
    (["--total-token", "500"], "total_token=500 is impossible"),
    (["--bench-name", "mtbench"], "no task 'mtbench'"),
    (["--question-begin", "3"], "no question from 3 to None; .* holds 3"),
    (["--from-hub"], "exclude each other"),
    (["--dataset-revision", "abc"], "add --from-hub or --dataset-path"),
    (["--num-gpus-total", "4"], "means 4 processes, and this run has 1; start it with torchrun --nproc-per-node 4"),
    (["--num-gpus-per-model", "2"], "this run is on the CPU"),
    (["--load-in-8bit"], "--load-in-8bit can't be honoured"),
    (["--tree-choices", "mc_sim_7b_63"], "--tree-choices can't be honoured"),
    (["--dtype", "int8"], "dtype: Input should be"),
    (["--template", "nope"], "no chat template 'nope'"),
    (["--model-config", "nope"], "no model config 'nope'"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED, ids=[" ".join(flags) for flags, _ in REFUSED])
def test_what_cannot_be_honoured_is_refused_in_one_sentence(
    tiny_pair: Pair, questions: Path, tmp_path: Path, flags: list[str], message: str
) -> None:
    args = arguments(tiny_pair, questions, tmp_path / "a.jsonl", *flags)
    result = invoke(args)
    assert result.exit_code == 1
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert re.search(message, line), line
    assert not (tmp_path / "a.jsonl").exists()


@pytest.mark.parametrize(
    ("file", "message"), [("/proc/nowhere/a.jsonl", "give another --answer-file"), ("qwen-0.9", "end in .jsonl")]
)
def test_an_unusable_answer_file_is_refused(tiny_pair: Pair, questions: Path, file: str, message: str) -> None:
    result = invoke(arguments(tiny_pair, questions, Path(file)))
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_an_eagle_1_head_is_refused_where_eagle_3_was_asked_for(golden: Path, questions: Path, tmp_path: Path) -> None:
    pair = (str(golden / "models/llama"), str(golden / "heads/llama-e1"))
    args = arguments(pair, questions, tmp_path / "a.jsonl", "--use-mars", "--template", "raw")
    assert "no EAGLE-3 head" in invoke(args).stderr
