"""What decoding together gains: `python -m evaluation.bench_batch`.

The same prompts with batches of several sizes, by a rule and by the target alone, all in one process, interleaved
round by round; texts are compared with those of size 1. Prints tokens per second of the whole job, the ratio to size 1,
and the ratio to the target alone at the same size: what drafting is worth when others fill the forward as well.
"""

from __future__ import annotations

from itertools import product
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
    every = sorted({1, *sizes})
    drafted, alone = Timings(every), Timings(every)
    arms: list[tuple[Timings, dict[str, Any]]] = [
        (drafted, {"draft": parse_tree(tree), "verify": verify}),
        (alone, {"method": "autoregressive"}),
    ]
    for _, options in arms:
        ea.generate_many(ids[:2], batch_size=2, max_new_tokens=max_new_tokens, **options)  # warm-up
    with progress(Console(stderr=True), rounds * len(every) * len(arms)) as advance:
        for _ in range(rounds):
            for size, (timings, options) in product(every, arms):
                started = perf_counter()
                results = ea.generate_many(ids, batch_size=size, max_new_tokens=max_new_tokens, **options)
                timings.seconds[size].append(perf_counter() - started)
                timings.texts[size] = [result.token_ids for result in results]
                advance()
    rows = {str(size): summarise(size, drafted, alone) for size in every}
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


class Timings:
    """What one way of decoding took at each batch size. seconds: of whole jobs, prefill included, one per round."""

    def __init__(self, sizes: list[int]) -> None:
        self.seconds: dict[int, list[float]] = {size: [] for size in sizes}
        self.texts: dict[int, list[tuple[int, ...]]] = {}

    def speeds(self, size: int) -> list[float]:
        """Tokens per second, one per round."""
        return [sum(map(len, self.texts[size])) / seconds for seconds in self.seconds[size]]

    def equal_texts(self, size: int) -> int:
        """Prompts whose text is that of size 1."""
        return sum(a == b for a, b in zip(self.texts[size], self.texts[1], strict=True))


def summarise(size: int, drafted: Timings, alone: Timings) -> dict[str, Cell]:
    """One row; ratios are medians over rounds."""
    return {
        "tokens per second": Cell(median(drafted.speeds(size))),
        "against size 1": Cell(_ratio(drafted.speeds(size), drafted.speeds(1))),
        "target alone": Cell(median(alone.speeds(size))),
        "target alone, against size 1": Cell(_ratio(alone.speeds(size), alone.speeds(1))),
        "speed-up over the target alone": Cell(_ratio(drafted.speeds(size), alone.speeds(size))),
        "texts equal to size 1": Cell(float(drafted.equal_texts(size))),
        "target alone, texts equal": Cell(float(alone.equal_texts(size))),
        "tokens": Cell(float(sum(map(len, drafted.texts[size])))),
    }


def _ratio(ours: list[float], base: list[float]) -> float:
    return median(a / b for a, b in zip(ours, base, strict=True))


if __name__ == "__main__":
    typer.run(main)
