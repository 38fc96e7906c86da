"""The result tables of README.md, generated from docs/results: `python -m evaluation.readme` after new results.

A block between `<!-- results: NAME -->` and `<!-- end of results -->` is written by the function of that name; a test
fails when a block isn't what the results say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from eagle_mars.errors import ConfigError
from evaluation.metrics import Cell
from evaluation.provenance import write_atomically
from evaluation.table_result import FilledPart, FilledTable, markdown_rows, mean_cell
from evaluation.tables import MEAN

ROOT = Path(__file__).parents[1]
RESULTS = Path("docs") / "results"
_BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
_HELDOUT_PROMPTS = 40
_MOST_ROWS = 6
_FEWEST_QUESTIONS = 10
_SCORES = {"gsm8k flexible": "GSM8K", "sum ROUGE-L": "CNN/DM ROUGE-L", "wmt19 BLEU": "WMT19 BLEU", "wmt19 chrF": "chrF"}
_MEANS = {
    "tau": "tau",
    "relaxed per 1000": "relaxed per 1000",
    "regret per 1000": "nats of regret per 1000",
    "exact prefix": "tokens before the first relaxed one",
    "4-gram loops": "repeated 4-grams",
}


def rendered(text: str, root: Path = ROOT) -> str:
    """README's text with every block up to date. Raises ConfigError for a block of an unknown name."""

    def fill(block: re.Match[str]) -> str:
        if block[2] not in BLOCKS:
            raise ConfigError(f"README.md has a block of results {block[2]!r}; there are {', '.join(BLOCKS)}.")
        return f"{block[1]}{BLOCKS[block[2]](root / RESULTS)}\n{block[3]}"

    return _BLOCK.sub(fill, text)


def heldout(results: Path) -> str:
    """The newest run of `evaluation.sweep` over the held-out chat prompts."""
    lines = (results / "rows.jsonl").read_text("utf-8").splitlines()
    runs = [row for row in map(json.loads, lines) if row.get("prompts") == _HELDOUT_PROMPTS and "theta" in row]
    head = (
        "| method | tree (nodes) | tau | speed-up over plain decoding | over `generate` of transformers "
        "| relaxed per 1000 | answers identical |"
    )
    rows = [_heldout_row(row, runs[-1]) for row in runs[-1]["methods"] if row["method"].startswith(("exact", "mars"))]
    return "\n".join([head, "|---|---|---|---|---|---|---|", *rows])


def _heldout_row(row: dict[str, Any], run: dict[str, Any]) -> str:
    rule, tree = row["method"].split()
    name = f"`mars` θ = {run['theta']:g}" if rule == "mars" else f"`{rule}`"
    cells = [
        name,
        tree.split(",")[0],
        f"{row['tau']:.2f}",
        f"{row['speedup_vs_ar']:.2f}",
        f"{row['speedup_vs_generate']:.2f}",
        f"{row['relaxed_per_1000']:.0f}",
        f"{row['identical_to_ar']} of {run['prompts']}",
    ]
    return "| " + " | ".join(cells) + " |"


def relaxation(results: Path) -> str:
    """The study of relaxation, a row per temperature and arm: scores by task, what decoding did as means over tasks."""
    path = results / "tables" / "relaxation" / "table.json"
    table = FilledTable.model_validate_json(path.read_text("utf-8"))
    found: dict[tuple[float, str], dict[str, Cell]] = {}
    for part in table.parts:
        for filled in part.rows:
            row = found.setdefault((filled.row.temperature, filled.row.arm), {})
            row |= {f"{filled.row.task} {metric}": cell for metric, cell in filled.ours.items()}
    lines = ["| T | method | " + " | ".join([*_SCORES.values(), *_MEANS.values()]) + " |"]
    lines.append("|---|---|" + "---:|" * (len(_SCORES) + len(_MEANS)))
    for (temperature, arm), row in found.items():
        tasks = [part.rows[0].row.task for part in table.parts]
        cells = [row[name] for name in _SCORES] + [mean_cell([row[f"{t} {name}"] for t in tasks]) for name in _MEANS]
        shown = ["" if cell.value is None else f"{cell.value:.3g}" for cell in cells]
        lines.append(f"| {temperature:g} | {arm} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def reproduced(results: Path) -> str:
    """Our rows of every reproduced table, means over tasks where a table has them; a link alone where a part is long,
    or so small that its numbers say nothing."""
    blocks = []
    for path in sorted(results.glob("tables/*/table.json")):
        table = FilledTable.model_validate_json(path.read_text("utf-8"))
        if table.name == "relaxation":  # has a block of its own
            continue
        lines = [f"**[{table.title}](docs/results/tables/{table.name}/table.md)**", ""]
        reasons: dict[str, int] = {}
        for part in map(_ours, table.parts):
            if 0 < len(part.rows) <= _MOST_ROWS and part.rows[0].questions >= _FEWEST_QUESTIONS:
                lines += [*markdown_rows(part, reasons), ""]
        lines += [f"({number}) {reason}.  " for reason, number in reasons.items()]
        blocks.append("\n".join(lines).strip())
    return "\n\n".join(blocks) if blocks else "No table has been reproduced yet."


def _ours(part: FilledPart) -> FilledPart:
    """The rows that we ran; the means alone if there are means."""
    rows = [filled for filled in part.rows if any(cell.value is not None for cell in filled.ours.values())]
    means = [filled for filled in rows if filled.row.task == MEAN]
    return part.model_copy(update={"rows": tuple(means or rows)})


BLOCKS: dict[str, Callable[[Path], str]] = {
    "heldout": heldout,
    "relaxation": relaxation,
    "reproduced": reproduced,
}


def main(check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 when stale.")] = False) -> None:
    """Write README's result tables."""
    path = ROOT / "README.md"
    text = path.read_text("utf-8")
    fresh = rendered(text)
    if check and fresh != text:
        typer.echo("README.md is stale; run python -m evaluation.readme", err=True)
        raise typer.Exit(1)
    if not check:
        write_atomically(path, fresh)


if __name__ == "__main__":
    typer.run(main)
