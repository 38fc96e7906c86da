"""Verification written a second time, slowly: one sequence, a walk from node to node, Python numbers (or `Fraction`s).

It shares no code with eagle_mars.verify. Rows of `z` are raw logits, rows of `p` the warped distribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from eagle_mars.config import VerifyConfig


@dataclass
class Case:
    """One tree with its target rows. parents[0] == -1; other entries -1 are padding."""

    tokens: list[int]
    parents: list[int]
    z: list[list[float]]
    p: list[list[Any]]
    w: list[list[float]] = field(default_factory=list)  # warped logits: `mars-released` alone looks at them
    q: list[Any] = field(default_factory=list)

    def children(self, node: int) -> list[int]:
        return [i for i in range(1, len(self.parents)) if self.parents[i] == node]

    def tried(self, node: int) -> list[int]:
        """Children, repetitions of a token left out."""
        seen: set[int] = set()
        return [i for i in self.children(node) if self.tokens[i] not in seen and not seen.add(self.tokens[i])]

    def ranked(self, node: int) -> list[int]:
        row = self.z[node]
        return sorted(range(len(row)), key=lambda v: (-row[v], v))


@dataclass
class Outcome:
    path: list[int]
    relaxed: list[bool]
    next_token: int
    regret: float


def low_margin(case: Case, node: int, config: VerifyConfig) -> bool:
    if len(case.z[node]) == 1:
        return False
    t1, t2 = case.ranked(node)[:2]
    z1, z2 = case.z[node][t1], case.z[node][t2]
    if config.margin == "logit-gap":
        return z1 - z2 < (config.gap or 0)
    return config.theta is not None and config.theta < 1 and z1 > 0 and z2 > config.theta * z1


def follows_ratio(case: Case, node: int, config: VerifyConfig) -> bool:
    if config.rule != "mars-released" or not config.released_ratio or len(case.w[node]) == 1:
        return False
    w1, w2 = (case.w[node][t] for t in case.ranked(node)[:2])
    return w2 / (w1 + 1e-10) > config.theta


def first_by_coin(case: Case, node: int, coins: list[Any], divide: bool) -> int | None:
    """Children in draft order, each against its coin; the mass of a rejected child leaves the distribution."""
    rest = 1
    for i in case.tried(node):
        mass = case.p[node][case.tokens[i]]
        q = case.q[i] if divide else 1
        if mass > 0 and (rest <= 0 or coins[i] < mass / rest / q):
            return i
        rest -= mass
    return None


def child_with(case: Case, node: int, token: int) -> int | None:
    return next((i for i in case.tried(node) if case.tokens[i] == token), None)


def likely(case: Case, node: int, child: int, config: VerifyConfig, greedy: bool) -> bool:
    p, x, ranked = case.p[node], case.tokens[child], case.ranked(node)
    if config.rule == "typical":
        entropy = -sum(float(v) * math.log(v) for v in p if v > 0)
        return not greedy and p[x] > min(config.epsilon, config.alpha * math.exp(-entropy))
    rank = min(config.rank or {"topk-delta": 10, "prob-ratio": 3}[config.rule], len(p))
    if p[x] == 0 or case.z[node][x] < case.z[node][ranked[rank - 1]]:
        return False
    return p[x] >= (p[ranked[0]] - config.delta if config.rule == "topk-delta" else p[ranked[0]] * config.rho)


def options(
    case: Case, node: int, config: VerifyConfig, greedy: bool, coins: list[Any], protected: frozenset[int]
) -> tuple[int | None, list[int]]:
    """(exactly accepted child, children acceptable by relaxation, best first) at a node."""
    ranked = case.ranked(node)
    t1, t2 = (ranked * 2)[:2]
    top = child_with(case, node, t1)
    if config.rule == "mars-released" and not greedy:
        if not follows_ratio(case, node, config):
            return first_by_coin(case, node, coins, config.released_q == "draft"), []
        return None, [i for i in case.tried(node) if case.tokens[i] in (t1, t2) and case.p[node][case.tokens[i]]][:1]
    if config.rule in ("typical", "topk-delta", "prob-ratio"):
        loose = [i for i in case.tried(node) if i != top and likely(case, node, i, config, greedy)]
        loose = [i for i in loose if not {t1, case.tokens[i]} & protected]
        return top, sorted(loose, key=lambda i: ranked.index(case.tokens[i]))
    deterministic = greedy or config.rule == "mars-paper"
    exact = top if deterministic else first_by_coin(case, node, coins, False)
    if config.rule in ("exact", "mars-released") or not low_margin(case, node, config) or {t1, t2} & protected:
        return exact, []
    wanted = [t2] if deterministic else [t1, t2]
    relaxed = [
        i for t in wanted if (i := child_with(case, node, t)) is not None and i != (top if deterministic else None)
    ]
    if not greedy:
        relaxed = [i for i in relaxed if case.p[node][case.tokens[i]] > 0]
    if not deterministic and exact is not None:
        relaxed = []
    return exact, relaxed


def verify(
    case: Case,
    config: VerifyConfig,
    *,
    greedy: bool,
    coins: list[Any] | None = None,
    draw: Any = 0,
    protected: frozenset[int] = frozenset(),
    spent: float = 0.0,
) -> Outcome:
    """The rule's decision; `longest` by listing every acceptable path."""
    coins = coins or [1] * len(case.parents)
    cap = math.inf if config.max_relaxed_per_cycle is None else config.max_relaxed_per_cycle
    budget = math.inf if config.max_regret is None else config.max_regret

    def affordable(relaxed: list[bool], regret: float, own: float) -> bool:
        return sum(relaxed) + 1 <= cap and spent + regret < budget and spent + regret + own <= budget

    def ends(path: list[int], relaxed: list[bool], regret: float) -> list[tuple[list[int], list[bool], float]]:
        node = path[-1]
        exact, loose = options(case, node, config, greedy, coins, protected)
        if config.branch == "exact-first":
            loose = loose[:1] if exact is None else []
        found = [] if exact is None else ends([*path, exact], [*relaxed, False], regret)
        for child in loose:
            own = max(case.z[node]) - case.z[node][case.tokens[child]]
            if affordable(relaxed, regret, own):
                found += ends([*path, child], [*relaxed, True], regret + own)
        return [(path, relaxed, regret), *found]

    everything = ends([0], [False], 0.0)
    path, relaxed, regret = min(everything, key=lambda e: (-len(e[0]), sum(e[1]), e[2], e[0][-1]))
    last = path[-1]
    if greedy or config.rule == "mars-paper":
        return Outcome(path, relaxed, case.ranked(last)[0], regret)
    tested = config.rule in ("exact", "mars", "mars-released") and not follows_ratio(case, last, config)
    removed = {case.tokens[i] for i in case.children(last)} if tested else set()
    return Outcome(path, relaxed, inverse_cdf(case.p[last], draw, removed), regret)


def inverse_cdf(p: list[Any], draw: Any, removed: set[int]) -> int:
    mass = [0 if v in removed else x for v, x in enumerate(p)]
    if sum(mass) == 0:
        mass = p
    wanted, total = draw * sum(mass), 0
    for v, x in enumerate(mass):
        total += x
        if wanted < total:
            return v
    raise AssertionError("no mass")
