from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from evaluation.bench_context import app


def test_every_length_is_measured_and_drawn(tiny_pair, tmp_path: Path) -> None:
    target, head = tiny_pair
    options = ["--model", target, "--head", head, "--cycles", "2", "--no-cpu-pack", "--threads", "1"]
    done = CliRunner().invoke(app, ["40", "300", *options, "--prefill-chunk", "64", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    costs = json.loads((tmp_path / "context.jsonl").read_text())["costs"]
    assert [cost["tokens"] for cost in costs] == [40, 300]
    assert all(cost[name] > 0 for cost in costs for name in ("prefill", "cycle", "alone"))
    assert (tmp_path / "context.png").stat().st_size > 1000
    assert "| 300 |" in (tmp_path / "context.md").read_text()


def test_a_length_beyond_the_context_is_refused_in_one_sentence(tiny_pair) -> None:
    target, head = tiny_pair
    done = CliRunner().invoke(app, ["1020", "--model", target, "--head", head, "--no-cpu-pack"])
    assert done.exit_code == 1
    assert "the target's context of 1024" in done.output
