"""Which draft tree pays on this machine: `python -m evaluation.sweep`.

Every tree is decoded with `exact` and `mars` beside the target alone and transformers' greedy `generate`, all in one
process, paired by prompt. Prints a table; `--out` appends one JSON row with provenance and writes the table beside it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers.utils import logging as hf_logging

from eagle_mars import DraftConfig, EaModel, GenerationResult, VerifyConfig
from eagle_mars.cli_options import one_sentence_errors
from eagle_mars.compare import BASELINE, Comparison, Decode, compare, identical_prefix
from eagle_mars.embedded import embedded_head_path, embedded_target_path
from eagle_mars.errors import ConfigError
from eagle_mars.model import Method
from eagle_mars.prompts import read_prompts
from eagle_mars.render import progress
from evaluation.peers import hf_generate
from evaluation.provenance import append_row, provenance, write_atomically

GENERATE = "generate"
TIE = 1e-3  # nats between the two best logits below which fp32 summation order may decide
HELDOUT = Path(__file__).parent / "data" / "heldout_chat.jsonl"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
err = Console(stderr=True)


def parse_tree(text: str) -> DraftConfig:
    """`chain-3` or `total_token,depth,top_k`, with `@` and an entropy stop or without.

    Raises ConfigError for anything else.
    """
    text, _, stop = text.partition("@")
    try:
        if stop:
            return parse_tree(text).replace(entropy_stop=float(stop))
        if text.startswith("chain-"):
            return DraftConfig.chain(int(text.removeprefix("chain-")))
        total_token, depth, top_k = (int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{text!r} is no tree; write chain-N, or total_token,depth,top_k such as 26,4,8.") from None
    return DraftConfig(total_token=total_token, depth=depth, top_k=top_k)


@app.command()
@one_sentence_errors()
def main(
    trees: Annotated[list[str], typer.Argument(help="chain-N, or total_token,depth,top_k; several.")],
    prompts: Annotated[Path, typer.Option(help="question.jsonl or one prompt a line.")] = HELDOUT,
    limit: Annotated[int | None, typer.Option(help="Use only the first N prompts.")] = None,
    every: Annotated[int, typer.Option(help="Use every n-th prompt, so that a short run sees all kinds.")] = 1,
    max_new_tokens: int = 96,
    theta: float = 0.9,
    dtype: str = "float32",
    threads: int = 2,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto (accelerate spreads the target).")] = "cpu",
    cpu_pack: Annotated[bool, typer.Option("--cpu-pack/--no-cpu-pack", help="Weights in oneDNN's layout.")] = False,
    model: Annotated[str | None, typer.Option(help="Target; the embedded one by default.")] = None,
    head: Annotated[str | None, typer.Option(help="Draft head; the embedded one by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for rows.jsonl and the table.")] = None,
    name: Annotated[str, typer.Option(help="Name of the table file.")] = "sweep",
) -> None:
    """Measure trees and rules on chat prompts."""
    shapes = {tree: parse_tree(tree) for tree in trees}
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    target, drafter = model or str(embedded_target_path()), head or str(embedded_head_path())
    ea = EaModel.from_pretrained(target, drafter, dtype=dtype, cpu_pack=cpu_pack, device_map=device)
    texts = read_prompts(prompts)[::every][:limit]
    ids = [ea.chat_ids(text) for text in texts]
    arms: dict[str, Decode] = {BASELINE: partial(_speculate, ea, None, None), GENERATE: partial(_generate, ea)}
    for tree, config in shapes.items():
        arms[f"exact {tree}"] = partial(_speculate, ea, config, VerifyConfig(rule="exact"))
        if theta < 1:
            arms[f"mars {tree}"] = partial(_speculate, ea, config, VerifyConfig(theta=theta))
    with progress(err, len(ids) * len(arms)) as advance:
        comparison = compare(ids, arms, max_new_tokens=max_new_tokens, on_result=lambda method, result: advance())
    rows = [summarise(comparison, name) for name in arms]
    differences = [
        {"method": name, "prompt": index, **first_difference(ea, ids[index], ours, base)}
        for name in arms
        if name.startswith(("exact", GENERATE))
        for index, (ours, base) in enumerate(zip(comparison.results[name], comparison.results[BASELINE], strict=True))
        if ours.token_ids != base.token_ids
    ]
    settings = {
        "prompts": len(ids),
        "max_new_tokens": max_new_tokens,
        "theta": theta,
        "dtype": dtype,
        "cpu_pack": cpu_pack,
        "target": Path(target).name,
        "head": Path(drafter).name,
    }
    source = provenance()
    text = markdown(settings, rows, differences, source)
    typer.echo(text)
    if out:
        append_row(out / "rows.jsonl", {**settings, "methods": rows, "differences": differences, "provenance": source})
        write_atomically(out / f"{name}.md", text)


def _speculate(
    ea: EaModel, draft: DraftConfig | None, verify: VerifyConfig | None, prompt: Sequence[int], limit: int
) -> GenerationResult:
    method: Method = "speculative" if verify else "autoregressive"
    return ea.generate(prompt, max_new_tokens=limit, draft=draft, verify=verify, method=method)


def _generate(ea: EaModel, prompt: Sequence[int], limit: int) -> GenerationResult:
    return hf_generate(ea.base_model, ea.tokenizer, prompt, limit, GENERATE)


def summarise(comparison: Comparison, name: str) -> dict[str, Any]:
    """One row of the table."""
    results = comparison.results[name]
    tokens, seconds = sum(r.new_tokens for r in results), sum(r.seconds for r in results)
    return {
        "method": name,
        "tau": round(comparison.tau(name), 3),
        "tok_per_s": round(tokens / seconds, 2),
        "speedup_vs_ar": round(comparison.speedup(name), 3),
        "speedup_vs_generate": round(comparison.speedup(name, GENERATE), 3),
        "tokens": tokens,
        "relaxed_per_1000": round(1000 * sum(r.relaxed for r in results) / tokens, 1),
        "identical_to_ar": comparison.identical(name),
    }


@torch.inference_mode()
def first_difference(
    ea: EaModel, prompt: Sequence[int], ours: GenerationResult, base: GenerationResult
) -> dict[str, Any]:
    """Where two greedy answers part, and how far apart the target's two best logits are there."""
    at = identical_prefix(ours, base)
    ids = torch.tensor([[*prompt, *base.token_ids[:at]]], device=ea.device)
    best = ea.base_model(ids, logits_to_keep=1).logits[0, -1].float().topk(2).values
    gap = float(best[0] - best[1])
    return {"position": at, "top2_gap": gap, "tie": gap < TIE}


def markdown(
    settings: dict[str, Any], rows: list[dict[str, Any]], differences: list[dict[str, Any]], source: dict[str, Any]
) -> str:
    """The table with what is needed to repeat it."""
    columns = list(rows[0])
    lines = [
        f"`{source['command']}`",
        "",
        ", ".join(f"{key} {value}" for key, value in settings.items()) + ".",
        f"{source['device']}, {source['threads']} threads, torch {source['packages']['torch']}, transformers "
        f"{source['packages']['transformers']}, commit {source['commit'][:10]}, {source['date']}.",
        "Speed-ups are medians of paired ratios of tokens per second, prefill included.",
        "",
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
        *("| " + " | ".join(str(row[column]) for column in columns) + " |" for row in rows),
    ]
    if differences:
        lines += ["", "Answers that part from the target's own, at the first difference:", ""]
        lines += [f"- {json.dumps(difference)}" for difference in differences]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    app()
