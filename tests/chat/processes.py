"""Servers as real processes on free loopback ports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

COMMAND = [sys.executable, "-c", "from eagle_mars.cli import main; main()"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1,localhost"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """`eagle-mars ARGUMENTS`, with its output in a file."""

    def __init__(self, log: Path, *arguments: str, **environment: str) -> None:
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*COMMAND, *arguments], stdout=output, stderr=output, env={**ENVIRONMENT, **environment}
            )

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; returns the exit status."""
        self.process.send_signal(number)
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def wait_until(self, true: Callable[[], object], seconds: float = 240) -> None:
        """Poll until `true()`; a server that ends meanwhile fails at once, with the end of its output."""
        deadline = time.monotonic() + seconds
        while not true():
            output = self.log.read_text("utf-8", errors="replace")[-2000:]
            assert self.process.poll() is None, f"the server has ended: {output}"
            assert time.monotonic() < deadline, f"nothing after {seconds} s: {output}"
            time.sleep(0.2)
