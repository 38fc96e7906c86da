"""The tables of docs/scaling.md: memory per device, and speed-ups to expect, of models that don't fit on this machine.

Everything is arithmetic on configs/scaling.yaml: `eagle_mars.memory` and `evaluation.simulate.Roofline`.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from eagle_mars.config import DraftConfig
from eagle_mars.memory import TargetSize, memory
from evaluation.metrics import Cell
from evaluation.simulate import Roofline
from evaluation.table import markdown_table

ROOT = Path(__file__).parents[1]
PLAN = ROOT / "configs" / "scaling.yaml"
PUBLISHED = ROOT / "configs" / "tables" / "table1.yaml"
_GIB = 2**30


def head_parameters(size: TargetSize, intermediate: int, draft_vocabulary: int) -> int:
    """Parameters of an EAGLE-3 head of the target's width: `fc`, one layer that reads twice the width, `lm_head`."""
    h = size.hidden
    attention = 2 * h * (size.heads + 2 * size.kv_heads) * size.head_dim + size.heads * size.head_dim * h
    return 3 * h * h + attention + 3 * h * intermediate + h * draft_vocabulary


def tables(plan: Path = PLAN) -> str:
    """Both tables as Markdown."""
    given = yaml.safe_load(plan.read_text("utf-8"))
    draft, gpu = DraftConfig(**given["tree"]), given["gpu"]
    published = _published()
    space: dict[str, dict[str, Cell]] = {}
    speed: dict[str, dict[str, Cell]] = {}
    for model, about in given["models"].items():
        size = TargetSize.of(SimpleNamespace(tie_word_embeddings=False, **about["sizes"]))
        # Heads of mixtures have a dense MLP; 4 x the width is the usual one.
        head = head_parameters(
            size, about["sizes"].get("intermediate_size", 4 * size.hidden), about["draft_vocabulary"]
        )
        for placed in about["placements"]:
            devices, weight = int(placed["devices"]), float(placed["weight"])
            by_layer = placed.get("layers", False)  # devices take turns, so none of them makes another one faster
            name = f"{model}, {devices} x {_WEIGHTS[weight]}{' by layer' if by_layer else ''}"
            together = 1 if by_layer else devices
            space[name] = _space(size, head, draft, given, devices, weight)
            launch = float(gpu["launch"]) + (float(gpu["all_reduce"]) if together > 1 else 0.0)
            clock = Roofline(float(gpu["bandwidth"]), float(gpu["compute"]), launch).clock(
                size, head, given["prompt_tokens"], weight=weight, devices=together
            )
            rules = published[model]
            speed[name] = {
                "token of the target alone, ms": Cell(1e3 * clock.alone),
                "cycle, ms": Cell(1e3 * clock.cycle(draft)),
                **{f"{rule}: tau → speed-up": Cell(clock.speedup(draft, tau["tau"])) for rule, tau in rules.items()},
                **{f"{rule}, published": Cell(tau["speed-up"]) for rule, tau in rules.items()},
            }
    return markdown_table(space, "model, devices x weights") + "\n" + markdown_table(speed, "model, devices x weights")


_WEIGHTS = {2.0: "bf16", 1.0: "fp8 or int8", 0.56: "int4"}  # bytes of a weight; int4 with a scale for each 32


def _space(
    size: TargetSize, head: int, draft: DraftConfig, given: dict[str, Any], devices: int, weight: float
) -> dict[str, Cell]:
    """GiB on each device."""
    bytes_ = memory(size, head, draft, given["prompt_tokens"], given["new_tokens"], weight=weight, devices=devices)
    return {
        "weights": Cell(bytes_.weights / _GIB),
        "head": Cell(bytes_.head / _GIB),
        "cache": Cell(bytes_.cache / _GIB),
        "prefill or tree": Cell(max(bytes_.prefill, bytes_.tree) / _GIB),
        "peak, GiB": Cell(bytes_.peak / _GIB),
        "KiB a cached token": Cell(size.row * 2 / devices / 1024),
    }


def _published() -> dict[str, dict[str, dict[str, float]]]:
    """Model → rule → tau and speed-up, as the paper prints them."""
    part = yaml.safe_load(PUBLISHED.read_text("utf-8"))["parts"][0]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in part["published"]:
        found.setdefault(row["model"], {})[row["arms"][0]] = row["values"]
    return found
