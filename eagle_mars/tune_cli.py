"""`eagle-mars tune`: which draft tree pays on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from eagle_mars.cli_options import (
    CpuPack,
    Device,
    Dtype,
    Head,
    Json,
    Model,
    Threads,
    err,
    load,
    one_sentence_errors,
)

if TYPE_CHECKING:
    from eagle_mars.tuning.tuner import Tuning


def tune(
    prompts: Annotated[Path | None, typer.Option(help="question.jsonl or one prompt a line; some by default.")] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again what was measured before.")] = False,
    model: Model = None,
    head: Head = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    cpu_pack: CpuPack = None,
    as_json: Json = False,
) -> None:
    """Measure acceptance and forward times, print the best trees; --total-token -1 takes the first one from then on."""
    with one_sentence_errors():
        from eagle_mars.prompts import read_prompts
        from eagle_mars.tuning.store import store_path

        ea = load(model, head, dtype, device, threads, cpu_pack, {})
        chat = ea.tokenizer.chat_template is not None
        texts = [ea.chat_ids(text) if chat else text for text in read_prompts(prompts)] if prompts else None
        with err.status("measuring: about a minute"):
            found = ea.tune(texts, refresh=refresh)
    if as_json:
        typer.echo(found.model_dump_json())
        return
    Console().print(shown(found))
    err.print(f"[dim]kept in {store_path()}[/dim]", highlight=False)


def shown(found: Tuning) -> Table:
    """The best tree of each size, best first, and plain decoding to compare with."""
    table = Table("nodes", "depth", "top_k", "tau", "draft ms", "target ms", "tokens/s", "over plain")
    plain = found.plain_tokens_per_second
    for tree in found.candidates:
        speed = tree.tokens_per_second
        table.add_row(
            *(str(number) for number in (tree.total_token, tree.depth, tree.top_k)),
            f"{tree.tau:.2f}",
            f"{tree.draft_ms:.1f}",
            f"{tree.target_ms:.1f}",
            f"{speed:.1f}",
            f"{speed / plain:.2f}",
        )
    table.add_row("1", "", "", "1.00", "", f"{1000 / plain:.1f}", f"{plain:.1f}", "1.00")
    return table
