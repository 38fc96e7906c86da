"""Time verification: reference, torch.compile, Triton (on a GPU) and a naive walk. See evaluation/bench_verify.py.

python scripts/bench_verify.py --out results/bench_verify.jsonl
"""

from __future__ import annotations

import typer

from evaluation.bench_verify import main

if __name__ == "__main__":
    typer.run(main)
