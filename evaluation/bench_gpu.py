"""End-to-end rows and the synchronisation check of `scripts/gpu_checks.sh`: `python -m evaluation.bench_gpu OUT`.

For a tiny random pair (nothing but launches and Python) and the embedded one: tokens per second of the target alone,
`exact` and `mars`, and how often a cycle makes the host wait for the device; each without and with CUDA graphs
(`eagle_mars.compiled`).
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers.utils import logging as hf_logging

from eagle_mars import DraftConfig, EaModel, VerifyConfig
from eagle_mars.cli_options import one_sentence_errors
from eagle_mars.embedded import embedded_head_path, embedded_target_path
from eagle_mars.engine import Engine, Request, Speculation
from evaluation.metrics import Cell
from evaluation.provenance import append_row, provenance, write_atomically
from evaluation.sweep import parse_tree
from evaluation.table import markdown_table

_PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle."
_EXACT = VerifyConfig(rule="exact")
_CYCLES = 20

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@one_sentence_errors()
def main(
    out: Annotated[Path, typer.Argument(help="Directory for end_to_end.jsonl and end_to_end.md.")],
    device: str = "cuda",
    dtype: str = "bfloat16",
    tree: Annotated[str, typer.Option(help="chain-N, or total_token,depth,top_k.")] = "26,4,8",
    max_new_tokens: int = 128,
    pairs: Annotated[list[str], typer.Option(help="tiny, embedded; repeatable.")] = ["tiny", "embedded"],  # noqa: B006
) -> None:
    """Measure on the device and write the rows."""
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    draft = parse_tree(tree)
    rows: dict[str, dict[str, Cell]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for pair in pairs:
            target, head = _paths(pair, Path(directory))
            for name, compiled in {pair: False, f"{pair}, graphs": True}.items():
                ea = EaModel.from_pretrained(
                    target, head, **draft.model_dump(), dtype=dtype, device_map=device, compile=compiled
                )
                rows[name] = measure(ea, draft, max_new_tokens)
    source = provenance()
    shown = f"`{source['command']}`\n\n{source['device']}, {source['date']}.\n\n{markdown_table(rows, 'pair')}"
    typer.echo(shown)
    plain = {name: {column: cell.value for column, cell in row.items()} for name, row in rows.items()}
    append_row(out / "end_to_end.jsonl", {"rows": plain, "tree": tree, "dtype": dtype, "provenance": source})
    write_atomically(out / "end_to_end.md", shown)


def measure(ea: EaModel, draft: DraftConfig, max_new_tokens: int) -> dict[str, Cell]:
    """One row: speeds after a warm-up, and waits of the host per cycle."""
    prompt = ea.text_ids(_PROMPT)
    arms: dict[str, dict[str, Any]] = {
        "alone": {"method": "autoregressive"},
        "exact": {"verify": _EXACT},
        "mars": {"verify": VerifyConfig()},
    }
    row, results = {}, {}
    for name, options in arms.items():
        for _ in range(2):  # the first one warms up
            results[name] = ea.generate(prompt, max_new_tokens=max_new_tokens, **options)
        row[f"{name}, tokens/s"] = Cell(results[name].tokens_per_second)
    row["tau of exact"] = Cell(results["exact"].tau)
    row["exact equals alone"] = Cell(float(results["exact"].token_ids == results["alone"].token_ids))
    row["waits a cycle"] = waits_per_cycle(ea, torch.tensor([prompt]), draft)
    return row


def waits_per_cycle(ea: EaModel, prompt: torch.Tensor, draft: DraftConfig) -> Cell:
    """Device synchronisations that torch notices in a cycle; the read of the verdict is one of them."""
    if ea.device.type != "cuda":
        return Cell.empty("only a GPU runs behind the host's back")
    response = Speculation(Engine(ea.target, ea.ea_layer), prompt, Request(10_000, draft, _EXACT))
    response.prefill()
    response.cycle()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(_CYCLES):
                response.cycle()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return Cell(sum("synchroniz" in str(warning.message) for warning in caught) / _CYCLES)


def _paths(pair: str, directory: Path) -> tuple[str, str]:
    if pair == "embedded":
        return str(embedded_target_path()), str(embedded_head_path())
    from tests.tiny_pair import save_pair  # of the repository, as this module is

    return save_pair(directory / pair)


if __name__ == "__main__":
    app()
