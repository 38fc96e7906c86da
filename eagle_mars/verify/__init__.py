"""Verification of a draft tree by the target's logits: a function of tree, logits, options and coins, nothing else."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Literal

from torch import Tensor

from eagle_mars.config import SamplingConfig, VerifyConfig
from eagle_mars.errors import ConfigError
from eagle_mars.sampling import Coins, History
from eagle_mars.tree import DraftTree
from eagle_mars.verify.plan import COMPARATORS, RowPlan, plan
from eagle_mars.verify.reference import verify_reference
from eagle_mars.verify.verdict import Fault, HostVerdict, Verdict, unpack

__all__ = ["Fault", "HostVerdict", "RowPlan", "Verdict", "plan", "unpack", "verify"]

Backend = Literal["auto", "reference", "triton"]
MAX_KERNEL_NODES = 256


def verify(
    tree: DraftTree,
    logits: Tensor,
    config: VerifyConfig | Sequence[VerifyConfig] | RowPlan,
    coins: Coins | None = None,
    *,
    sampling: SamplingConfig | Sequence[SamplingConfig] | None = None,
    special_ids: Collection[int] = (),
    spent_regret: Tensor | None = None,
    history: History | None = None,
    backend: Backend = "auto",
    check: bool = True,
) -> Verdict:
    """Choose the accepted path of each row's draft tree and the token that follows it.

    logits: [B, M, V] raw target logits, row m those after node m; any float dtype, any strides.
    config: options of all rows, of each row, or both compiled by `plan` (then `sampling` and `special_ids` are in it).
    coins: needed where a row has temperature > 0. spent_regret: [B] nats that each response has spent (`max_regret`).
    history: needed where a row has a penalty.
    backend: "auto" takes the Triton kernels where they apply (CUDA or ROCm tensors, `exact` and `mars*` rules, at most
        256 nodes) and the reference elsewhere; the other two insist.
    check: read the fault flag and raise `LogitsError` on NaN or a row without a finite maximum. False leaves the flag
        in `Verdict.invalid` and reads nothing from the device.

    Raises `ConfigError` when shapes or options contradict each other, `LogitsError` as above.
    """
    if isinstance(config, RowPlan):
        if sampling is not None or special_ids:
            raise ConfigError("A compiled plan already holds sampling and special_ids; give them to plan() instead.")
        rows = config
    else:
        rows = plan(
            config,
            sampling,
            vocab_size=logits.shape[-1],
            special_ids=special_ids,
            batch=tree.batch,
            device=logits.device,
        )
    _check_shapes(tree, logits, rows, coins)
    implementation = verify_reference
    if _uses_triton(backend, tree, logits, rows):
        from eagle_mars.verify.triton_backend import verify_triton  # imported late: Triton is no need of a CPU

        implementation = verify_triton
    verdict = implementation(tree, logits, rows, coins, spent_regret, history)
    if check:
        verdict.raise_if_invalid()
    return verdict


def _uses_triton(backend: Backend, tree: DraftTree, logits: Tensor, rows: RowPlan) -> bool:
    if backend == "reference" or (backend == "auto" and not logits.is_cuda):
        return False
    unfit = None
    if not logits.is_cuda:
        unfit = "the logits are not on a GPU"
    elif rows.rules & COMPARATORS:
        unfit = f"rule {', '.join(sorted(rows.rules & COMPARATORS))} has no kernel"
    elif tree.nodes > MAX_KERNEL_NODES:
        unfit = f"{tree.nodes} nodes exceed the kernels' {MAX_KERNEL_NODES}"
    elif not _triton_installed():
        unfit = "Triton is not installed"
    if unfit and backend == "triton":
        raise ConfigError(f'backend="triton" is impossible: {unfit}; use backend="auto" or "reference".')
    return unfit is None


@cache
def _triton_installed() -> bool:
    return find_spec("triton") is not None


def _check_shapes(tree: DraftTree, logits: Tensor, rows: RowPlan, coins: Coins | None) -> None:
    expected = (tree.batch, tree.nodes, rows.vocab_size)
    if tuple(logits.shape) != expected:
        raise ConfigError(f"logits have shape {tuple(logits.shape)}, but the tree and plan ask for {expected}.")
    if rows.batch != tree.batch:
        raise ConfigError(
            f"The plan holds {rows.batch} rows, but the tree has {tree.batch}; compile one option set per row."
        )
    if coins is None:
        if rows.sampling.draws:
            raise ConfigError("temperature > 0 needs coins; pass coins=CoinStream(seeds).next(tree.nodes).")
    elif coins.accept.shape != tree.tokens.shape or coins.draw.shape != (tree.batch,):
        raise ConfigError(
            f"coins have shapes {tuple(coins.accept.shape)} and {tuple(coins.draw.shape)}, "
            f"but the tree asks for {tuple(tree.tokens.shape)} and {(tree.batch,)}."
        )
