"""What decoding together gains: `python -m evaluation.bench_batch`.

The same prompts with batches of several sizes, all in one process, sizes interleaved round by round; texts are compared
with those of size 1. Prints tokens per second of the whole job and the ratio to size 1.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers.utils import logging as hf_logging

from eagle_mars import EaModel, VerifyConfig
from eagle_mars.embedded import embedded_head_path, embedded_target_path
from eagle_mars.prompts import read_prompts
from eagle_mars.render import progress
from evaluation.metrics import Cell
from evaluation.provenance import append_row, provenance, write_atomically
from evaluation.sweep import HELDOUT, parse_tree
from evaluation.table import markdown_table


def main(
    prompts: Annotated[Path, typer.Option(help="question.jsonl or one prompt a line.")] = HELDOUT,
    limit: Annotated[int, typer.Option(help="First N prompts.")] = 16,
    max_new_tokens: int = 48,
    sizes: Annotated[list[int], typer.Option(help="Batch sizes beside 1; repeatable.")] = [2, 4, 8],  # noqa: B006
    tree: Annotated[str, typer.Option(help="chain-N, or total_token,depth,top_k.")] = "8,3,4",
    rule: Annotated[str, typer.Option(help="exact or mars (theta .9).")] = "exact",
    rounds: Annotated[int, typer.Option(help="Repetitions of everything; medians are shown.")] = 3,
    threads: int = 2,
    cpu_pack: Annotated[bool, typer.Option("--cpu-pack/--no-cpu-pack", help="Weights in oneDNN's layout.")] = True,
    model: Annotated[str | None, typer.Option(help="Target; the embedded one by default.")] = None,
    head: Annotated[str | None, typer.Option(help="Draft head; the embedded one by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for batch.jsonl and batch.md.")] = None,
) -> None:
    """Time whole jobs of many prompts."""
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    ea = EaModel.from_pretrained(
        model or str(embedded_target_path()), head or str(embedded_head_path()), dtype="float32", cpu_pack=cpu_pack
    )
    ids = [ea.chat_ids(text) for text in read_prompts(prompts)[:limit]]
    verify = VerifyConfig(rule="exact") if rule == "exact" else VerifyConfig(theta=0.9)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "draft": parse_tree(tree), "verify": verify}
    ea.generate_many(ids[:2], batch_size=2, **options)  # warm-up
    every = sorted({1, *sizes})
    seconds: dict[int, list[float]] = {size: [] for size in every}
    texts: dict[int, list[tuple[int, ...]]] = {}
    with progress(Console(stderr=True), rounds * len(every)) as advance:
        for _ in range(rounds):
            for size in every:
                started = perf_counter()
                results = ea.generate_many(ids, batch_size=size, **options)
                seconds[size].append(perf_counter() - started)
                texts[size] = [result.token_ids for result in results]
                advance()
    rows = {str(size): summarise(seconds[size], texts[size], seconds[1], texts[1]) for size in every}
    settings = {"prompts": len(ids), "max_new_tokens": max_new_tokens, "tree": tree, "rule": rule, "rounds": rounds}
    source = provenance()
    text = "\n".join(
        [
            f"`{source['command']}`",
            "",
            ", ".join(f"{key} {value}" for key, value in settings.items()) + ", T = 0, float32.",
            f"{source['device']}, {source['threads']} threads, commit {source['commit'][:10]}, {source['date']}.",
            "",
            markdown_table(rows, "batch size"),
        ]
    )
    typer.echo(text)
    if out:
        plain = {size: {name: cell.value for name, cell in row.items()} for size, row in rows.items()}
        append_row(out / "batch.jsonl", {**settings, "sizes": plain, "provenance": source})
        write_atomically(out / "batch.md", text)


def summarise(
    seconds: list[float], texts: list[tuple[int, ...]], base: list[float], single: list[tuple[int, ...]]
) -> dict[str, Cell]:
    """One row: of whole jobs, prefill included; the ratio is the median over rounds."""
    tokens, base_tokens = sum(map(len, texts)), sum(map(len, single))
    ratios = [tokens / own / (base_tokens / other) for own, other in zip(seconds, base, strict=True)]
    return {
        "tokens per second": Cell(tokens / median(seconds)),
        "against size 1": Cell(median(ratios)),
        "texts equal to size 1": Cell(float(sum(a == b for a, b in zip(texts, single, strict=True)))),
        "tokens": Cell(float(tokens)),
    }


if __name__ == "__main__":
    typer.run(main)
