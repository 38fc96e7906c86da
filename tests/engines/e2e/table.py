"""The rows that the greedy checks left in runs/engines, as a Markdown table: `python -m tests.engines.e2e.table`."""

from __future__ import annotations

import json
import sys

from tests.engines.e2e.conftest import ROOT


def rows() -> list[str]:
    lines = [
        "| engine | requests | steps | drafted | accepted | tokens per step | relaxed |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in ("v1-plain", "v1", "v2", "tp1", "tp2"):
        file = ROOT / "runs" / "engines" / f"{name}.json"
        for case, row in json.loads(file.read_text("utf-8")).items() if file.exists() else ():
            length = 1 + row["accepted"] / row["steps"]
            relaxed = "in the workers" if name == "tp2" else row["relaxed"]
            numbers = f"{row['steps']} | {row['drafted']} | {row['accepted']} | {length:.3f} | {relaxed}"
            lines.append(f"| {name} | {case} | {numbers} |")
    return lines


if __name__ == "__main__":
    sys.stdout.write("\n".join(rows()) + "\n")
