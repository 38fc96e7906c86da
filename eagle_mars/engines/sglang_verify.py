"""SGLang's verification of a draft tree: its kernels stay, what they read is made to pass where `mars` relaxes.

`around_sample` wraps `eagle_sample`, which applies penalties to the logits in place and calls one of three verifiers:

- greedy (`verify_tree_greedy_func`): `target_predict` of a node becomes the token of the child to follow;
- sampled tree (`tree_speculative_sampling_target_only`): a child passes if the node's coin is below the summed
  probability of the children up to it; the child to follow gets a probability of at least 1;
- sampled chain (`chain_speculative_sampling_triton`): a draft passes if coin * q < p; likewise.

Both sampled verifiers get their coins as arguments, so it is known which nodes accept a child anyway. A node at which a
child is followed is never the one whose row the next token is drawn from, so no draw sees a changed number.

A greedy request is one with top_k 1, as in SGLang itself (it turns temperature 0 into that); in a mixed batch it runs
through the sampled verifiers, and its runner-up may be followed although p is 0 there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from eagle_mars.config import SamplingConfig
from eagle_mars.engines.protection import protected_ids
from eagle_mars.engines.request import MarsRequest
from eagle_mars.engines.sglang_admission import admitted
from eagle_mars.engines.sglang_report import report
from eagle_mars.engines.tree import linked_tree, relaxed_children
from eagle_mars.tree import DraftTree
from eagle_mars.verify.plan import RowPlan, plan

logger = logging.getLogger("sglang.eagle_mars")
_STRICT = MarsRequest()


class Step:
    """One call of `eagle_sample` with a request that may be relaxed: what its verifier needs, and what came of it.

    logits: [B * M, V], the tensor that `eagle_sample` changes in place. relaxed: [B, M] bool once the verifier ran.
    """

    def __init__(self, options: tuple[tuple[MarsRequest, bool], ...], protected: tuple[int, ...], logits: Tensor):
        self.logits = logits
        self.plan = compiled(options, protected, logits.shape[-1], logits.device)
        self.relaxed: Tensor | None = None

    def mark(
        self, tree: DraftTree, levels: int, accepts: Tensor | None = None, possible: Tensor | None = None
    ) -> Tensor:
        """[B, M] bool: the children to follow by relaxation; see `relaxed_children`."""
        logits = self.logits.unflatten(0, (tree.batch, tree.nodes))
        self.relaxed = relaxed_children(tree, logits, self.plan, levels, accepts, possible)
        return self.relaxed


_step: ContextVar[Step | None] = ContextVar("eagle_mars_step", default=None)


@lru_cache(maxsize=16)
def compiled(
    options: tuple[tuple[MarsRequest, bool], ...], protected: tuple[int, ...], vocab_size: int, device: torch.device
) -> RowPlan:
    """The options of a batch as tensors: (request, greedy) per row. Batches keep their make-up for many steps."""
    ids = tuple(i for i in protected if i < vocab_size)
    return plan(
        [request.verify_config(ids) for request, _ in options],
        [SamplingConfig(temperature=0.0 if greedy else 1.0) for _, greedy in options],
        vocab_size=vocab_size,
        device=device,
    )


def around_sample(
    original: Callable[..., Any], verify_input: Any, batch: Any, logits_output: Any, *args: Any, **named: Any
) -> Any:
    """Hook on `eagle_sample(verify_input, batch, logits_output, ...)` -> (predict, accept_lens, accept_index)."""
    options = [] if batch.forward_mode.is_idle() else [admitted(req.sampling_params) for req in batch.reqs]
    if all(request is None for request in options):
        return original(verify_input, batch, logits_output, *args, **named)
    step = _begin(batch, options, logits_output.next_token_logits)
    before = _step.set(step)
    try:
        result = original(verify_input, batch, logits_output, *args, **named)
    finally:
        _step.reset(before)
    report(logits_output, result[2], None if step is None else step.relaxed)
    return result


def inside_step(prepare: Callable[[Step, dict[str, Any]], None]) -> Callable[..., Any]:
    """Hook on a verifier: `prepare` changes its keyword arguments where `eagle_sample` calls it in a step of ours."""

    def around(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        step = _step.get()
        if step is not None:
            prepare(step, named)
        return original(*args, **named)

    return around


def prepare_greedy(step: Step, named: dict[str, Any]) -> None:
    """Keyword arguments of `verify_tree_greedy_func`; target_predict: [B, M]."""
    levels = named["accept_index"].shape[1] - 1
    tree = linked_tree(named["candidates"], named["retrieve_next_token"], named["retrieve_next_sibling"], levels)
    named["target_predict"] = redirected(named["target_predict"], tree, step.mark(tree, levels))


def prepare_tree_sampling(step: Step, named: dict[str, Any]) -> None:
    """Keyword arguments of `tree_speculative_sampling_target_only`; uniform_samples: [B, M], a node's coin each."""
    levels = named["accept_index"].shape[1] - 1
    tree = linked_tree(named["candidates"], named["retrive_next_token"], named["retrive_next_sibling"], levels)
    p = child_probabilities(named["target_probs"], tree)
    mass = torch.zeros_like(p).scatter_add(1, tree.parents.clamp(min=0), p)
    possible = (p > 0) | step.plan.sampling.greedy.unsqueeze(1)
    favour(named["target_probs"], tree, step.mark(tree, levels, named["uniform_samples"] < mass, possible))


def prepare_chain_sampling(step: Step, named: dict[str, Any]) -> None:
    """Keyword arguments of `chain_speculative_sampling_triton`; draft_probs: [B, M - 1, V]."""
    tokens = named["candidates"].long()
    nodes = tokens.shape[1]
    tree = DraftTree.from_parents(tokens, torch.arange(-1, nodes - 1, device=tokens.device).expand_as(tokens))
    p, q = (child_probabilities(named[name], tree) for name in ("target_probs", "draft_probs"))
    proposed = (q > 0) & (q <= 1)  # the kernel rejects any other draft, whatever its p
    coins = named["uniform_samples"].gather(1, tree.parents.clamp(min=0))
    taken = proposed & (coins * q < p)
    accepts = torch.cat([taken[:, 1:], torch.zeros_like(taken[:, :1])], dim=1)
    possible = proposed & ((p > 0) | step.plan.sampling.greedy.unsqueeze(1))
    favour(named["target_probs"], tree, step.mark(tree, nodes - 1, accepts, possible))


def redirected(target_predict: Tensor, tree: DraftTree, relaxed: Tensor) -> Tensor:
    """[B, M] tokens that the greedy walk asks for at each node, with those of `relaxed` children at their parents."""
    spare = target_predict.new_zeros(tree.batch, 1)
    at = torch.where(relaxed, tree.parents, tree.nodes)
    return torch.cat([target_predict, spare], dim=1).scatter(1, at, tree.tokens)[:, : tree.nodes].contiguous()


def child_probabilities(probs: Tensor, tree: DraftTree) -> Tensor:
    """[B, M]: each node's token under its parent's row of probs [B, M or M - 1, V]; 0 for root and padding."""
    rows = torch.arange(tree.batch, device=probs.device).unsqueeze(1)
    return probs[rows, tree.parents.clamp(min=0), tree.tokens].masked_fill(tree.parents < 0, 0.0)


def favour(target_probs: Tensor, tree: DraftTree, relaxed: Tensor) -> None:
    """Add 1 to the probability of each relaxed child, in place, so that no coin below 1 can reject it.

    Accumulating leaves a repeated index harmless: everything but a relaxed child adds 0.
    """
    rows = torch.arange(tree.batch, device=target_probs.device).unsqueeze(1).expand_as(tree.parents)
    at = (rows, tree.parents.clamp(min=0), tree.tokens)
    target_probs.index_put_(at, relaxed.to(target_probs.dtype), accumulate=True)


def _begin(batch: Any, options: list[MarsRequest | None], logits: Tensor) -> Step | None:
    """The step to come; None where nothing can be relaxed in it."""
    rows = tuple(
        (_STRICT if request is None or _unfit(req) else request, req.sampling_params.top_k <= 1)
        for req, request in zip(batch.reqs, options, strict=True)
    )
    if all(request.strict for request, _ in rows):
        return None
    first = batch.reqs[0]
    protected = _protected(first.tokenizer, frozenset(first.eos_token_ids or ()))
    if protected is None:
        _warn_once(
            "The tokenizer doesn't tell its special tokens, so that MARS can't protect them: nothing is relaxed."
        )
        return None
    if len(rows) != len(batch.seq_lens):
        _warn_once("A batch has rows that belong to no request: MARS relaxes nothing in such a batch.")
        return None
    return Step(rows, protected, logits)


def _unfit(req: Any) -> bool:
    """Constraints that are known only once the request is scheduled."""
    return req.grammar is not None or req.custom_logit_processor is not None


@lru_cache(maxsize=8)
def _protected(tokenizer: Any, eos: frozenset[int]) -> tuple[int, ...] | None:
    return protected_ids(tokenizer, {*eos, *(getattr(tokenizer, "additional_stop_token_ids", None) or ())})


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)
