"""Relaxed tokens of SGLang's requests: in each answer's `meta_info["mars_relaxed"]` and in the server's metrics.

SGLang carries auxiliary outputs to the host with its own copy of a step's results, so that nothing is waited for, and
hands them over when the step's tokens have become part of the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from eagle_mars.engines.sglang_admission import admitted

KEY = "mars_relaxed"
METRIC = "eagle_mars:relaxed_tokens_total"


@dataclass(frozen=True)
class HostFlags:
    """One step's flags on the host. flags: [B, W] bool per committed token, or None: nothing was relaxed."""

    flags: Tensor | None

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Append one 0 or 1 per new token to `req.customized_info`; called by SGLang before it streams."""
        rows = [[]] * len(batch.reqs) if self.flags is None else self.flags.tolist()
        total = 0
        for req, commit, row in zip(batch.reqs, commits, rows, strict=True):
            if commit is None or admitted(req.sampling_params) is None:
                continue
            info = req.customized_info = req.customized_info or {}
            told = info.setdefault(KEY, [])
            told += [0] * (commit.output_index - len(told))
            new = [int(flag) for flag in row[: len(commit.token_ids)]]
            told += new + [0] * (len(commit.token_ids) - len(new))
            total += sum(new)
        if total and _reports_metrics():
            _counter().inc(total)


@dataclass(frozen=True)
class DeviceFlags:
    """One step's flags on the device, for SGLang to copy."""

    flags: Tensor | None

    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> HostFlags:
        return HostFlags(None if self.flags is None else copy_tensor(self.flags))


def report(logits_output: Any, accept_index: Tensor, relaxed: Tensor | None) -> None:
    """Attach a step's flags to its output.

    accept_index: [B, W + 1] flat node indices of the accepted path, root first, -1 beyond it. relaxed: [B, M] bool or
    None. The token that follows the path is never a relaxed one.
    """
    from sglang.srt.managers.auxiliary_output import append_auxiliary_output
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().pp_size > 1:
        return  # SGLang sends auxiliary outputs between pipeline stages for its own kinds only
    flags = None
    if relaxed is not None:
        path = accept_index[:, 1:].long()
        flags = relaxed.flatten()[path.clamp(min=0)] & (path >= 0)
    logits_output.auxiliary_device_output = append_auxiliary_output(
        logits_output.auxiliary_device_output, DeviceFlags(flags)
    )


def _reports_metrics() -> bool:
    from sglang.srt.runtime_context import get_observability, get_parallel

    return get_observability().enable_metrics and get_parallel().attn_tp_rank == 0


@cache
def _counter() -> Any:
    """Made late: the collecting directory must be in the environment before prometheus_client is imported."""
    from prometheus_client import Counter

    return Counter(METRIC.removesuffix("_total"), "Draft tokens accepted by MARS relaxation.")
