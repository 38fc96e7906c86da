"""How large a target's logits are and how close its two best ones: `python -m evaluation.logits`.

The margin theta means (1 - theta) * z1 nats, so what it allows depends on z1. This prints and draws the measured
distributions of z1, z2/z1 and z1 - z2 on the target's own greedy text, and what each theta amounts to on them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor
from transformers.utils import logging as hf_logging

from eagle_mars import EaModel
from eagle_mars.embedded import embedded_head_path, embedded_target_path
from eagle_mars.prompts import read_prompts
from eagle_mars.render import progress
from eagle_mars.verify.margins import fires, matching_gap
from evaluation.provenance import provenance, write_atomically
from evaluation.sweep import HELDOUT

THETAS = (0.84, 0.9, 0.92, 0.96, 0.98)
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def main(
    prompts: Annotated[list[Path] | None, typer.Option(help="Prompt files; the held-out prompts by default.")] = None,
    per_file: Annotated[int | None, typer.Option(help="First N prompts of each file.")] = None,
    max_new_tokens: int = 64,
    threads: int = 1,
    out: Annotated[Path | None, typer.Option(help="PNG to draw; the numbers go beside it as JSON.")] = None,
    model: Annotated[str | None, typer.Option(help="Target; the embedded one by default.")] = None,
    head: Annotated[str | None, typer.Option(help="Draft head; the embedded one by default.")] = None,
) -> None:
    """Measure and draw the two best logits along greedy answers."""
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    ea = EaModel.from_pretrained(
        model or str(embedded_target_path()), head or str(embedded_head_path()), dtype="float32"
    )
    texts = [text for path in prompts or [HELDOUT] for text in read_prompts(path)[:per_file]]
    best = []
    with progress(Console(stderr=True), len(texts)) as advance:
        for text in texts:
            best.append(best_two(ea, ea.chat_ids(text), max_new_tokens))
            advance()
    z1, z2 = torch.cat(best).unbind(-1)
    facts = {"prompts": len(texts), "max_new_tokens": max_new_tokens, **describe(z1, z2), "provenance": provenance()}
    typer.echo(json.dumps(facts, indent=1))
    if out:
        write_atomically(out.with_suffix(".json"), json.dumps(facts, indent=1) + "\n")
        picture(z1, z2, out)


@torch.inference_mode()
def best_two(ea: EaModel, prompt: Sequence[int], max_new_tokens: int) -> Tensor:
    """[T, 2] float32: z1 >= z2 at every position of the greedy answer, from one plain forward over it."""
    result = ea.generate(prompt, max_new_tokens=max_new_tokens, method="autoregressive")
    ids = torch.tensor([[*prompt, *result.token_ids[:-1]]], device=ea.device)
    logits: Tensor = ea.base_model(ids, logits_to_keep=result.new_tokens).logits
    return logits[0].float().topk(2).values.cpu()


def describe(z1: Tensor, z2: Tensor) -> dict[str, Any]:
    """Quantiles of z1, z2/z1 and the gap in nats; per theta its firing rate and the gap that fires as often."""
    points = torch.tensor(QUANTILES)

    def quantiles(values: Tensor) -> dict[str, float]:
        found = values.quantile(points).tolist()
        return {f"{q:.0%}": round(value, 3) for q, value in zip(QUANTILES, found, strict=True)}

    return {
        "positions": len(z1),
        "z1 <= 0": int((z1 <= 0).sum()),
        "z1": quantiles(z1),
        "z2/z1": quantiles(z2 / z1),
        "gap": quantiles(z1 - z2),
        "theta": {
            str(theta): {
                "fires": round(float(fires(z1, z2, theta=theta).double().mean()), 3),
                "gap that fires as often": round(matching_gap(theta, z1, z2), 3),
                "largest gap allowed": round(float((1 - theta) * z1.max()), 3),
            }
            for theta in THETAS
        },
    }


def picture(z1: Tensor, z2: Tensor, path: Path) -> None:
    """Three histograms; the third says in nats what thetas mean at the median z1."""
    from matplotlib.figure import Figure  # only drawing needs it

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    size, ratio, gap = figure.subplots(1, 3)
    size.hist(z1, bins=40, color="#4c72b0")
    size.set(xlabel="best logit z1", ylabel="positions")
    ratio.hist((z2 / z1).clamp(0, 1), bins=50, color="#4c72b0")
    ratio.set(xlabel="z2 / z1", ylabel="positions")
    gap.hist((z1 - z2).clamp(max=8), bins=50, color="#4c72b0")
    gap.set(xlabel="gap z1 - z2 in nats (last bin: 8 and more)", ylabel="positions")
    median = float(z1.median())
    for theta, colour in zip((0.9, 0.96), ("#c44e52", "#dd8452"), strict=True):
        rate = float(fires(z1, z2, theta=theta).double().mean())
        ratio.axvline(theta, color=colour, label=f"θ = {theta}: {rate:.0%} of positions fire")
        nats = (1 - theta) * median
        gap.axvline(nats, color=colour, label=f"θ = {theta} at median z1 = {median:.1f}: {nats:.1f} nats")
    ratio.legend(fontsize=8, loc="upper left")
    gap.legend(fontsize=8)
    for axes in (size, ratio, gap):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    typer.run(main)
