"""What each acceptance rule gains and what it costs: `python -m evaluation.rules match | run | table`.

`match` finds the options under which rules are comparable: a gap that fires as often as a theta, comparators that
accept as many drafts as `mars`. `run` decodes the same prompts under every rule, paired with `exact`; it appends one
line per answer, so it can be killed, continued and split over processes. `table` renders what `run` wrote.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers.utils import logging as hf_logging

from eagle_mars import EaModel, GenerationResult, SamplingConfig, VerifyConfig
from eagle_mars.cli_options import one_sentence_errors
from eagle_mars.embedded import embedded_head_path, embedded_target_path
from eagle_mars.engine import Request
from eagle_mars.errors import ConfigError
from eagle_mars.prompts import read_prompts
from eagle_mars.render import progress
from eagle_mars.sampling import SamplingPlan
from evaluation import nodes
from evaluation.matching import Matched, candidates, choose
from evaluation.metrics import Array, Cell, interval, loop_rate, mean, median_ratio, ratio
from evaluation.provenance import append_row, provenance, write_atomically
from evaluation.sweep import HELDOUT, parse_tree
from evaluation.table import markdown_table, plain
from evaluation.watch import LawWatch, Replay

EXACT = "exact"
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
err = Console(stderr=True)

Prompts = Annotated[
    list[Path] | None, typer.Option(help="Prompt files; repeatable. Default: the held-out chat prompts.")
]
PerFile = Annotated[int | None, typer.Option(help="First N prompts of each file.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
Tree = Annotated[str, typer.Option(help="chain-N, or total_token,depth,top_k.")]
Model = Annotated[str | None, typer.Option(help="Target; the embedded one by default.")]
Head = Annotated[str | None, typer.Option(help="Draft head; the embedded one by default.")]


def arms(temperature: float, matched: Matched) -> dict[str, VerifyConfig]:
    """The rules under comparison; `exact` first."""
    gap_90 = VerifyConfig(margin="logit-gap", gap=matched.gap_for_theta_90)
    chosen = {
        EXACT: VerifyConfig(rule="exact"),
        "mars θ .9": VerifyConfig(theta=0.9),
        f"mars gap {matched.gap_for_theta_90:.2f} (fires as θ .9)": gap_90,
        "mars θ .96": VerifyConfig(theta=0.96),
        f"mars gap {matched.gap_for_theta_96:.2f} (fires as θ .96)": VerifyConfig(
            margin="logit-gap", gap=matched.gap_for_theta_96
        ),
        "mars θ .9 longest": VerifyConfig(theta=0.9, branch="longest"),
        f"topk-delta delta {matched.delta:.3g}": VerifyConfig(rule="topk-delta", delta=matched.delta),
        f"prob-ratio rho {matched.rho:.3g}": VerifyConfig(rule="prob-ratio", rho=matched.rho),
    }
    if temperature > 0:
        chosen |= {
            f"typical epsilon {matched.epsilon:.3g} alpha {matched.alpha:.3g}": VerifyConfig(
                rule="typical", epsilon=matched.epsilon, alpha=matched.alpha
            ),
            "mars-paper θ .9": VerifyConfig(rule="mars-paper", theta=0.9),
            **released_effects(),
        }
    return chosen


def released_effects() -> dict[str, VerifyConfig]:
    """The 2x2 of `mars-released`: its p/q test and its ratio, each on or off."""
    released: dict[str, Any] = {"rule": "mars-released", "theta": 0.9}
    return {
        "released q draft, ratio on": VerifyConfig(**released),
        "released q draft, ratio off": VerifyConfig(**released, released_ratio=False),
        "released q 1, ratio on": VerifyConfig(**released, released_q="one"),
        "released q 1, ratio off": VerifyConfig(**released, released_q="one", released_ratio=False),
    }


@app.command()
@one_sentence_errors()
def match(
    out: Annotated[Path, typer.Option(help="JSON file of the matched options.")],
    prompts: Prompts = None,
    per_file: PerFile = None,
    temperature: Temperature = 0.0,
    tree: Tree = "26,4,8",
    max_new_tokens: int = 40,
    seed: int = 0,
    threads: int = 1,
    model: Model = None,
    head: Head = None,
) -> None:
    """Find comparable options on prompts that the comparison itself doesn't use."""
    ea = _load(model, head, threads)
    ids = _prompt_ids(ea, prompts, per_file)
    replay = Replay(candidates(temperature), SamplingConfig(temperature=temperature), ea.special_ids)
    with progress(err, len(ids)) as advance:
        for index, prompt in enumerate(ids):
            sampling = SamplingConfig(temperature=temperature, seed=seed + index)
            decode(ea, prompt, Request(max_new_tokens, parse_tree(tree), VerifyConfig(rule=EXACT), sampling), replay)
            advance()
    matched = choose(replay, temperature)
    write_atomically(out, json.dumps({**matched.model_dump(), "provenance": provenance()}, indent=1) + "\n")
    typer.echo(matched.model_dump_json(indent=1))


@app.command()
@one_sentence_errors()
def run(
    answers: Annotated[Path, typer.Option(help="JSONL that answers are appended to; answers in it are kept.")],
    matched: Annotated[Path, typer.Option(help="What `match` wrote for this temperature.")],
    prompts: Prompts = None,
    per_file: PerFile = None,
    temperature: Temperature = 0.0,
    tree: Tree = "26,4,8",
    max_new_tokens: int = 40,
    seed: int = 0,
    threads: int = 1,
    part: Annotated[str, typer.Option(help="i/n: every n-th prompt from the i-th, for one of n processes.")] = "0/1",
    only_released: Annotated[bool, typer.Option("--only-released", help="exact and the 2x2 of mars-released.")] = False,
    cpu_pack: Annotated[bool, typer.Option("--cpu-pack/--no-cpu-pack", help="Weights in oneDNN's layout.")] = False,
    model: Model = None,
    head: Head = None,
) -> None:
    """Decode every prompt under every rule."""
    settings = {"temperature": temperature, "tree": tree, "max_new_tokens": max_new_tokens, "seed": seed}
    configs = arms(temperature, Matched.model_validate(_without_provenance(matched)))
    if only_released:
        configs = {EXACT: configs[EXACT], **released_effects()}
    done = {(row["prompt"], row["rule"]) for row in read_answers([answers], settings)} if answers.exists() else set()
    ea = _load(model, head, threads, cpu_pack)
    ids = _prompt_ids(ea, prompts, per_file)
    first, step = (int(number) for number in part.split("/"))
    todo = [(i, name) for i in range(first, len(ids), step) for name in configs if (i, name) not in done]
    with progress(err, len(todo)) as advance:
        for index, name in todo:
            sampling = SamplingConfig(temperature=temperature, seed=seed + index)
            row = answer(ea, ids[index], Request(max_new_tokens, parse_tree(tree), configs[name], sampling))
            append_row(answers, {"prompt": index, "rule": name, **row, "settings": settings})
            advance()


@app.command()
@one_sentence_errors()
def table(
    answers: Annotated[list[Path], typer.Argument(help="What `run` wrote; several files of one setting.")],
    out: Annotated[Path | None, typer.Option(help="Directory for rules.jsonl and rules-tT.md.")] = None,
) -> None:
    """Summarise the prompts that every rule has answered."""
    rows = read_answers(answers)
    names = list(dict.fromkeys(row["rule"] for row in rows))
    by_rule = {name: {row["prompt"]: row for row in rows if row["rule"] == name} for name in names}
    complete = sorted(set.intersection(*(set(answered) for answered in by_rule.values())))
    if EXACT not in by_rule or not complete:
        raise ConfigError("no prompt has been answered under every rule yet; let `run` finish.")
    paired = {name: [answered[prompt] for prompt in complete] for name, answered in by_rule.items()}
    lines = {name: summarise(name, paired) for name in names}
    settings = {"prompts": len(complete), **rows[0]["settings"], "dtype": "float32"}
    source = provenance()
    text = "\n".join(
        [
            f"`{source['command']}`",
            "",
            ", ".join(f"{key} {value}" for key, value in settings.items()) + ".",
            f"{source['device']}, torch {source['packages']['torch']}, transformers "
            f"{source['packages']['transformers']}, commit {source['commit'][:10]}, {source['date']}.",
            "",
            markdown_table(lines, "rule"),
        ]
    )
    typer.echo(text)
    if out:
        cells = {name: plain(line) for name, line in lines.items()}
        append_row(out / "rules.jsonl", {**settings, "rules": cells, "provenance": source})
        write_atomically(out / f"rules-t{settings['temperature']:g}.md", text)


def read_answers(paths: Sequence[Path], settings: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Rows of answer files, which must all have the same settings (and `settings`, where given)."""
    rows = [json.loads(line) for path in paths for line in _text(path).splitlines()]
    expected = settings or (rows[0]["settings"] if rows else None)
    if any(row["settings"] != expected for row in rows):
        raise ConfigError("these answers were made with other settings; give --answers a new file for each setting.")
    return rows


def decode(ea: EaModel, prompt: Sequence[int], request: Request, verifier: Any) -> GenerationResult:
    """Decode one prompt with `verifier` in the place of `verify`, ending where the model's own answers end."""
    request = replace(request, stop_ids=ea.stop_ids, special_ids=ea.special_ids)
    return nodes.decode(ea, torch.tensor([list(prompt)]), request, verifier)


def answer(ea: EaModel, prompt: Sequence[int], request: Request) -> dict[str, Any]:
    """Decode one prompt and measure the answer; plain values."""
    watch = LawWatch(request.verify, SamplingPlan.compile([request.sampling]), frozenset(ea.special_ids))
    result = decode(ea, prompt, request, watch)
    return {
        "tokens": result.new_tokens,
        "cycles": result.cycles,
        "accepted": sum(result.accepted_lengths),
        "relaxed": result.relaxed,
        "regret": result.regret,
        "tok_per_s": result.new_tokens / (result.seconds - watch.seconds),
        "logprob": sum(log_probabilities(ea, prompt, result)),
        "distances": [round(distance, 5) for distance in watch.distances],
        "loops": loop_rate(result.token_ids),
    }


def summarise(name: str, paired: dict[str, list[dict[str, Any]]]) -> dict[str, Cell]:
    """One row of the table: 95 % intervals over prompts, paired with `exact` where it compares."""
    ours, exact = paired[name], paired[EXACT]

    def column(key: str, rows: list[dict[str, Any]] = ours, scale: float = 1) -> list[float]:
        return [scale * row[key] for row in rows]

    def yielded(rows: list[dict[str, Any]]) -> list[float]:
        return [row["accepted"] + row["cycles"] for row in rows]

    tokens = column("tokens")
    return {
        "tau": interval([yielded(ours), column("cycles")], ratio),
        "tau against exact": interval(
            [yielded(ours), column("cycles"), yielded(exact), column("cycles", exact)], ratio_of_ratios
        ),
        "tok/s against exact": interval([column("tok_per_s"), column("tok_per_s", exact)], median_ratio),
        "relaxed per 1000": interval([column("relaxed", scale=1000), tokens], ratio),
        "log-probability": interval([column("logprob"), tokens], ratio),
        "regret per 1000": interval([column("regret", scale=1000), tokens], ratio),
        "TV per node": _distance(name, ours),
        "length ratio": interval([tokens, column("tokens", exact)], ratio),
        "4-gram loops": interval([column("loops")], mean),
    }


def _distance(name: str, rows: list[dict[str, Any]]) -> Cell:
    """Mean total variation of a decision from the target's distribution."""
    if name == EXACT and rows[0]["settings"]["temperature"] > 0:
        return Cell(0.0)  # its law is the distribution itself (proven by the tests), so nothing was measured
    visited = [len(row["distances"]) for row in rows]
    if not any(visited):
        return Cell.empty("measured at T > 0, for the rules of the mars family")
    return interval([[sum(row["distances"]) for row in rows], visited], ratio)


def ratio_of_ratios(a: Array, b: Array, c: Array, d: Array, axis: int = -1) -> Array:
    """(Σa / Σb) / (Σc / Σd)."""
    return ratio(a, b, axis) / ratio(c, d, axis)


@torch.inference_mode()
def log_probabilities(ea: EaModel, prompt: Sequence[int], result: GenerationResult) -> list[float]:
    """log p of every new token under the target at T = 1, by one plain forward."""
    ids = torch.tensor([[*prompt, *result.token_ids]], device=ea.device)
    logits = ea.base_model(ids, logits_to_keep=len(result.token_ids) + 1).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None]).flatten().tolist()


def _load(model: str | None, head: str | None, threads: int, cpu_pack: bool = False) -> EaModel:
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    return EaModel.from_pretrained(
        model or str(embedded_target_path()), head or str(embedded_head_path()), dtype="float32", cpu_pack=cpu_pack
    )


def _prompt_ids(ea: EaModel, files: Sequence[Path] | None, per_file: int | None) -> list[list[int]]:
    return [ea.chat_ids(text) for path in files or [HELDOUT] for text in read_prompts(path)[:per_file]]


def _without_provenance(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(_text(path))
    values.pop("provenance", None)
    return values


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}; correct the path.") from error


if __name__ == "__main__":
    app()
