"""What runs inside the sandbox: limits itself, runs the program and its test, reports through a pipe.

Started as `python -I -B child.py` with one JSON object on stdin; imports nothing of ours but `confine`.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # isolated mode leaves it out
import confine

sys.path.pop(0)


def main(job: dict[str, Any]) -> None:
    """Write token, status and detail to the pipe and leave, without running what the program left behind.

    What the report needs is made before the program runs, so that patching modules changes nothing.
    """
    write, leave, pipe = os.write, os._exit, job["pipe"]
    program, broken = _compile(job["program"])
    test = compile(job["test"], "<test>", "exec")
    head = {status: f"{job['token']} {status} ".encode() for status in ("passed", "failed", "unconfined")}
    missing = _confine(job)
    if missing and not job["allow_unconfined"]:
        write(pipe, head["unconfined"] + "; ".join(missing).encode())
        leave(0)
    if program is None:
        write(pipe, head["failed"] + broken.encode(errors="replace"))
        leave(0)
    module = types.ModuleType("candidate")  # not __main__, so that an answer's main block stays out
    sys.modules["candidate"] = module
    run, namespace = exec, module.__dict__
    try:
        run(program, namespace)
        run(test, namespace)
    except BaseException as error:  # noqa: BLE001  # whatever the program raises, SystemExit included, is its failure
        write(pipe, head["failed"] + _describe(error))
        leave(0)
    write(pipe, head["passed"])
    leave(0)


def _confine(job: dict[str, Any]) -> list[str]:
    """Put every limit on; returns those that this kernel lacks."""
    os.chdir(job["directory"])
    confine.limit_resources(**job["limits"])
    missing = []
    try:
        confine.confine_files(Path(job["directory"]))
    except OSError as error:
        missing.append(f"files: {error}")
    try:
        confine.refuse_system_calls()
    except OSError as error:
        missing.append(f"network and processes: {error}")
    return missing


def _compile(program: str) -> tuple[types.CodeType | None, str]:
    try:
        return compile(program, "<program>", "exec"), ""
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return None, f"{type(error).__name__}: {error}"


def _describe(error: BaseException) -> bytes:
    try:
        return f"{type(error).__name__}: {error}"[:300].encode(errors="replace")
    except BaseException:  # noqa: BLE001  # its __str__ is the program's code too
        return b"an exception that can't be printed"


if __name__ == "__main__":
    main(json.load(sys.stdin))
