from __future__ import annotations

import json
from pathlib import Path

import torch
from typer.testing import CliRunner

from evaluation.bench_memory import app, forget_peak, live_tensors, peak, resident


def test_a_run_writes_what_it_saw(tiny_pair, tmp_path: Path) -> None:
    target, head = tiny_pair
    options = ["--model", target, "--head", head, "--answers", "2", "--prompt-tokens", "100", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    row = json.loads((tmp_path / "memory.jsonl").read_text())
    assert len(row["resident"]) == len(row["tensors"]) == 1  # a look at the end
    assert row["computed"] > 0
    assert "| measured peak |" in (tmp_path / "memory.md").read_text()


def test_tensors_and_peaks_are_noticed() -> None:
    before = live_tensors()
    kept = [torch.zeros(3) for _ in range(7)]
    assert live_tensors() - before == len(kept)
    forget_peak()
    start = resident()
    big = torch.ones(64, 2**20)  # 256 MiB, touched
    del big
    assert peak() - start > 200 * 2**20
