from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from evaluation.bench_gpu import app


def test_the_rows_of_the_gpu_script_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)  # a GPU records, and doesn't compile
    options = ["--device", "cpu", "--dtype", "float32", "--tree", "8,2,3", "--max-new-tokens", "8"]
    done = CliRunner().invoke(app, [str(tmp_path), *options, "--pairs", "tiny"])
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "end_to_end.jsonl").read_text())["rows"]
    assert rows["tiny"]["exact equals alone"] == rows["tiny, graphs"]["exact equals alone"] == 1
    assert rows["tiny"]["waits a cycle"] is None  # no GPU here
