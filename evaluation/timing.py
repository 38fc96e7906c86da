"""What benchmarks begin with: a quiet transformers, the threads, and the clock that they read."""

from __future__ import annotations

from time import perf_counter, thread_time

import torch
import typer
from transformers.utils import logging as hf_logging

from eagle_mars.tuning.costs import Clock


def begin(threads: int, cpu_time: bool) -> Clock:
    """Set the process up; wall time, or with `cpu_time` one thread's CPU seconds.

    Raises typer.BadParameter for the CPU seconds of several threads, which nothing here can add up.
    """
    if cpu_time and threads != 1:
        raise typer.BadParameter("only one thread's CPU seconds can be counted", param_hint="--cpu-time")
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    return thread_time if cpu_time else perf_counter
