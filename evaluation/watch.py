"""Watchers that stand in for `verify` in an engine and measure what it sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from torch import Tensor

from eagle_mars.config import SamplingConfig, VerifyConfig
from eagle_mars.sampling import Coins, SamplingPlan, warp
from eagle_mars.tree import DraftTree
from eagle_mars.verify import RowPlan, Verdict, plan, verify
from evaluation.law import Node, law, total_variation

_HAS_LAW = ("mars", "mars-paper", "mars-released")


@dataclass
class LawWatch:
    """Measures how far the law of every node on the accepted path is from the target's distribution."""

    config: VerifyConfig
    sampling: SamplingPlan
    protected: frozenset[int]
    distances: list[float] = field(default_factory=list)
    seconds: float = 0.0  # its own, which are no part of decoding

    def __call__(self, tree: DraftTree, logits: Tensor, *arguments: Any, **options: Any) -> Verdict:
        verdict = verify(tree, logits, *arguments, **options)
        started = perf_counter()
        if self.sampling.draws and self.config.rule in _HAS_LAW:
            for index in walked(verdict):
                node = _node(tree, logits, index, self.sampling)
                self.distances.append(total_variation(law(node, self.config, self.protected), node.p))
        self.seconds += perf_counter() - started
        return verdict


def _node(tree: DraftTree, logits: Tensor, index: int, sampling: SamplingPlan) -> Node:
    children = (tree.parents[0] == index).nonzero().flatten()
    w = warp(logits[:, index : index + 1], sampling)[0, 0]
    return Node(
        logits=logits[0, index],
        p=w.double().softmax(-1),
        w=w,
        children=tree.tokens[0, children].tolist(),
        q=tree.draft_logprob[0, children].exp().tolist(),
    )


@dataclass
class Replay:
    """Lets `verify` go on as asked and asks, at every tree, how many drafts other options would have accepted.

    So all candidates are judged on the same trees, logits and coins: those of one strict run.
    accepted, regret: per candidate, accepted drafts and nats of every cycle. z1, z2: the two best raw logits of every
    walked node.
    """

    candidates: Mapping[str, VerifyConfig]
    sampling: SamplingConfig
    special_ids: Sequence[int]
    accepted: dict[str, list[int]] = field(default_factory=dict)
    regret: dict[str, list[float]] = field(default_factory=dict)
    z1: list[float] = field(default_factory=list)
    z2: list[float] = field(default_factory=list)
    _plans: dict[str, RowPlan] = field(default_factory=dict)

    def __call__(
        self, tree: DraftTree, logits: Tensor, options: RowPlan, coins: Coins | None, **others: Any
    ) -> Verdict:
        verdict = verify(tree, logits, options, coins, **others)
        best = logits[0, walked(verdict)].float().topk(2).values
        self.z1 += best[:, 0].tolist()
        self.z2 += best[:, 1].tolist()
        for name, config in self.candidates.items():
            if name not in self._plans:
                self._plans[name] = self._compile(config, logits)
            other = verify(tree, logits, self._plans[name], coins, check=False)
            self.accepted.setdefault(name, []).append(int(other.n_accepted))
            self.regret.setdefault(name, []).append(float(other.regret))
        return verdict

    def _compile(self, config: VerifyConfig, logits: Tensor) -> RowPlan:
        return plan(
            config,
            self.sampling,
            vocab_size=logits.shape[-1],
            special_ids=self.special_ids,
            batch=1,
            device=logits.device,
        )


def walked(verdict: Verdict) -> Tensor:
    """[n] int64: the nodes of the accepted path of the only row, the root first."""
    return verdict.path[0, : int(verdict.n_accepted[0]) + 1]
