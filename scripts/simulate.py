"""Predict speed-ups: `check` compares with runs here, `estimate` prints the tables of docs/scaling.md.

python scripts/simulate.py check --out docs/results
python scripts/simulate.py estimate
"""

from __future__ import annotations

import sys
from pathlib import Path

import typer

sys.path.insert(0, str(Path(__file__).parents[1]))  # `evaluation` lies in the repository and is not installed

from evaluation.bench_simulate import main
from evaluation.scaling import tables

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command("check")(main)


@app.command()
def estimate() -> None:
    """Memory and speed-ups of models that don't fit on this machine, by arithmetic."""
    typer.echo(tables())


if __name__ == "__main__":
    app()
