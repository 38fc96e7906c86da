"""Where a cycle's time goes: `python -m evaluation.profile_cycle`.

Decodes a few prompts with `exact` and adds up what each part of the cycle takes. Parts are timed by wrapping them, so
the engine runs as it is. Prints milliseconds per cycle for each way of keeping the weights, beside plain decoding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from eagle_mars import DraftConfig, EaModel, VerifyConfig
from eagle_mars import engine as engine_module
from eagle_mars import verify as verify_module
from eagle_mars.cache import TreeCache
from eagle_mars.draft.drafter import Drafter
from eagle_mars.embedded import embedded_head_path, embedded_target_path
from eagle_mars.engine import Speculation
from eagle_mars.prompts import read_prompts
from eagle_mars.target import TargetModel
from eagle_mars.tuning.costs import Clock
from evaluation.forward_cost import LAYOUTS
from evaluation.metrics import Cell
from evaluation.provenance import append_row, provenance
from evaluation.sweep import HELDOUT, parse_tree
from evaluation.table import markdown_table
from evaluation.timing import begin

CYCLE, PLAIN = "whole cycle", "plain decoding, per token"
PARTS: dict[str, tuple[Any, str]] = {
    CYCLE: (Speculation, "cycle"),
    "draft: accepted rows": (Drafter, "extend"),
    "draft: tree": (Drafter, "grow"),
    "target": (TargetModel, "forward_tree"),
    "verify": (verify_module, "verify_reference"),
    "read and unpack": (engine_module, "unpack"),
    "commit": (TreeCache, "commit"),
    "bookkeeping": (Speculation, "absorb"),
}


def main(
    tree: Annotated[str, typer.Option(help="chain-N, or total_token,depth,top_k.")] = "8,3,4",
    every: Annotated[int, typer.Option(help="Use every n-th held-out prompt.")] = 13,
    max_new_tokens: int = 40,
    threads: int = 2,
    cpu_time: Annotated[bool, typer.Option("--cpu-time", help="One thread's CPU seconds, for a busy machine.")] = False,
    layouts: Annotated[list[str], typer.Option(help="Repeatable.")] = ["float32 packed", "float16 packed"],  # noqa: B006
    model: Annotated[str | None, typer.Option(help="Target; the embedded one by default.")] = None,
    head: Annotated[str | None, typer.Option(help="Draft head; the embedded one by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for profile.jsonl.")] = None,
) -> None:
    """Time the parts of a cycle."""
    clock = begin(threads, cpu_time)
    columns: dict[str, dict[str, float]] = {}
    for name in layouts:
        ea = EaModel.from_pretrained(
            model or str(embedded_target_path()), head or str(embedded_head_path()), **LAYOUTS[name]
        )
        prompts = [ea.chat_ids(text) for text in read_prompts(HELDOUT)[::every]]
        columns[name] = profile(ea, prompts, parse_tree(tree), max_new_tokens, clock)
    source = provenance()
    rows = {part: {name: Cell(1000 * columns[name][part]) for name in columns} for part in [*PARTS, PLAIN]}
    typer.echo(f"`{source['command']}`, commit {source['commit'][:10]}, {source['cpu']}\n")
    typer.echo(markdown_table(rows, "ms"))
    if out:
        append_row(out / "profile.jsonl", {"tree": tree, "cpu_time": cpu_time, "s": columns, "provenance": source})


def profile(
    ea: EaModel, prompts: Sequence[Sequence[int]], draft: DraftConfig, limit: int, clock: Clock
) -> dict[str, float]:
    """Seconds per cycle of each part, and per token of plain decoding."""
    exact = VerifyConfig(rule="exact")
    ea.generate(prompts[0], max_new_tokens=min(limit, 12), draft=draft, verify=exact)  # warms up
    with timed(clock) as spent:
        results = [ea.generate(prompt, max_new_tokens=limit, draft=draft, verify=exact) for prompt in prompts]
    cycles = sum(result.cycles for result in results)
    seconds = {part: spent[part] / cycles for part in PARTS}
    started = clock()
    plain = [ea.generate(prompt, max_new_tokens=limit, method="autoregressive") for prompt in prompts]
    return {**seconds, PLAIN: (clock() - started) / sum(result.new_tokens for result in plain)}


@contextmanager
def timed(clock: Clock) -> Iterator[dict[str, float]]:
    """Seconds by part of what happens meanwhile."""
    spent: dict[str, float] = defaultdict(float)

    def wrap(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*arguments: Any, **keywords: Any) -> Any:
            started = clock()
            try:
                return function(*arguments, **keywords)
            finally:
                spent[part] += clock() - started

        return timed_call

    with ExitStack() as stack:
        for part, (owner, name) in PARTS.items():
            own = getattr(owner, name)
            setattr(owner, name, wrap(part, own))
            stack.callback(setattr, owner, name, own)
        yield spent


if __name__ == "__main__":
    typer.run(main)
