from __future__ import annotations

import json
from pathlib import Path

import typer
from typer.testing import CliRunner

from eagle_mars.engine import Speculation
from evaluation import profile_cycle


def test_parts_add_up_to_no_more_than_the_cycle(tiny_pair, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(profile_cycle.main)
    before = Speculation.cycle
    options = ["--every", "20", "--max-new-tokens", "12", "--threads", "1", "--cpu-time", "--layouts", "float32"]
    done = CliRunner().invoke(app, [*options, "--model", tiny_pair[0], "--head", tiny_pair[1], "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    spent = json.loads((tmp_path / "profile.jsonl").read_text())["s"]["float32"]
    parts = [spent[part] for part in profile_cycle.PARTS if part != profile_cycle.CYCLE]
    assert min(parts) > 0
    assert sum(parts) <= spent[profile_cycle.CYCLE]
    assert Speculation.cycle is before
