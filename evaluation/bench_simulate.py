"""Predictions of `evaluation.simulate` beside what runs measure: `python scripts/simulate.py check`.

One process: logged runs with whole candidate pools, the clock, then every configuration end to end, interleaved with
the target alone prompt by prompt. Speeds are of decoding, prefill apart, since that is what the prediction is about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers.utils import logging as hf_logging

from eagle_mars import DraftConfig, EaModel, GenerationResult, VerifyConfig
from eagle_mars.cli_options import one_sentence_errors
from eagle_mars.embedded import embedded_head_path, embedded_target_path
from eagle_mars.engine import Engine, Request
from eagle_mars.errors import ConfigError
from eagle_mars.prompts import read_prompts
from eagle_mars.render import progress
from eagle_mars.tuning.costs import draft_cost, target_seconds
from eagle_mars.tuning.replay import Recording
from evaluation.metrics import Cell
from evaluation.nodes import decode
from evaluation.provenance import append_row, provenance, write_atomically
from evaluation.simulate import Acceptance, Clock, pool
from evaluation.sweep import HELDOUT, parse_tree
from evaluation.table import markdown_table

CONFIGURATIONS = ("exact:8,3,4", "exact:20,3,4", "exact:chain-3", "mars:8,3,4", "mars:12,3,4")
ALONE = "alone"
_SIZES = (1, 2, 4, 6, 8, 12, 16, 20, 26, 40)


@dataclass(frozen=True)
class Arm:
    """A tree under a rule, `RULE:TREE` on the command line."""

    rule: str
    draft: DraftConfig

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Raises ConfigError for anything else."""
        rule, _, tree = text.partition(":")
        if rule not in ("exact", "mars") or not tree:
            raise ConfigError(f"{text!r} is no configuration; write exact:TREE or mars:TREE, such as mars:8,3,4.")
        return cls(rule, parse_tree(tree))

    @property
    def verify(self) -> VerifyConfig:
        return VerifyConfig(rule="exact") if self.rule == "exact" else VerifyConfig()

    @property
    def logged(self) -> tuple[str, int, int]:
        """What tells the log that this arm is predicted from: rule, depth and beam of its pool."""
        return self.rule, self.draft.depth, self.draft.top_k


@one_sentence_errors()
def main(
    configurations: Annotated[list[str] | None, typer.Argument(help="exact:TREE or mars:TREE; several.")] = None,
    prompts: Annotated[Path, typer.Option(help="question.jsonl or one prompt a line.")] = HELDOUT,
    every: Annotated[int, typer.Option(help="Use every n-th prompt.")] = 7,
    max_new_tokens: int = 40,
    threads: int = 2,
    cpu_pack: Annotated[bool, typer.Option("--cpu-pack/--no-cpu-pack", help="Weights in oneDNN's layout.")] = True,
    model: Annotated[str | None, typer.Option(help="Target; the embedded one by default.")] = None,
    head: Annotated[str | None, typer.Option(help="Draft head; the embedded one by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for simulate.jsonl and simulate.md.")] = None,
) -> None:
    """Predict, run, compare."""
    arms = {text: Arm.parse(text) for text in configurations or CONFIGURATIONS}
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    ea = EaModel.from_pretrained(
        model or str(embedded_target_path()), head or str(embedded_head_path()), dtype="float32", cpu_pack=cpu_pack
    )
    ids = [torch.tensor([ea.chat_ids(text)]) for text in read_prompts(prompts)[::every]]
    logs = {arm.logged: _log(ea, ids, arm, max_new_tokens) for arm in {a.logged: a for a in arms.values()}.values()}
    runs = _run(ea, ids, arms, max_new_tokens)
    clocks = {arm.draft.top_k: measure_clock(ea, ids[0], arm.draft, max_new_tokens) for arm in arms.values()}
    rows = {
        name: _row(arm, logs[arm.logged], clocks[arm.draft.top_k], runs[name], runs[ALONE])
        for name, arm in arms.items()
    }
    settings = {"prompts": len(ids), "max_new_tokens": max_new_tokens, "cpu_pack": cpu_pack}
    source = provenance()
    shown = "\n".join(
        [
            f"`{source['command']}`",
            "",
            ", ".join(f"{key} {value}" for key, value in settings.items()) + ", float32, T = 0.",
            f"{source['device']}, {source['threads']} threads, commit {source['commit'][:10]}, {source['date']}.",
            "",
            markdown_table(rows, "rule:tree"),
        ]
    )
    typer.echo(shown)
    if out:
        plain = {name: {column: cell.value for column, cell in row.items()} for name, row in rows.items()}
        append_row(out / "simulate.jsonl", {**settings, "configurations": plain, "provenance": source})
        write_atomically(out / "simulate.md", shown)


def _log(ea: EaModel, ids: Sequence[torch.Tensor], arm: Arm, limit: int) -> Acceptance:
    log = Acceptance()
    shape = pool(arm.draft.depth, arm.draft.top_k)
    request = Request(limit, shape, arm.verify, stop_ids=ea.stop_ids, special_ids=ea.special_ids)
    for prompt in ids:
        decode(ea, prompt, request, log)
    return log


def _run(
    ea: EaModel, ids: Sequence[torch.Tensor], arms: Mapping[str, Arm], limit: int
) -> dict[str, list[GenerationResult]]:
    """Results by arm, those of the target alone among them, prompt by prompt."""
    options: dict[str, dict[str, Any]] = {ALONE: {"method": "autoregressive"}}
    options |= {name: {"draft": arm.draft, "verify": arm.verify} for name, arm in arms.items()}
    results: dict[str, list[GenerationResult]] = {name: [] for name in options}
    with progress(Console(stderr=True), len(ids) * len(options)) as advance:
        for prompt in ids:
            for name, chosen in options.items():
                results[name].append(ea.generate(prompt, max_new_tokens=limit, **chosen))
                advance()
    return results


def measure_clock(ea: EaModel, prompt: torch.Tensor, draft: DraftConfig, limit: int) -> Clock:
    """Times behind a prompt [1, L] and the target's answer to it."""
    steps = list(Engine(ea.target).autoregress(prompt, Request(limit)))
    ids = torch.cat((prompt, torch.tensor([[token for step in steps for token in step.tokens]])), dim=1)
    out = ea.target.prefill(ids, ea.target.new_cache(1, ids.shape[1]), features=ea.ea_layer.capture_layers is not None)
    recording = Recording(ids, out.features, prompt.shape[1])
    drafting = draft_cost(ea.ea_layer, recording, max(draft.depth, 1), draft.top_k)
    forward = target_seconds(ea.target, ids, _SIZES)
    return Clock(median(step.seconds for step in steps[1:]), forward, drafting.first, drafting.expansion)


def _row(
    arm: Arm, log: Acceptance, clock: Clock, run: Sequence[GenerationResult], alone: Sequence[GenerationResult]
) -> dict[str, Cell]:
    tau = log.tau(arm.draft)
    predicted = clock.speedup(arm.draft, tau)
    measured = median(
        (one.decode_seconds / (one.new_tokens - 1)) / (r.decode_seconds / (r.new_tokens - 1))
        for one, r in zip(alone, run, strict=True)
    )
    return {
        "tau, predicted": Cell(tau),
        "tau": Cell(1 + fmean(n for result in run for n in result.accepted_lengths)),
        "cycle, predicted, ms": Cell(1e3 * clock.cycle(arm.draft)),
        "speed-up, predicted": Cell(predicted),
        "speed-up": Cell(measured),
        "predicted / measured": Cell(predicted / measured),
    }
