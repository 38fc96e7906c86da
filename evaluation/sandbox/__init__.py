"""Running model-written Python with a test: one subprocess per program, limited by the kernel.

What holds, each with an adversarial test (tests/evaluation/test_sandbox.py):

- time: wall clock (the whole process group is killed) and CPU seconds;
- memory: address space; file size: per file, and no core dumps;
- files: reading only the Python installation and system libraries, writing only in a directory that is deleted after
  the run (Landlock); the environment is empty;
- network, new processes and programs, signals to others: refused (seccomp);
- the verdict: a random token over a pipe after the last test, so that printing a marker, leaving early with code 0, or
  patching modules doesn't pass.

What does NOT hold. It is a guard against accidents and cheap tricks, no jail for an enemy:

- program and test share one interpreter, so a program written for this file can find the token in a caller's frame, and
  one whose results claim to equal everything passes any `==`;
- a kernel bug is enough to get out; there is no virtual machine around it;
- many small files may fill the disk until the time is up, and several programs at once may fill the memory;
- names, sizes and dates of files outside can be seen (their contents can't), as can the machine's load and clock;
- CPU time is bounded, not isolated: measuring speed beside it is pointless.

Grading untrusted code on a machine that matters belongs in a container or virtual machine all the same.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eagle_mars.errors import EagleMarsError

_CHILD = Path(__file__).parent / "child.py"
_PIPE_BYTES = 65536


class SandboxError(EagleMarsError):
    """The kernel lacks a limit that the sandbox promises."""


@dataclass(frozen=True)
class Limits:
    """seconds: wall clock; CPU seconds are bounded by it, rounded up. memory_bytes: address space of the process.
    file_bytes: of each file written. processes: rlimit of the user, which only matters where seccomp is missing.
    allow_unconfined: run even where the kernel can't confine files, network or processes."""

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    processes: int = 256
    allow_unconfined: bool = False


@dataclass(frozen=True)
class Outcome:
    """status: `passed`; `failed`, the program or its test raised or didn't compile; `timeout`; `died`, the process
    ended without a verdict. detail: the exception, or how it died."""

    status: Literal["passed", "failed", "timeout", "died"]
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.status == "passed"


def run_program(program: str, test: str, limits: Limits | None = None) -> Outcome:
    """Run `program`, then `test` in its namespace; passed if neither raises.

    Raises SandboxError where the kernel can't confine the process, unless the limits allow that.
    """
    limits = limits or Limits()
    token = secrets.token_hex(16)
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    try:
        with tempfile.TemporaryDirectory(prefix="sandbox-") as directory:
            job = json.dumps(
                {
                    "program": program,
                    "test": test,
                    "token": token,
                    "pipe": write_end,
                    "directory": directory,
                    "allow_unconfined": limits.allow_unconfined,
                    "limits": {
                        "cpu_seconds": int(limits.seconds) + 1,
                        "memory_bytes": limits.memory_bytes,
                        "file_bytes": limits.file_bytes,
                        "processes": limits.processes,
                    },
                }
            )
            how = _run_child(job, directory, write_end, limits.seconds)
        return _verdict(_drain(read_end), token, how)
    finally:
        os.close(read_end)
        os.close(write_end)


def _run_child(job: str, directory: str, pipe: int, seconds: float) -> int | None:
    """The exit code; None after a timeout."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-B", str(_CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=directory,
        env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8", "HOME": directory},
        pass_fds=[pipe],
        start_new_session=True,
        text=True,
    )
    try:
        process.communicate(job, timeout=seconds)
        return process.returncode
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):  # its group, because a program that wasn't confined may have children
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _drain(pipe: int) -> bytes:
    try:
        return os.read(pipe, _PIPE_BYTES)
    except BlockingIOError:
        return b""


def _verdict(report: bytes, token: str, how: int | None) -> Outcome:
    if how is None:
        return Outcome("timeout")
    told, status, detail = (*report.decode(errors="replace").split(" ", 2), "", "")[:3]
    if told == token and status == "unconfined":
        raise SandboxError(
            f"this machine can't confine a program ({detail}); run in a container on Linux 5.13 or newer, or accept it "
            "with Limits(allow_unconfined=True)."
        )
    if told == token and status == "passed":
        return Outcome("passed")
    if told == token and status == "failed":
        return Outcome("failed", detail)
    return Outcome("died", f"ended with code {how} before its test did")
