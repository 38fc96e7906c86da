"""What a token costs behind prompts of growing length: `python -m evaluation.bench_context`.

For each length one prefill, in chunks; then, on its cache, cycles of `exact` and single tokens of the target alone. So
both are timed behind the same rows, and a long prompt is paid for once. The text doesn't matter for the cost of a
cycle, only for tau; it is made of the held-out prompts and their repetitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor
from transformers.utils import logging as hf_logging

from eagle_mars import EaModel, VerifyConfig
from eagle_mars.cli_options import one_sentence_errors
from eagle_mars.embedded import embedded_head_path, embedded_target_path
from eagle_mars.engine import Engine, Request, Speculation
from eagle_mars.prompts import read_prompts
from eagle_mars.render import progress
from eagle_mars.target import PREFILL_CHUNK, check_context
from evaluation.metrics import Cell
from evaluation.provenance import append_row, provenance, write_atomically
from evaluation.sweep import HELDOUT, parse_tree
from evaluation.table import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Cost:
    """Medians behind one prompt. tokens: its length. prefill, cycle, alone: seconds of the prompt, of a drafted cycle
    and of a token of the target alone."""

    tokens: int
    prefill: float
    cycle: float
    alone: float


@app.command()
@one_sentence_errors()
def main(
    lengths: Annotated[list[int] | None, typer.Argument(help="Prompt lengths in tokens.")] = None,
    cycles: Annotated[int, typer.Option(min=1, help="Timed cycles and timed tokens per length.")] = 8,
    tree: Annotated[str, typer.Option(help="chain-N, or total_token,depth,top_k.")] = "8,3,4",
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens per forward at most.")] = PREFILL_CHUNK,
    device: str = "cpu",
    threads: int = 2,
    cpu_pack: Annotated[bool, typer.Option("--cpu-pack/--no-cpu-pack", help="Weights in oneDNN's layout.")] = True,
    model: Annotated[str | None, typer.Option(help="Target; the embedded one by default.")] = None,
    head: Annotated[str | None, typer.Option(help="Draft head; the embedded one by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for context.jsonl, context.md and context.png.")] = None,
) -> None:
    """Time cycles and plain tokens behind long prompts."""
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    lengths = lengths or [256, 512, 1024, 2048, 4096, 8000]
    ea = EaModel.from_pretrained(
        model or str(embedded_target_path()),
        head or str(embedded_head_path()),
        dtype="float32",
        device_map=device,
        cpu_pack=cpu_pack,
        prefill_chunk=prefill_chunk,
    )
    draft = parse_tree(tree)
    request = Request(draft.levels * cycles + cycles + 1, draft, VerifyConfig(rule="exact"))  # no stop ids
    for length in lengths:
        check_context(ea.target, length, request.max_new_tokens)
    text = torch.tensor([ea.text_ids("\n\n".join(read_prompts(HELDOUT)))])
    measure(ea, _prompt(text, lengths[0]), request, cycles)  # warm-up
    costs = []
    with progress(Console(stderr=True), len(lengths)) as advance:
        for length in lengths:
            costs.append(measure(ea, _prompt(text, length), request, cycles))
            advance()
    settings = {"tree": tree, "cycles": cycles, "prefill_chunk": prefill_chunk, "cpu_pack": cpu_pack}
    source = provenance()
    shown = _markdown(costs, settings, source)
    typer.echo(shown)
    if out:
        rows = [asdict(cost) for cost in costs]
        append_row(out / "context.jsonl", {**settings, "costs": rows, "provenance": source})
        write_atomically(out / "context.md", shown)
        draw(costs).savefig(out / "context.png", dpi=110)


@torch.inference_mode()
def measure(ea: EaModel, prompt: Tensor, request: Request, cycles: int) -> Cost:
    """Median seconds behind prompt [1, L]. The first cycle feeds the prompt's last chunk to the head: not counted."""
    response = Speculation(Engine(ea.target, ea.ea_layer), prompt, request)
    prefill = response.prefill().seconds
    response.cycle()
    drafted = [response.cycle().seconds for _ in range(cycles)]
    token = response.root.unsqueeze(1)
    alone = []
    for _ in range(cycles + 1):
        started = perf_counter()
        token = ea.target.step(token, response.cache)[:, -1].argmax(-1, keepdim=True)
        token.tolist()  # on a GPU the clock has to wait for the token, as decoding does
        alone.append(perf_counter() - started)
    return Cost(prompt.shape[1], prefill, median(drafted), median(alone[1:]))


def _prompt(text: Tensor, length: int) -> Tensor:
    repeats = -(-length // text.shape[1])
    return text.repeat(1, repeats)[:, :length]


def _markdown(costs: Sequence[Cost], settings: dict[str, Any], source: dict[str, Any]) -> str:
    first = costs[0]
    rows = {
        str(cost.tokens): {
            "prefill, s": Cell(cost.prefill),
            "prefill, tokens/s": Cell(cost.tokens / cost.prefill),
            "cycle, ms": Cell(1e3 * cost.cycle),
            "token of the target alone, ms": Cell(1e3 * cost.alone),
            "cycle / token": Cell(cost.cycle / cost.alone),
            "cycle's growth, ms": Cell(1e3 * (cost.cycle - first.cycle)),
            "token's growth, ms": Cell(1e3 * (cost.alone - first.alone)),
        }
        for cost in costs
    }
    return "\n".join(
        [
            f"`{source['command']}`",
            "",
            ", ".join(f"{key} {value}" for key, value in settings.items()) + ", rule exact, T = 0, float32.",
            f"{source['device']}, {source['threads']} threads, commit {source['commit'][:10]}, {source['date']}.",
            "",
            markdown_table(rows, "prompt tokens"),
        ]
    )


def draw(costs: Sequence[Cost]) -> Figure:
    """Seconds of a cycle and of a token, and their ratio, over the prompt's length."""
    from matplotlib.figure import Figure  # only drawing needs it

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    tokens = [cost.tokens for cost in costs]
    left.plot(tokens, [1e3 * cost.cycle for cost in costs], "o-", color="#d55e00", label="cycle of exact")
    left.plot(tokens, [1e3 * cost.alone for cost in costs], "s-", color="#0072b2", label="token of the target alone")
    left.set(xlabel="prompt tokens", ylabel="milliseconds", ylim=(0, None))
    left.legend(frameon=False, fontsize=8)
    right.plot(tokens, [cost.cycle / cost.alone for cost in costs], "o-", color="#009e73")
    right.set(xlabel="prompt tokens", ylabel="cycle / token", ylim=(0, None))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    app()
