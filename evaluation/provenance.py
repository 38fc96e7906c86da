"""Where a result comes from: command, commit, versions, machine."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from eagle_mars.info import collect


def provenance() -> dict[str, Any]:
    """Facts that a reader needs to repeat a run, as plain values."""
    facts = collect()
    return {
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "eagle_mars": facts["eagle_mars"],
        "python": facts["python"],
        "packages": {name: facts["packages"][name] for name in ("torch", "transformers")},
        "device": facts["device"],
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
    }


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that a reader sees the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    Path(name).chmod(0o644)  # mkstemp's 0600 is for secrets
    Path(name).replace(path)


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append one JSON object as a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return done.stdout.strip()
