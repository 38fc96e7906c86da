"""A picture of one training run from its metrics.jsonl; needs matplotlib (the [train] extra)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SMOOTHING = 25  # steps per plotted point


def draw_curves(metrics: Path, picture: Path) -> None:
    """Left: loss per unrolled step. Right: share of drafts accepted at each depth on held-out text, and tau."""
    from matplotlib.figure import Figure

    records = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
    figure = Figure(figsize=(10, 4), layout="constrained")
    losses, acceptance = figure.subplots(1, 2)
    for depth in range(max(r["k"] for r in records)):
        points = [(r["rows"], r["loss"][depth]) for r in records if r["k"] > depth]
        losses.plot(*_means(points), label=f"step {depth + 1}")
    losses.set(xlabel="rows seen", ylabel="loss (nats)")
    losses.legend()
    held_out: list[dict[str, Any]] = [r for r in records if "held_out" in r]
    rows = [r["rows"] for r in held_out]
    for depth in range(len(held_out[0]["held_out"]["conditional"]) if held_out else 0):
        values = [r["held_out"]["conditional"][depth] for r in held_out]
        acceptance.plot(rows, values, marker=".", label=f"draft {depth + 1}")
    acceptance.set(xlabel="rows seen", ylabel="accepted when all before were")
    if held_out:
        acceptance.legend()
        acceptance.set_title(f"held-out tau {held_out[-1]['held_out']['tau']:.2f}")
    figure.savefig(picture, dpi=110)


def _means(points: list[tuple[int, float]]) -> tuple[list[float], list[float]]:
    """x and y, averaged over runs of points."""
    parts = [points[i : i + _SMOOTHING] for i in range(0, len(points), _SMOOTHING)]
    return tuple([sum(point[axis] for point in part) / len(part) for part in parts] for axis in (0, 1))  # type: ignore[return-value]
