"""Where a result comes from: command, commit, versions, machine, data, checkpoints."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from eagle_mars.info import collect, cpu_model

_COMMIT = re.compile(r"/snapshots/([0-9a-f]{40})/?$")
_SAMPLED = 1 << 30  # files beyond a gigabyte are hashed at both ends only: a 70B checkpoint would take minutes
_END = 1 << 26


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
        "packages": {name: facts["packages"][name] for name in ("torch", "transformers", "accelerate")},
        "device": facts["device"],
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
    }


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that a reader sees the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # else a crash of the machine may leave the new name with none of its content
        Path(name).chmod(0o644)  # mkstemp's 0600 is for secrets
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append one JSON object as a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def checkpoint_identity(directory: Path) -> dict[str, Any]:
    """What tells a checkpoint from another one: the hub's commit if it lies in the hub's cache, and the hash of its
    weights and configs (sha256 over names, sizes and contents; of files above 1 GiB the first and last 64 MiB)."""
    files = sorted(file for file in directory.iterdir() if file.suffix in (".safetensors", ".bin", ".json"))
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            if size <= _SAMPLED:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
            else:
                digest.update(stream.read(_END))
                stream.seek(-_END, os.SEEK_END)
                digest.update(stream.read(_END))
    commit = _COMMIT.search(directory.as_posix())
    return {"commit": commit and commit[1], "sha256": digest.hexdigest()}


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return done.stdout.strip()
