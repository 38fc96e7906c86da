"""How results look in a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from eagle_mars.compare import BASELINE, Comparison, identical_prefix
from eagle_mars.result import GenerationResult, Provenance

STYLES: dict[Provenance, str] = {"exact": "green", "relaxed": "bold black on yellow", "target": ""}
_SHOWN_TEXTS = 3


def coloured(result: GenerationResult) -> Text:
    """The text, drafted tokens coloured by how they were accepted."""
    return Text.assemble(*((text, STYLES[provenance]) for text, provenance in result.pieces))


def comparison(console: Console, prompts: Sequence[str], compared: Comparison) -> None:
    """Texts of the first prompts, then one table over all of them."""
    summary = compared.summary()
    for index, prompt in enumerate(prompts[:_SHOWN_TEXTS]):
        console.print(Panel(Text(prompt), title="prompt", title_align="left", style="bold"))
        base = compared.results[BASELINE][index]
        for method, results in compared.results.items():
            result = results[index]
            note = f"{result.tokens_per_second:.1f} tok/s"
            if method != BASELINE:
                same = identical_prefix(result, base)
                whole = result.token_ids == base.token_ids
                note += f" · tau {result.tau:.2f} · " + (
                    "identical to ar" if whole else f"first {same} of {result.new_tokens} tokens identical to ar"
                )
            console.print(Panel(coloured(result), title=f"{method} · {note}", title_align="left"))
    legend = Text.assemble(
        ("drafted, accepted exactly", STYLES["exact"]), "  ", ("drafted, relaxed", STYLES["relaxed"]), "  by the target"
    )
    console.print(legend)
    table = Table(title=f"{summary['prompts']} prompt(s), paired in one process")
    for column in ("method", "tokens", "seconds", "tok/s", "speed-up", "tau", "relaxed", "identical to ar"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method, row in summary["methods"].items():
        speedup = summary["speedup_vs_ar"].get(method)
        same = summary["identical_to_ar"].get(method)
        table.add_row(
            method,
            str(row["tokens"]),
            f"{row['seconds']:.2f}",
            f"{row['tok_per_s']:.1f}",
            f"{speedup:.2f}x" if speedup else "1.00x",
            f"{row['tau']:.2f}",
            str(row["relaxed"]),
            "" if same is None else f"{same}/{summary['prompts']}",
        )
    console.print(table)
    for method, results in compared.results.items():
        console.print(f"[bold]{method}[/bold]: {results[0].guarantee}", highlight=False)


def result_json(result: GenerationResult) -> dict[str, Any]:
    """A response as plain values, the derived counts included."""
    derived = ("new_tokens", "cycles", "tau", "relaxed", "exact_prefix_tokens", "seconds", "tokens_per_second")
    return {**asdict(result), **{name: getattr(result, name) for name in derived}}


def facts(console: Console, values: dict[str, Any]) -> None:
    """A table of names and values."""
    table = Table(show_header=False, box=None)
    for name, value in values.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {inner or 'not installed'}" for key, inner in value.items())
        elif isinstance(value, list):
            value = ", ".join(value)
        table.add_row(f"[bold]{name}[/bold]", Text(str(value)))
    console.print(table)


@contextmanager
def progress(console: Console, total: int) -> Iterator[Callable[[], None]]:
    """A bar on `console`; yields the function that moves it by one."""
    columns = (TextColumn("decoding"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("decoding", total=total)
        yield lambda: bar.advance(task)
