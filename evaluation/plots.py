"""Pictures of a filled table: published against ours, the threshold sweep, trade-offs, and where answers differ.

Every picture is drawn from the cells of a `FilledTable` or the answers behind them; nothing is measured here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.answers import Answer
from evaluation.metrics import Cell, paired, turns
from evaluation.nodes import LoggedNode
from evaluation.table_result import FilledPart, FilledRow, FilledTable
from evaluation.tables import MEAN, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SPEED, TAU = "speed-up", "tau"
QUALITY = ("pass@4", "pass@1", "strict", "ROUGE-L", "BLEU", "judge")  # the first that a part has is its quality
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_THETA = re.compile(r"θ = ([\d.]+)")
_PAPERS_THETA = 0.9
_WIDEST_GAP = 8.0  # nats
_WIDEST = 12  # accepted drafts per cycle; longer paths are counted there


def draw(
    table: FilledTable,
    answers: Mapping[Row, Sequence[Answer]],
    nodes: Mapping[Row, Sequence[LoggedNode]],
    directory: Path,
) -> list[Path]:
    """All pictures that this table has the numbers for; returns their files. answers, nodes: behind our rows."""
    figures: dict[str, Figure | None] = {}
    for number, part in enumerate(table.parts, 1):
        suffix = f"-{number}" if len(table.parts) > 1 else ""
        figures[f"values{suffix}"] = values(part)
        figures[f"theta{suffix}"] = theta_sweep(part)
        figures[f"pareto{suffix}"] = pareto(part)
    figures["margins"] = margins(nodes)
    figures["accepted_lengths"] = accepted_lengths(answers)
    figures["first_divergence"] = first_divergence(answers)
    written = []
    directory.mkdir(parents=True, exist_ok=True)
    for stale in directory.glob("*.png"):
        stale.unlink()
    for name, figure in figures.items():
        if figure is not None:
            written.append(directory / f"{name}.png")
            figure.savefig(written[-1], dpi=110)
    return written


def values(part: FilledPart) -> Figure | None:
    """Per metric, bars of ours with intervals and diamonds where a value is published; means only, if there are any."""
    rows = [filled for filled in part.rows if filled.row.task == MEAN] or list(part.rows)
    rows = [filled for filled in rows if any(cell.value is not None for m in part.metrics for cell in filled.cells(m))]
    groups = list(dict.fromkeys(_group(filled.row, rows) for filled in rows))
    arms = list(dict.fromkeys(filled.row.arm for filled in rows))
    metrics = [m for m in part.metrics if any(c.value is not None for filled in rows for c in filled.cells(m)[:2])]
    # A sweep and a log of nodes have pictures of their own.
    if not metrics or any(_THETA.match(arm) for arm in arms) or "nodes" in part.metrics:
        return None
    figure = _figure(max(5.0, 2.2 + 0.32 * len(groups) * len(arms)), 2.6 * len(metrics))
    for axes, metric in zip(_panels(figure, len(metrics), 1), metrics, strict=True):
        _bars(axes, rows, metric, groups, arms)
        axes.set_ylabel(metric)
    figure.axes[0].set_title(part.title, fontsize=10)
    handles, names = figure.axes[0].get_legend_handles_labels()
    fit = int(12 * figure.get_figwidth() / (max(map(len, names)) + 6))  # some 12 letters an inch, 6 for the handle
    figure.legend(
        handles, names, loc="outside lower center", ncols=min(len(names), max(fit, 1)), fontsize=8, frameon=False
    )
    return figure


def _bars(axes: Axes, rows: Sequence[FilledRow], metric: str, groups: Sequence[str], arms: Sequence[str]) -> None:
    width = 0.8 / len(arms)
    for index, arm in enumerate(arms):
        own = [filled for filled in rows if filled.row.arm == arm]
        places = [groups.index(_group(filled.row, rows)) + (index - (len(arms) - 1) / 2) * width for filled in own]
        ours = [filled.ours[metric] for filled in own]
        there = [(x, cell) for x, cell in zip(places, ours, strict=True) if cell.value is not None]
        colour = COLOURS[index % len(COLOURS)]
        axes.bar(
            [x for x, _ in there], [_number(c) for _, c in there], width * 0.92, color=colour, label=f"{arm}, ours"
        )
        _error_bars(axes, there)
        told = [
            (x, cell.value)
            for x, cell in zip(places, (filled.published[metric] for filled in own), strict=True)
            if cell.value is not None
        ]
        if told:
            axes.plot(*zip(*told, strict=True), "D", ms=5, mfc="white", mec=colour, mew=1.6, label=f"{arm}, published")
    if metric == SPEED:
        axes.axhline(1, color="0.6", lw=0.8, zorder=0)
    axes.set_xticks(range(len(groups)), [group.replace(" · ", "\n") for group in groups], fontsize=8)
    axes.set_xlim(-0.6, len(groups) - 0.4)


def theta_sweep(part: FilledPart) -> Figure | None:
    """tau and speed-up against θ, quality on the second axis; a panel per model and task, strict at θ = 1."""
    panels: dict[tuple[str, str], list[FilledRow]] = {}
    for filled in [filled for filled in part.rows if filled.row.task == MEAN] or part.rows:
        panels.setdefault((filled.row.model, filled.row.task), []).append(filled)
    panels = {key: rows for key, rows in panels.items() if _has_numbers(rows, part.metrics)}
    if not panels or not any(_THETA.match(filled.row.arm) for filled in part.rows):
        return None
    quality = _quality(part)
    figure = _figure(5.4 * len(panels), 4.0)
    for axes, ((model, task), rows) in zip(_panels(figure, 1, len(panels)), panels.items(), strict=True):
        for metric, colour in ((TAU, COLOURS[0]), (SPEED, COLOURS[2])):
            if metric in part.metrics:
                _curve(axes, rows, metric, colour)
        axes.set(
            xlabel="θ (strict drawn at 1)",
            ylabel="tokens per cycle (tau), speed-up",
            title=f"{model}, {task}",
            xlim=(0.83, 1.01),
        )
        lines, names = axes.get_legend_handles_labels()
        axes.yaxis.set_visible(bool(lines))
        if quality:
            second = axes.twinx()
            _curve(second, rows, quality, COLOURS[1])
            second.set_ylabel(quality, color=COLOURS[1])
            second.spines["top"].set_visible(False)
            more, more_names = second.get_legend_handles_labels()
            lines, names = lines + more, names + more_names
        axes.legend(lines, names, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False)
    return figure


def _curve(axes: Axes, rows: Sequence[FilledRow], metric: str, colour: str) -> None:
    points = [(_theta(filled.row.arm), filled.ours[metric], filled.published[metric]) for filled in rows]
    points.sort(key=lambda point: point[0])
    ours = [(theta, cell) for theta, cell, _ in points if cell.value is not None]
    if ours:
        axes.plot([t for t, _ in ours], [_number(c) for _, c in ours], "o-", color=colour, label=f"{metric}, ours")
        _error_bars(axes, ours, colour)
    told = [(theta, cell.value) for theta, _, cell in points if cell.value is not None]
    if told:
        axes.plot(*zip(*told, strict=True), "D--", mfc="white", color=colour, label=f"{metric}, published")


def pareto(part: FilledPart) -> Figure | None:
    """Quality against speed-up, one point per arm with both intervals; only where ours has both."""
    quality = _quality(part)
    if quality is None or SPEED not in part.metrics:
        return None
    rows = [f for f in part.rows if f.ours[quality].value is not None and f.ours[SPEED].value is not None]
    if len(rows) < 2:
        return None
    figure = _figure(6.0, 4.2)
    (axes,) = _panels(figure, 1, 1)
    named = list(dict.fromkeys(filled.row.model for filled in rows))
    for index, filled in enumerate(rows):
        x, y = filled.ours[SPEED], filled.ours[quality]
        colour = COLOURS[named.index(filled.row.model) % len(COLOURS)]
        axes.errorbar(
            _number(x),
            _number(y),
            xerr=_spread([x]),
            yerr=_spread([y]),
            fmt="o",
            color=colour,
            elinewidth=0.7,
            alpha=0.9,
        )
        axes.annotate(
            filled.row.arm,
            (_number(x), _number(y)),
            xytext=(5, 6 if index % 2 else -13),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set(xlabel="speed-up over the target alone", ylabel=quality, title=f"{part.title}: {', '.join(named)}")
    axes.margins(x=0.15)
    return figure


def accepted_lengths(answers: Mapping[Row, Sequence[Answer]]) -> Figure | None:
    """How many drafts the cycles of each arm accept: shares, a panel per model, all tasks and trees together."""
    panels: dict[str, dict[str, list[int]]] = {}
    for row, rows in answers.items():
        lengths = [n for answer in rows for stats in turns(answer) for n in stats.accepted_lengths]
        if lengths:
            arm = f"{row.arm}, T = {row.temperature:g}"
            panels.setdefault(row.model, {}).setdefault(arm, []).extend(lengths)
    if not panels:
        return None
    figure = _figure(max(5.5, 4.6 * len(panels)), 3.6)
    for axes, (model, arms) in zip(_panels(figure, 1, len(panels)), panels.items(), strict=True):
        for index, (arm, lengths) in enumerate(arms.items()):
            top = min(max(lengths), _WIDEST)
            shares = [sum(min(n, _WIDEST) == k for n in lengths) / len(lengths) for k in range(top + 1)]
            mean = sum(n + 1 for n in lengths) / len(lengths)
            label = f"{arm}: tau {mean:.2f}"
            axes.plot(range(top + 1), shares, "o-", ms=4, lw=1.3, color=_colour(arm, index), label=label)
        axes.set(xlabel="accepted drafts in a cycle", ylabel="share of cycles", title=model, ylim=(0, None))
        axes.set_xticks(range(max(map(max, arms.values())) + 1))
        axes.legend(fontsize=7, frameon=False)
    return figure


def margins(nodes: Mapping[Row, Sequence[LoggedNode]]) -> Figure | None:
    """The ratio z2/z1 and the gap of tested nodes, split by what strict verification did; a row of panels per
    temperature, all tasks together. The paper's threshold is marked."""
    panels: dict[tuple[str, float], list[LoggedNode]] = {}
    for row, own in nodes.items():
        panels.setdefault((row.model, row.temperature), []).extend(own)
    if not panels:
        return None
    figure = _figure(10.0, 3.3 * len(panels))
    axes = _panels(figure, len(panels), 2)
    for left, right, ((model, temperature), own) in zip(axes[::2], axes[1::2], panels.items(), strict=True):
        split = [[node for node in own if not node.rejected], [node for node in own if node.rejected]]
        style: dict[str, Any] = {
            "stacked": True,
            "color": [COLOURS[0], COLOURS[1]],
            "label": ["a draft accepted", "all rejected"],
        }
        left.hist([[min(max(n.ratio, 0.5), 1.0) for n in part] for part in split], bins=40, range=(0.5, 1), **style)
        left.axvline(_PAPERS_THETA, color="0.3", lw=1, ls="--")
        low = [node for node in own if node.fires(_PAPERS_THETA)]
        share = sum(node.rejected for node in low) / len(low) if low else 0.0
        left.set_title(
            f"{model}, T = {temperature:g}: {share:.0%} of {len(low)} rejected above {_PAPERS_THETA}", fontsize=9
        )
        left.set(xlabel="z2 / z1 (first bin: 0.5 and less)", ylabel="tested nodes")
        right.hist(
            [[min(n.z1 - n.z2, _WIDEST_GAP) for n in part] for part in split], bins=40, range=(0, _WIDEST_GAP), **style
        )
        right.set(xlabel=f"gap z1 - z2 in nats (last bin: {_WIDEST_GAP:g} and more)", ylabel="tested nodes")
        left.legend(fontsize=8, frameon=False, loc="upper left")
    return figure


def first_divergence(answers: Mapping[Row, Sequence[Answer]], strict: str = "exact") -> Figure | None:
    """Share of first turns that still equal the strict answer after so many tokens; questions paired, same coins."""
    curves: dict[str, dict[str, list[tuple[int, bool]]]] = {}
    for row, ours in answers.items():
        base = next((rows for other, rows in answers.items() if _is_strict_twin(row, other, rows, strict)), None)
        if base is None or ours is base or ours[0].method in ("ar", strict):
            continue
        panel = curves.setdefault(f"{row.model}, T = {row.temperature:g}", {})
        panel.setdefault(row.arm, []).extend(_prefix(a, b) for a, b in paired(ours, base))
    curves = {model: {arm: found for arm, found in arms.items() if found} for model, arms in curves.items()}
    curves = {model: arms for model, arms in curves.items() if arms}
    if not curves:
        return None
    figure = _figure(max(5.5, 4.6 * len(curves)), 3.6)
    for axes, (title, arms) in zip(_panels(figure, 1, len(curves)), curves.items(), strict=True):
        for index, (arm, found) in enumerate(arms.items()):
            ends = sorted(length for length, differs in found if differs)
            shares = [1 - (rank + 1) / len(found) for rank in range(len(ends))]
            longest = max(length for length, _ in found)
            axes.step(
                [0, *ends, longest], [1.0, *shares, shares[-1] if shares else 1.0], where="post", lw=1.5,
                color=_colour(arm, index), label=f"{arm} ({len(found)} answers)",
            )  # fmt: skip
        axes.set(xlabel="token", ylabel="share still equal to strict", title=title, ylim=(-0.02, 1.02))
        axes.legend(fontsize=8, frameon=False)
    return figure


def _is_strict_twin(row: Row, other: Row, answers: Sequence[Answer], strict: str) -> bool:
    same = (row.model, row.task, row.tree, row.temperature) == (other.model, other.task, other.tree, other.temperature)
    return same and answers[0].method == strict


def _prefix(ours: Answer, base: Answer) -> tuple[int, bool]:
    """Tokens of the first turn until the first difference, and whether there is one."""
    left, right = turns(ours)[0].token_ids, turns(base)[0].token_ids
    equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
    return equal, left != right


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # only drawing needs it

    return Figure(figsize=(width, height), layout="constrained")


def _panels(figure: Figure, rows: int, columns: int) -> list[Axes]:
    """Axes row by row, without the spines that say nothing."""
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return axes


def _group(row: Row, rows: Sequence[FilledRow]) -> str:
    """What stands under a group of bars: what distinguishes rows apart from their arm."""
    several = len({filled.row.task for filled in rows}) > 1
    temperatures = len({filled.row.temperature for filled in rows}) > 1
    parts = [row.model, row.task if several else "", row.tree, f"T = {row.temperature:g}" if temperatures else ""]
    return " · ".join(part for part in parts if part)


def _colour(arm: str, index: int) -> str | tuple[float, ...]:
    """Colours in order for arms of different kinds, along a scale for the θ of a sweep."""
    if not _THETA.match(arm):
        return COLOURS[index % len(COLOURS)]
    import matplotlib as mpl

    return mpl.colormaps["viridis"](min(max((_theta(arm) - 0.82) / 0.18, 0.0), 0.95))


def _theta(arm: str) -> float:
    found = _THETA.match(arm)
    return float(found[1]) if found else 1.0


def _quality(part: FilledPart) -> str | None:
    return next((metric for metric in QUALITY if metric in part.metrics), None)


def _has_numbers(rows: Sequence[FilledRow], metrics: Sequence[str]) -> bool:
    return any(cell.value is not None for filled in rows for metric in metrics for cell in filled.cells(metric)[:2])


def _number(cell: Cell) -> float:
    assert cell.value is not None  # callers draw only cells with a number
    return cell.value


def _spread(cells: Sequence[Cell]) -> list[list[float]]:
    """Distances from value to bounds, as error bars want them; none where there is no interval."""
    below = [0.0 if cell.low is None else max(_number(cell) - cell.low, 0.0) for cell in cells]
    above = [0.0 if cell.high is None else max(cell.high - _number(cell), 0.0) for cell in cells]
    return [below, above]


def _error_bars(axes: Axes, points: Sequence[tuple[float, Cell]], colour: str = "0.25") -> None:
    points = [(x, cell) for x, cell in points if cell.low is not None]
    cells = [cell for _, cell in points]
    axes.errorbar(
        [x for x, _ in points], [_number(c) for c in cells], yerr=_spread(cells), fmt="none", ecolor=colour, lw=0.9,
        capsize=2
    )  # fmt: skip
