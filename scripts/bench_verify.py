"""Time verification: reference, torch.compile, Triton (on a GPU) and a naive walk. See evaluation/bench_verify.py.

python scripts/bench_verify.py --out docs/results/bench_verify.jsonl
"""

from __future__ import annotations

import sys
from pathlib import Path

import typer

sys.path.insert(0, str(Path(__file__).parents[1]))  # `evaluation` lies in the repository and is not installed

from evaluation.bench_verify import main

if __name__ == "__main__":
    typer.run(main)
