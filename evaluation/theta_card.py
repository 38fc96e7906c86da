"""A margin for your own prompts and pair: `python -m evaluation.theta_card --prompts question.jsonl`.

One strict run is logged, every θ, gap and other rule is replayed on it offline, and the margin with the most tokens per
cycle inside a budget of regret is confirmed by a paired run. Writes a JSON card and a short Markdown one beside it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers.utils import logging as hf_logging

from eagle_mars.cli_options import one_sentence_errors
from eagle_mars.config import Margin
from eagle_mars.draft.files import find_checkpoint
from eagle_mars.prompts import read_prompts
from eagle_mars.render import progress
from evaluation.calibration import (
    Prediction,
    Setup,
    best_logits,
    choose,
    confirm,
    equivalents,
    predict,
    rejections,
    replay,
)
from evaluation.metrics import Cell
from evaluation.models import Conversations, ModelConfig, load_pair, read_model_config
from evaluation.provenance import checkpoint_identity, provenance, write_atomically
from evaluation.sweep import HELDOUT

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    prompts: Annotated[Path, typer.Option(help="question.jsonl or one prompt a line; yours.")] = HELDOUT,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first N prompts.")] = None,
    model: Annotated[str, typer.Option(help="Name in configs/models, or a YAML file.")] = "smollm2",
    margin: Annotated[Margin, typer.Option(help="logit-ratio calibrates θ, logit-gap a gap in nats.")] = "logit-gap",
    budget: Annotated[float, typer.Option(min=0, help="Predicted regret at most, nats per token.")] = 0.05,
    tolerance: Annotated[float, typer.Option(min=0, help="Loss of mean log-probability that is acceptable.")] = 0.1,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 128,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Annotated[str, typer.Option(help="auto (spread over GPUs), cpu, cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    out: Annotated[Path, typer.Option(help="The card; Markdown goes beside it.")] = Path("theta-card.json"),
) -> None:
    """Calibrate θ or a gap, and say what it gains and costs."""
    with one_sentence_errors():
        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()
        if threads:
            torch.set_num_threads(threads)
        texts = read_prompts(prompts)[:limit]
        config = read_model_config(model)
        ea = load_pair(config, device_map=device)
        conversations = Conversations(ea, config)
        ids = [conversations.ids([{"role": "user", "content": text}]) for text in texts]
        setup = Setup(ea.draft, max_new_tokens, temperature, seed)
        with progress(Console(stderr=True), 2 * len(ids)) as advance:
            runs = replay(ea, ids, setup, advance)
            predictions = predict(runs, temperature)
            chosen = choose(predictions, margin, budget)
            confirmed = confirm(ea, ids, setup, chosen.verify, tolerance, advance)
        z1, z2 = best_logits(runs)
        card = {
            "model": _identity(config),
            "prompts": {"source": prompts.name, "n": len(texts), "sha256": _digest(texts)},
            "settings": {
                "draft": setup.draft.model_dump(),
                "temperature": temperature,
                "max_new_tokens": max_new_tokens,
                "seed": seed,
                "budget": budget,
            },
            "chosen": {
                "name": chosen.name,
                "verify": chosen.verify.model_dump(exclude_unset=True),
                "firing rate": chosen.fires,
                "equivalents": equivalents(chosen.verify, z1, z2),
                "strict nodes": rejections(runs, chosen.verify),
            },
            "confirmed": _plain(asdict(confirmed) | {"non_inferior": confirmed.non_inferior}),
            "replayed": [_plain(asdict(p) | {"verify": p.verify.model_dump(exclude_unset=True)}) for p in predictions],
            "provenance": provenance(),
        }
        write_atomically(out, json.dumps(card, indent=1, ensure_ascii=False) + "\n")
        text = markdown(card, predictions)
        write_atomically(out.with_suffix(".md"), text)
        typer.echo(text)


def markdown(card: Mapping[str, Any], predictions: Sequence[Prediction]) -> str:
    """The card for readers."""
    chosen, told = card["chosen"], card["confirmed"]
    options = ", ".join(f"{name}={value!r}" for name, value in chosen["verify"].items())
    nodes = chosen["strict nodes"]
    verdict = {
        True: "inside the tolerated loss: non-inferior",
        False: "not shown to be inside the tolerated loss",
        None: "one prompt shows nothing",
    }[told["non_inferior"]]
    lines = [
        f"# `VerifyConfig({options})`",
        "",
        f"{card['model']['target']} with {card['model']['head']}, {card['prompts']['n']} prompts of "
        f"{card['prompts']['source']}, T = {card['settings']['temperature']:g}, at most "
        f"{card['settings']['max_new_tokens']} tokens. A calibration holds for this model and this kind of text.",
        "",
        "| | strict | rule |",
        "|---|---:|---:|",
        f"| tokens per cycle (tau) | {_show(told['tau'][0])} | {_show(told['tau'][1])} |",
        f"| target's mean log-probability | {_show(told['log_probability'][0])} | "
        f"{_show(told['log_probability'][1])} |",
        "",
        f"- rule over strict: tau {_show(told['tau_gain'])}, tokens per second {_show(told['speed_up'])}, length "
        f"{_show(told['length_ratio'])}; {_show(told['relaxed_per_1000'])} relaxed tokens per 1000.",
        f"- log-probability of the text: {_show(told['quality'])} nats per token; {verdict} (tolerated: "
        f"{told['margin']:g}). {_power(told)}",
        f"- the margin is low at {chosen['firing rate']:.1%} of the nodes; "
        + "; ".join(f"{name}: {value:.3g}" for name, value in chosen["equivalents"].items())
        + ".",
        f"- of {nodes['tested']} tested nodes of the strict run {nodes['low margin']} have low margin, "
        f"{nodes['rejected']} of these rejected, and {nodes['runner-up drafted']} times the runner-up was drafted.",
        "",
        "Replayed on the strict run (an estimate: a relaxed text goes another way):",
        "",
        "| rule | tau | regret, nats per token | fires |",
        "|---|---:|---:|---:|",
        *(
            f"| {'**' + p.name + '**' if p.name == chosen['name'] else p.name} | {_show(_plain(asdict(p.tau)))} | "
            f"{_show(_plain(asdict(p.regret)))} | {'' if p.fires is None else f'{p.fires:.1%}'} |"
            for p in predictions
        ),
        "",
        f"Intervals: 95 %, bootstrap by prompt. `{card['provenance']['command']}`, {card['provenance']['device']}, "
        f"commit {card['provenance']['commit'][:10]}, {card['provenance']['date']}.",
    ]
    return "\n".join(lines) + "\n"


def _identity(config: ModelConfig) -> dict[str, Any]:
    """Names and hashes of target and head."""
    return {
        "target": config.target,
        "head": config.head,
        "target checkpoint": checkpoint_identity(find_checkpoint(config.target_path)),
        "head checkpoint": checkpoint_identity(find_checkpoint(config.head_path)),
    }


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Cells as short objects, everything else as it is."""
    if isinstance(value, dict):
        if set(value) == set(Cell.__dataclass_fields__):
            return {name: inner for name, inner in value.items() if inner not in (None, "")}
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _show(cell: Mapping[str, float]) -> str:
    value = f"{cell['value']:.3g}"
    return f"{value} [{cell['low']:.3g}, {cell['high']:.3g}]" if "low" in cell else value


def _power(told: Mapping[str, Any]) -> str:
    if told["power"] is None:
        return ""
    return (
        f"With {told['prompts']} prompts a difference of {told['detectable']:.2g} nats is found with 80 % power; the "
        f"chance to show non-inferiority if nothing is lost is {told['power']:.0%}."
    )


if __name__ == "__main__":
    app()
