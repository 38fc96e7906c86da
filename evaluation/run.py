"""The generator of answers: `python -m evaluation.run --bench-name gsm8k --method mars`.

Every number of the evaluation comes from files that this writes: the target alone (`ar`), `exact`, and every relaxed
rule, on any task and pair. EAGLE's flag names are kept. The last line of stdout is JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import torch
import typer
from transformers.utils import logging as hf_logging

from eagle_mars import EaModel, VerifyConfig
from eagle_mars.cli_options import one_sentence_errors
from eagle_mars.config import Branch, DraftConfig, Margin
from eagle_mars.draft.eagle3 import Eagle3Head
from eagle_mars.errors import ConfigError, EagleMarsError
from evaluation.answers import read_answers
from evaluation.controls import Control, ControlKind
from evaluation.data.hub import read_hub
from evaluation.data.questions import Question, read_questions
from evaluation.job import Job, run_job
from evaluation.models import ModelConfig, check_model_config, load_pair, read_model_config
from evaluation.record import read_settings
from evaluation.settings import UNDRAFTED, EvaluationMethod, arm_name, check_settings, verify_config
from evaluation.tasks import Task, find_task
from evaluation.workers import Workers

RUNS = Path("runs") / "answers"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    bench_name: Annotated[str, typer.Option(help="Task: mt_bench, gsm8k, humaneval, mbpp, alpaca, sum, ...")] = (
        "mt_bench"
    ),
    question_file: Annotated[Path | None, typer.Option(help="question.jsonl in EAGLE's format.")] = None,
    from_hub: Annotated[bool, typer.Option("--from-hub", help="Take the task's dataset from the hub.")] = False,
    dataset_path: Annotated[str | None, typer.Option(help="Another hub id, or a local copy of the dataset.")] = None,
    dataset_revision: Annotated[str | None, typer.Option(help="Commit of the dataset.")] = None,
    question_begin: Annotated[int, typer.Option(min=0, help="First question, counted from 0.")] = 0,
    question_end: Annotated[int | None, typer.Option(min=0, help="Question to stop before.")] = None,
    answer_file: Annotated[Path | None, typer.Option(help="Default: runs/answers/BENCH/MODEL_ID.jsonl.")] = None,
    model_config: Annotated[str | None, typer.Option(help="Name in configs/models, or a YAML file.")] = None,
    base_model_path: Annotated[str | None, typer.Option(help="Target, instead of the config's.")] = None,
    ea_model_path: Annotated[str | None, typer.Option(help="Draft head, instead of the config's.")] = None,
    model_id: Annotated[str | None, typer.Option(help="Name of this arm; default: model, method, temperature.")] = None,
    use_eagle3: Annotated[
        bool,
        typer.Option("--use-eagle3", "--use_eagle3", "--use-mars", "--use_mars", help="Insist on an EAGLE-3 head."),
    ] = False,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or auto; the config's.")] = None,
    template: Annotated[str | None, typer.Option(help="Chat template: vicuna, llama-2, chatml, raw, a file.")] = None,
    system_prompt: Annotated[str | None, typer.Option(help="System message; empty for none.")] = None,
    thinking: Annotated[bool | None, typer.Option("--enable-thinking/--disable-thinking", help="Qwen3.")] = None,
    total_token: Annotated[int | None, typer.Option(help="Nodes of the draft tree, root included.")] = None,
    depth: Annotated[int | None, typer.Option(help="Tree depth: at most depth + 1 drafts on a path.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Beam width and fan-out of the tree; 1 is a chain.")] = None,
    method: Annotated[
        EvaluationMethod, typer.Option(help="ar (target alone), an acceptance rule, or a control (see --like).")
    ] = "mars",
    like: Annotated[
        Path | None, typer.Option(help="random-swap, matched: answers of the rule to disturb as often as.")
    ] = None,
    theta: Annotated[
        float | None,
        typer.Option("--relaxation-threshold", "--theta", help="Low margin is z2/z1 > theta; default 0.9."),
    ] = None,
    margin: Annotated[Margin | None, typer.Option(help="How the margin is measured.")] = None,
    gap: Annotated[float | None, typer.Option(help="Low margin is z1 - z2 < gap nats.")] = None,
    branch: Annotated[Branch | None, typer.Option(help="Path to follow among acceptable ones.")] = None,
    max_regret: Annotated[float | None, typer.Option(help="Nats per turn, then exact for good.")] = None,
    max_relaxed_per_cycle: Annotated[int | None, typer.Option(help="Relaxed tokens per tree.")] = None,
    released_ratio: Annotated[bool | None, typer.Option(help="mars-released: follow the ratio test.")] = None,
    released_q: Annotated[
        Literal["draft", "one"] | None, typer.Option(help="mars-released: divide by draft or one.")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="typical.")] = None,
    alpha: Annotated[float | None, typer.Option(help="typical.")] = None,
    rank: Annotated[int | None, typer.Option(help="topk-delta, prob-ratio: among the best so many.")] = None,
    delta: Annotated[float | None, typer.Option(help="topk-delta.")] = None,
    rho: Annotated[float | None, typer.Option(help="prob-ratio.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0, the default, is greedy.")] = None,
    category_temperatures: Annotated[
        bool, typer.Option("--category-temperatures", help="mt_bench: FastChat's temperature per category.")
    ] = False,
    top_p: Annotated[float, typer.Option(help="Sample inside this probability mass.")] = 1.0,
    sample_top_k: Annotated[int, typer.Option(help="Sample among the k best tokens; 0 is off.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Root of every turn's seed.")] = 0,
    max_new_token: Annotated[
        int | None, typer.Option("--max-new-token", "--max-new-tokens", help="Per turn; default: the task's.")
    ] = None,
    num_choices: Annotated[int, typer.Option(min=1, help="Samples per question.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends a turn; repeatable.")] = None,
    device: Annotated[str, typer.Option(help="auto (GPUs if there are any), cpu, cuda, cuda:1, ...")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads per process.")] = None,
    cpu_pack: Annotated[bool | None, typer.Option(help="CPU: a second copy of the weights for small trees.")] = None,
    num_gpus_per_model: Annotated[int, typer.Option(min=1, help="GPUs that one copy of the model takes.")] = 1,
    num_gpus_total: Annotated[int | None, typer.Option(min=1, help="Checked against the processes started.")] = None,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="Processes of torchrun that hold one model together; 1: each has its own copy.")
    ] = 1,
    max_gpu_memory: Annotated[str | None, typer.Option(help="Of each GPU, e.g. 40GiB.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Questions decoded together.")] = 1,
    warm_up: Annotated[int, typer.Option(min=0, help="Answers thrown away before the first one.")] = 1,
    load_in_8bit: Annotated[bool, typer.Option("--load-in-8bit", hidden=True)] = False,
    tree_choices: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Answer the questions of a task with one model and one acceptance rule. Run it again to resume it."""
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    with one_sentence_errors(tells_guarantee=False):
        _refuse_what_cannot_be_done(load_in_8bit, tree_choices)
        task = find_task(bench_name)
        name, model = _model(
            model_config,
            base_model_path,
            {
                "target": base_model_path,
                "head": ea_model_path,
                "dtype": dtype,
                "template": template,
                "system": system_prompt,
                "thinking": thinking,
                "cpu_pack": cpu_pack,
            },
            {"total_token": total_token, "depth": depth, "top_k": top_k},
            method,
        )
        options = {
            "theta": theta,
            "margin": margin,
            "gap": gap,
            "branch": branch,
            "max_regret": max_regret,
            "max_relaxed_per_cycle": max_relaxed_per_cycle,
            "released_ratio": released_ratio,
            "released_q": released_q,
            "epsilon": epsilon,
            "alpha": alpha,
            "rank": rank,
            "delta": delta,
            "rho": rho,
        }
        verify = verify_config(method, _given(options))
        control = _control(method, like)
        if answer_file and answer_file.suffix != ".jsonl":
            raise ConfigError(
                f"--answer-file {answer_file} has to end in .jsonl: its record lies beside it by that name."
            )
        if category_temperatures and temperature is not None:
            raise ConfigError("--temperature and --category-temperatures both name the temperature; give one of them.")
        drawn_at = "by-category" if category_temperatures else f"{temperature or 0:g}"
        settings = check_settings(
            model_id=model_id or arm_name(name, method, control.verify if control else verify, drawn_at),
            bench_name=task.name,
            task_version=task.version,
            model=model,
            method=method,
            verify=verify,
            control=control,
            temperature=temperature or 0.0,
            top_p=top_p,
            sample_top_k=sample_top_k,
            category_temperatures=category_temperatures,
            seed=seed,
            max_new_tokens=task.max_new_tokens if max_new_token is None else max_new_token,
            num_choices=num_choices,
            stop=tuple(stop) if stop else task.stop,
            batch_size=batch_size,
        )
        source, questions = _questions(task, question_file, from_hub, dataset_path, dataset_revision)
        if not questions[question_begin:question_end]:
            raise ConfigError(
                f"there is no question from {question_begin} to {question_end}; {source} holds {len(questions)}."
            )
        if threads:
            torch.set_num_threads(threads)
        workers = Workers.join(device, tensor_parallel)
        _check_processes(workers, num_gpus_per_model, num_gpus_total)
        placement = workers.placement(num_gpus_per_model, max_gpu_memory)
        job = Job(
            settings=settings,
            questions=questions,
            source=source,
            answer_file=answer_file or RUNS / task.name / f"{settings.model_id}.jsonl",
            workers=workers,
            load=lambda: _load(model, placement, use_eagle3),
            begin=question_begin,
            end=question_end,
            warm_up=warm_up,
        )
        tally = run_job(job)
        workers.leave()
        if workers.first:
            typer.echo(json.dumps({"answer_file": str(job.answer_file), **tally.summary()}))
        if tally.errors:
            raise EagleMarsError(
                f"{tally.errors} of {len(job.chosen)} questions have no answer; {job.answer_file} says why, and a new "
                "run tries them again."
            )


def _refuse_what_cannot_be_done(load_in_8bit: bool, tree_choices: str | None) -> None:
    """EAGLE's flags that its scripts take and ignore."""
    if load_in_8bit:
        raise ConfigError("--load-in-8bit can't be honoured: no 8-bit target was ever verified here; leave it out.")
    if tree_choices is not None:
        raise ConfigError(
            "--tree-choices can't be honoured: it names EAGLE-1's fixed trees, which EAGLE's scripts take and ignore; "
            "shape the tree with --total-token, --depth and --top-k."
        )


def _model(
    config: str | None,
    base_model_path: str | None,
    changes: dict[str, Any],
    tree: dict[str, int | None],
    method: EvaluationMethod,
) -> tuple[str, ModelConfig]:
    """The pair, and the name that arms are called by: a config, changed by flags, or a pair given by flags alone."""
    if base_model_path and not config:
        if changes["head"] is None:
            raise ConfigError("--base-model-path and --ea-model-path go together; name both, or a --model-config.")
        name, model = Path(base_model_path).name, ModelConfig(target=base_model_path, head=changes["head"])
    else:
        name = Path(config).stem if config else "smollm2"
        model = read_model_config(config or name)
    if method in UNDRAFTED and _given(tree):
        raise ConfigError(
            f"--method {method} drafts nothing, so it has no tree; leave out --total-token, --depth, --top-k."
        )
    given = _given(changes)
    if given.get("dtype", model.dtype) not in ("auto", "float32"):
        given.setdefault("cpu_pack", False)  # a layout for half precision exists on some processors only
    if given.get("system") == "":
        given["system"] = None
    values = {**model.model_dump(), **given, "tree": DraftConfig(**{**model.tree.model_dump(), **_given(tree)})}
    return name, check_model_config("the command line", values)


def _control(method: EvaluationMethod, like: Path | None) -> Control | None:
    """What a control disturbs: the margin of the rule's run, as often as its answers say."""
    if method not in get_args(ControlKind):
        if like:
            raise ConfigError("--like is read by --method random-swap and matched; leave it out.")
        return None
    if like is None:
        raise ConfigError(f"--method {method} needs --like: the answers of the rule to disturb as often as.")
    rule = read_settings(like).verify
    if rule is None:
        raise ConfigError(f"{like} was made without a rule, so there is nothing to be like; give answers of mars.")
    rule = VerifyConfig(**rule.model_dump(exclude_defaults=True))  # so that the arm's name holds what was chosen
    return Control.like(cast(ControlKind, method), rule, read_answers(like))


def _questions(
    task: Task, file: Path | None, from_hub: bool, dataset_path: str | None, revision: str | None
) -> tuple[str, list[Question]]:
    """Where the questions come from, and all of them."""
    hub = from_hub or dataset_path is not None
    if file and hub:
        raise ConfigError("--question-file and a dataset of the hub exclude each other; name one source.")
    if revision and not hub:
        raise ConfigError("--dataset-revision is of a hub dataset; add --from-hub or --dataset-path.")
    if hub:
        return dataset_path or task.hub.path, read_hub(task, dataset_path, revision)
    return (
        (str(file), read_questions(file)) if file else (f"the project's own {task.name}", read_questions(task.sample))
    )


def _check_processes(workers: Workers, per_model: int, total: int | None) -> None:
    launched = workers.size * workers.tensor_parallel
    if total is not None and total != per_model * launched:
        processes = max(total // per_model, 1)
        raise ConfigError(
            f"--num-gpus-total {total} with {per_model} per model means {processes} processes, and this run has "
            f"{launched}; start it with torchrun --nproc-per-node {processes} -m evaluation.run."
        )


def _load(model: ModelConfig, placement: dict[str, Any], use_eagle3: bool) -> EaModel:
    ea = load_pair(model, **placement)
    if use_eagle3 and not isinstance(ea.ea_layer, Eagle3Head):
        raise ConfigError(f"--use-eagle3 was given, but {model.head} is no EAGLE-3 head; leave the flag out.")
    return ea


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


if __name__ == "__main__":
    app()
