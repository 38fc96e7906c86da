"""Table and picture of how a head's acceptance grows with data and CPU time, from points that trainings left.

python scripts/plot_scaling.py docs/results/head-scaling.jsonl

A line of the file is one finished head: run, different_tokens, rows (seen in training), cpu_minutes (of generating and
training), tau (chain of 5, replay of the held-out prompts), note. Table and picture: the same name with .md and .png.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

sys.path.insert(0, str(Path(__file__).parents[1]))  # `evaluation` lies in the repository and is not installed

from evaluation.provenance import write_atomically

GOAL = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=Path, help="JSON lines, one per head")
    args = parser.parse_args()
    points = [json.loads(line) for line in args.points.read_text("utf-8").splitlines()]
    write_atomically(args.points.with_suffix(".md"), table(points, args.points.name))
    draw(points, args.points.with_suffix(".png"))


def trend(points: list[dict[str, Any]], axis: str) -> tuple[float, float]:
    """Slope per doubling, and intercept, of tau against log2 of ``axis``."""
    x, y = [math.log2(p[axis]) for p in points], [p["tau"] for p in points]
    slope, intercept = np.polyfit(x, y, 1)
    return float(slope), float(intercept)


def needed(points: list[dict[str, Any]], axis: str) -> float:
    """Value of ``axis`` at which the trend reaches the goal."""
    slope, intercept = trend(points, axis)
    return float(2 ** ((GOAL - intercept) / slope))


def table(points: list[dict[str, Any]], name: str) -> str:
    lines = [
        "# tau of the embedded head against data and CPU time",
        "",
        f"Points of `{name}`: chain of 5, temperature 0, recorded answers to the held-out chat prompts replayed.",
        "",
        "| run | different tokens | rows seen | CPU-minutes, data and training | tau | note |",
        "|---|---|---|---|---|---|",
    ]
    for p in points:
        lines.append(
            f"| {p['run']} | {p['different_tokens'] / 1000:.0f} k | {p['rows'] / 1000:.0f} k | {p['cpu_minutes']:.0f} "
            f"| {p['tau']:.3f} | {p['note']} |"
        )
    slope, _ = trend(points, "cpu_minutes")
    lines += [
        "",
        f"![tau against data and CPU time]({Path(name).with_suffix('.png')})",
        "",
        f"A line through these points gains {slope:.2f} per doubling of the CPU time and reaches {GOAL} at "
        f"{needed(points, 'cpu_minutes') / 60:.1f} CPU-hours, by rows seen at {needed(points, 'rows') / 1e6:.1f} M. "
        "A few points and one seed: an order of magnitude, not a promise.",
        "",
    ]
    return "\n".join(lines)


def draw(points: list[dict[str, Any]], picture: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    labels = {"rows": "rows seen", "cpu_minutes": "CPU-minutes, data and training"}
    for axes, (axis, label) in zip(figure.subplots(1, 2, sharey=True), labels.items(), strict=True):
        axes.semilogx([p[axis] for p in points], [p["tau"] for p in points], "o")
        slope, intercept = trend(points, axis)
        x = np.array([min(p[axis] for p in points), max(p[axis] for p in points) * 4])
        axes.semilogx(x, slope * np.log2(x) + intercept, "--", linewidth=1)
        axes.axhline(GOAL, linewidth=0.8, color="grey")
        axes.set(xlabel=label, ylabel="tau, chain of 5")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.label_outer()
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main()
