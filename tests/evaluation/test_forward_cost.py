from __future__ import annotations

import json
from pathlib import Path

import typer
from typer.testing import CliRunner

from evaluation import forward_cost


def test_curves_of_every_layout_with_a_picture(tiny_pair, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(forward_cost.main)
    options = ["--sizes", "1", "--sizes", "4", "--rounds", "1", "--threads", "1", "--cpu-time"]
    done = CliRunner().invoke(app, [*options, "--model", tiny_pair[0], "--head", tiny_pair[1], "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    row = json.loads((tmp_path / "forward-cost.jsonl").read_text())
    assert set(row["forward_s"]) == set(forward_cost.LAYOUTS)
    assert set(row["linear_s"]) == set(forward_cost.KERNELS)
    plain = min(row["forward_s"][name]["1"] for name in ("float32", "bfloat16"))
    own = row["forward_s"]["float16 packed"]["4"] + row["drafting_s"]["float16 packed"]
    assert row["break_even_tau"]["float16 packed"] == {"4": own / plain}
    assert (tmp_path / "forward-cost.png").stat().st_size > 1000
    assert "| float16 packed |" in (tmp_path / "forward-cost.md").read_text()


def test_cpu_seconds_are_those_of_one_thread() -> None:
    app = typer.Typer()
    app.command()(forward_cost.main)
    done = CliRunner().invoke(app, ["--threads", "2", "--cpu-time"])
    assert done.exit_code == 2
