from __future__ import annotations

import json
from pathlib import Path

import typer
from typer.testing import CliRunner

from evaluation import bench_batch


def test_every_size_gives_the_same_texts(tiny_pair, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ab\ncd\ne\n")
    target, head = tiny_pair
    app = typer.Typer()
    app.command()(bench_batch.main)
    options = ["--prompts", str(prompts), "--model", target, "--head", head, "--max-new-tokens", "8", "--rounds", "1"]
    done = CliRunner().invoke(
        app, [*options, "--sizes", "3", "--no-cpu-pack", "--threads", "1", "--out", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    sizes = json.loads((tmp_path / "batch.jsonl").read_text())["sizes"]
    assert set(sizes) == {"1", "3"}
    assert {row["texts equal to size 1"] for row in sizes.values()} == {3}
    assert sizes["1"]["against size 1"] == 1
