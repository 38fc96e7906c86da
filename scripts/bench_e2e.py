"""Ours against every peer on the same weights. See evaluation/bench_e2e.py.

python scripts/bench_e2e.py --every 5 --eagle-loop --out docs/results
"""

from __future__ import annotations

import sys
from pathlib import Path

import typer

sys.path.insert(0, str(Path(__file__).parents[1]))  # `evaluation` lies in the repository and is not installed

from evaluation.bench_e2e import main

if __name__ == "__main__":
    typer.run(main)
