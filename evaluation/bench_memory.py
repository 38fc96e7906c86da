"""Whether memory stays flat, and whether its peak is the computed one: `python -m evaluation.bench_memory`.

Many short answers in one process: resident memory and live tensors after each of them. Then one answer behind a long
prompt: the peak of resident memory against `eagle_mars.memory`. Linux only: the numbers are the kernel's.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers.utils import logging as hf_logging

from eagle_mars import EaModel, VerifyConfig
from eagle_mars.cli_options import one_sentence_errors
from eagle_mars.embedded import EMBEDDED_DRAFT, embedded_head_path, embedded_target_path
from eagle_mars.memory import Memory, TargetSize, memory
from eagle_mars.prompts import read_prompts
from eagle_mars.render import progress
from evaluation.metrics import Cell
from evaluation.provenance import append_row, provenance, write_atomically
from evaluation.sweep import HELDOUT
from evaluation.table import markdown_table

_MIB = 2**20
_EVERY = 10  # answers from one look to the next: counting tensors takes longer than a short answer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@one_sentence_errors()
def main(
    answers: Annotated[int, typer.Option(min=2, help="Short answers in a row.")] = 200,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Of each of them.")] = 6,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the long prompt.")] = 3000,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens per forward at most.")] = 512,
    threads: int = 1,
    model: Annotated[str | None, typer.Option(help="Target; the embedded one by default.")] = None,
    head: Annotated[str | None, typer.Option(help="Draft head; the embedded one by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for memory.jsonl and memory.md.")] = None,
) -> None:
    """Watch the memory of a pair on the CPU, without packed weights: those are a second copy."""
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    empty = resident()
    ea = EaModel.from_pretrained(
        model or str(embedded_target_path()),
        head or str(embedded_head_path()),
        **EMBEDDED_DRAFT.model_dump(),
        dtype="float32",
        prefill_chunk=prefill_chunk,
    )
    verify = VerifyConfig(rule="exact")
    prompts = [ea.chat_ids(text) for text in read_prompts(HELDOUT)[:10]]
    seen: dict[int, tuple[int, int]] = {}
    with progress(Console(stderr=True), answers) as advance:
        for index in range(answers):
            ea.generate(prompts[index % len(prompts)], max_new_tokens=max_new_tokens, verify=verify)
            if index % _EVERY == _EVERY - 1 or index == answers - 1:
                seen[index + 1] = resident(), live_tensors()
            advance()
    text = torch.tensor(ea.text_ids("\n\n".join(read_prompts(HELDOUT))))
    long = text.repeat(-(-prompt_tokens // len(text)))[:prompt_tokens]
    forget_peak()
    ea.generate(long, max_new_tokens=32, verify=verify)
    measured = peak() - empty
    computed = memory(
        TargetSize.of(ea.config),
        sum(parameter.numel() for parameter in ea.ea_layer.parameters()),
        ea.draft,
        prompt_tokens,
        32,
        number=4,
        prefill_chunk=prefill_chunk,
    )
    settings = {"answers": answers, "prompt_tokens": prompt_tokens, "prefill_chunk": prefill_chunk}
    source = provenance()
    shown = _markdown(seen, measured, computed, settings, source)
    typer.echo(shown)
    if out:
        row = {"resident": [r for r, _ in seen.values()], "tensors": [t for _, t in seen.values()], "peak": measured}
        append_row(out / "memory.jsonl", {**settings, **row, "computed": computed.peak, "provenance": source})
        write_atomically(out / "memory.md", shown)


def resident() -> int:
    """Bytes of this process in memory."""
    return _status("VmRSS")


def peak() -> int:
    """The most bytes of this process in memory since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def live_tensors() -> int:
    """Tensors that something refers to."""
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name))) * 1024


def _markdown(
    seen: dict[int, tuple[int, int]], measured: int, computed: Memory, settings: dict[str, Any], source: dict[str, Any]
) -> str:
    flat = {
        str(answers): {"resident, MiB": Cell(rss / _MIB), "live tensors": Cell(float(count))}
        for answers, (rss, count) in seen.items()
    }
    parts = {
        name: {"MiB": Cell(getattr(computed, name) / _MIB)}
        for name in ("weights", "head", "cache", "head_cache", "prefill", "tree")
    }
    total = {
        "computed peak": {"MiB": Cell(computed.peak / _MIB)},
        "measured peak": {"MiB": Cell(measured / _MIB)},
        "computed / measured": {"MiB": Cell(computed.peak / measured)},
    }
    return "\n".join(
        [
            f"`{source['command']}`",
            "",
            ", ".join(f"{key} {value}" for key, value in settings.items()) + ", float32, rule exact, T = 0.",
            f"{source['device']}, {source['threads']} threads, commit {source['commit'][:10]}, {source['date']}.",
            "",
            markdown_table(flat, "after answers"),
            "Behind the long prompt, over the process before loading:",
            "",
            markdown_table({**parts, **total}, "part"),
        ]
    )


if __name__ == "__main__":
    app()
