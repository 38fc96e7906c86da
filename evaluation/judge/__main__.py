"""`python -m evaluation.judge single|pairwise|show`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from eagle_mars.cli_options import one_sentence_errors
from eagle_mars.errors import ConfigError
from evaluation.data.questions import read_questions
from evaluation.judge.client import Judge
from evaluation.judge.judging import matches, pairs, run
from evaluation.judge.prompts import OWN, read_prompts
from evaluation.judge.records import PairJudgment, SingleJudgment, read_rows, read_turns
from evaluation.judge.show import pair_results, single_results
from evaluation.table import markdown_table

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

Answers = Annotated[list[Path], typer.Argument(help="Answer files; the name of a file is the name of its model.")]
Questions = Annotated[Path, typer.Option(help="question.jsonl that was answered.")]
References = Annotated[Path | None, typer.Option(help="Answers of a reference model, FastChat's reference_answer.")]
JudgeModel = Annotated[str, typer.Option(help="Name of the judge at its endpoint.")]
BaseUrl = Annotated[str | None, typer.Option(help="Any OpenAI-compatible endpoint, e.g. http://localhost:8000/v1.")]
Prompts = Annotated[Path, typer.Option(help="FastChat's judge_prompts.jsonl; default: the project's own.")]
Out = Annotated[Path | None, typer.Option(help="Default: model_judgment/ beside the answers.")]
Parallel = Annotated[int, typer.Option(min=1, help="Requests at a time.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Per judgment.")]


@app.command()
def single(
    answer_files: Answers,
    question_file: Questions,
    judge_model: JudgeModel,
    base_url: BaseUrl = None,
    reference_file: References = None,
    prompts: Prompts = OWN,
    out: Out = None,
    parallel: Parallel = 1,
    max_tokens: MaxTokens = 2048,
) -> None:
    """Give each answer a mark from 1 to 10."""
    with one_sentence_errors():
        groups: list[tuple[str, ...]] = [(path.stem,) for path in answer_files]
        path = _output(out, answer_files, f"{_file_name(judge_model)}_single.jsonl")
        judge = Judge(judge_model, base_url, max_tokens=max_tokens)
        _judge(judge, answer_files, groups, question_file, reference_file, prompts, path, parallel)
        typer.echo(markdown_table(single_results(read_rows(path, SingleJudgment)), "model"))


@app.command()
def pairwise(
    answer_files: Answers,
    question_file: Questions,
    judge_model: JudgeModel,
    base_url: BaseUrl = None,
    reference_file: References = None,
    prompts: Prompts = OWN,
    baseline: Annotated[str | None, typer.Option(help="Model to compare all others with; default: all pairs.")] = None,
    out: Out = None,
    parallel: Parallel = 1,
    max_tokens: MaxTokens = 2048,
) -> None:
    """Let the judge choose between two answers, in both orders."""
    with one_sentence_errors():
        models = [path.stem for path in answer_files]
        if baseline and baseline not in models:
            raise ConfigError(f"the baseline {baseline!r} isn't among the models {', '.join(models)}; add its answers.")
        groups = pairs(models, baseline)
        if not groups:
            raise ConfigError("there is nothing to compare; give the answer files of two models or more.")
        path = _output(out, answer_files, f"{_file_name(judge_model)}_pair.jsonl")
        judge = Judge(judge_model, base_url, max_tokens=max_tokens)
        _judge(judge, answer_files, groups, question_file, reference_file, prompts, path, parallel)
        typer.echo(markdown_table(pair_results(read_rows(path, PairJudgment)), "model"))


@app.command()
def show(judgment_file: Annotated[Path, typer.Argument(help="..._single.jsonl or ..._pair.jsonl")]) -> None:
    """Marks or win rates of every model in a file of judgments, this project's or FastChat's."""
    with one_sentence_errors():
        if not judgment_file.is_file():
            raise ConfigError(f"there is no file {judgment_file}; judge first.")
        if judgment_file.stem.endswith("_pair"):
            results = pair_results(read_rows(judgment_file, PairJudgment))
        else:
            results = single_results(read_rows(judgment_file, SingleJudgment))
        if not results:
            raise ConfigError(f"{judgment_file} holds no judgments yet; judge first.")
        typer.echo(markdown_table(results, "model"))


def _judge(
    judge: Judge,
    answer_files: list[Path],
    groups: list[tuple[str, ...]],
    question_file: Path,
    reference_file: Path | None,
    prompts: Path,
    out: Path,
    parallel: int,
) -> None:
    """Do all of it, with a progress bar. References: the file's, else the questions' own."""
    questions = read_questions(question_file)
    answers = {path.stem: read_turns(path) for path in answer_files}
    if len(answers) < len(answer_files):
        raise ConfigError("two answer files share a name, which is the name of their model; rename one.")
    references = {q.question_id: q.reference for q in questions if q.reference}
    if reference_file:
        references |= read_turns(reference_file)
    work = list(matches(questions, groups, answers, references, read_prompts(prompts)))
    if not work:
        raise ConfigError(f"no question of {question_file} is answered by all these files; correct --question-file.")
    with tqdm(total=len(work), unit="judgment", file=sys.stderr) as bar:
        run(judge, work, out, parallel=parallel, on_done=bar.update)


def _output(out: Path | None, answer_files: list[Path], name: str) -> Path:
    return (out or answer_files[0].parent / "model_judgment") / name


def _file_name(judge: str) -> str:
    """Names like `org/model` are common, and a slash would make a folder."""
    return judge.replace("/", "--")


if __name__ == "__main__":
    app()
