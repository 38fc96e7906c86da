"""The law of every rule, integrated exactly: all ordered trees of at most five nodes, vocabularies of two to four.

A verdict is constant while coins stay between their thresholds, so one run per cell, weighed with the cell's exact
volume, gives the probability of every emitted sequence as a fraction. `exact` has to return the target's distribution;
each lossy rule the formula written here.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch

from eagle_mars.config import SamplingConfig, VerifyConfig
from eagle_mars.sampling import Coins
from eagle_mars.tree import DraftTree
from eagle_mars.verify import plan, unpack, verify
from tests.verify.oracle import Case, child_with, follows_ratio, likely, low_margin

Law = dict[tuple[int, ...], Fraction]
SHIFT = 6.0  # added to log p, so that logits are positive and the ratio has something to say

CONFIGS = {
    "exact": VerifyConfig(rule="exact"),
    "mars": VerifyConfig(),
    "mars-gap": VerifyConfig(margin="logit-gap", gap=0.8),
    "mars-protected": VerifyConfig(theta=0.8, protected_ids=(1,)),
    "mars-paper": VerifyConfig(rule="mars-paper"),
    "mars-released": VerifyConfig(rule="mars-released"),
    "mars-released-no-ratio": VerifyConfig(rule="mars-released", released_ratio=False),
    "mars-released-q1": VerifyConfig(rule="mars-released", released_q="one"),
    "typical": VerifyConfig(rule="typical", epsilon=0.41),
    "topk-delta": VerifyConfig(rule="topk-delta", delta=0.11),
    "prob-ratio": VerifyConfig(rule="prob-ratio", rank=2, rho=0.45),
}


@dataclass
class Cell:
    """Coins in the middle of one cell, and its volume."""

    case: int
    accept: list[float]
    draw: float
    volume: Fraction


def shapes(nodes: int) -> Iterator[list[int]]:
    """Parents of all ordered trees with that many nodes, breadth first: Catalan(nodes - 1) of them."""

    def extend(parents: list[int]) -> Iterator[list[int]]:
        if len(parents) == nodes:
            yield parents
            return
        for parent in range(max(parents[-1], 0), len(parents)):
            yield from extend([*parents, parent])

    return extend([-1])


def distribution(vocab: int, generator: random.Random) -> list[Fraction]:
    weights = [0]
    while sum(weights) == 0:
        weights = [generator.choice([0, 1, 2, 3, 5, 5]) for _ in range(vocab)]
    return [Fraction(w, sum(weights)) for w in weights]


def cases(nodes: int, temperature: float) -> list[Case]:
    generator, result = random.Random(nodes), []
    for parents in shapes(nodes):
        for vocab in (2, 3, 4):
            tokens = [generator.randrange(vocab) for _ in parents]
            p = [distribution(vocab, generator) for _ in parents]
            z = [(torch.tensor([float(x) for x in row]).log() * temperature + SHIFT).tolist() for row in p]
            w = (torch.tensor(z) / temperature).tolist()
            q = [Fraction(generator.randint(1, 6), 6) for _ in parents]
            result.append(Case(tokens, parents, z, p, w, q))
    return result


def cells(number: int, case: Case, divide: bool) -> Iterator[Cell]:
    borders = [[Fraction(0), Fraction(1)] for _ in case.parents]
    draws = {Fraction(0), Fraction(1)}
    for node in range(len(case.parents)):
        rest = Fraction(1)
        for child in case.tried(node):
            mass = case.p[node][case.tokens[child]]
            threshold = mass / rest / (case.q[child] if divide else 1) if rest else Fraction(0)
            borders[child] = sorted({Fraction(0), min(threshold, Fraction(1)), Fraction(1)})
            rest -= mass
        for removed in ({case.tokens[i] for i in case.children(node)}, set()):
            kept = [Fraction(0) if v in removed else x for v, x in enumerate(case.p[node])]
            if sum(kept):
                draws |= {total / sum(kept) for total in itertools.accumulate(kept)}
    edges = [[*itertools.pairwise(b)] for b in [*borders, sorted(draws)]]
    for combination in itertools.product(*edges):
        volume = Fraction(1)
        for low, high in combination:
            volume *= high - low
        middle = [float(low + high) / 2 for low, high in combination]
        yield Cell(number, middle[:-1], middle[-1], volume)


def implemented_laws(collection: list[Case], config: VerifyConfig, temperature: float) -> list[Law]:
    """Integrate `verify` over all coins, one law per case; cases share the number of nodes."""
    divide = config.rule == "mars-released" and config.released_q == "draft"
    rows = [cell for number, case in enumerate(collection) for cell in cells(number, case, divide)]
    laws: list[Law] = [defaultdict(Fraction) for _ in collection]
    for vocab in {len(case.z[0]) for case in collection}:
        mine = [cell for cell in rows if len(collection[cell.case].z[0]) == vocab]
        chosen = [collection[cell.case] for cell in mine]
        tree = DraftTree.from_parents(
            torch.tensor([case.tokens for case in chosen]),
            torch.tensor([case.parents for case in chosen]),
            torch.tensor([[float(q) for q in case.q] for case in chosen]).log(),
        )
        coins = Coins(torch.tensor([c.accept for c in mine]), torch.tensor([c.draw for c in mine], dtype=torch.float64))
        compiled = plan(config, SamplingConfig(temperature=temperature), vocab_size=vocab, batch=tree.batch)
        verdict = verify(tree, torch.tensor([case.z for case in chosen]), compiled, coins)
        for cell, host in zip(mine, unpack(verdict.pack(tree), tree.max_depth), strict=True):
            laws[cell.case][(*host.tokens, host.next_token)] += cell.volume
    return laws


def target_law(case: Case, emitted: tuple[int, ...]) -> Fraction:
    """Probability that plain sampling from the target begins with `emitted`."""
    node: int | None = 0
    probability = Fraction(1)
    for token in emitted:
        assert node is not None, "emitted beyond the tree"
        probability *= case.p[node][token]
        node = child_with(case, node, token)
    return probability


def formula(case: Case, node: int, config: VerifyConfig) -> Law:
    """The written law of a rule from `node` on: emitted suffix -> probability."""
    p, ranked, tried = case.p[node], case.ranked(node), case.tried(node)
    t1, t2 = ranked[:2]
    followed: dict[int, Fraction] = defaultdict(Fraction)  # child -> probability of following it
    ending: list[Fraction] = [Fraction(0)] * len(p)  # token -> probability that the path ends here with it
    low = low_margin(case, node, config) and not {t1, t2} & set(config.protected_ids or ())
    with_token = {case.tokens[i]: i for i in tried}

    if config.rule == "mars-paper":
        follow = next((with_token[t] for t in ([t1, t2] if low else [t1]) if t in with_token and p[t] > 0), None)
        if follow is None:
            ending[t1] = Fraction(1)
        else:
            followed[follow] = Fraction(1)
    elif config.rule in ("typical", "topk-delta", "prob-ratio"):
        good = [i for i in tried if case.tokens[i] == t1 or likely(case, node, i, config, greedy=False)]
        if good:
            followed[min(good, key=lambda i: ranked.index(case.tokens[i]))] = Fraction(1)
        else:
            ending = list(p)
    elif follows_ratio(case, node, config):
        top = [i for i in tried if case.tokens[i] in (t1, t2) and p[case.tokens[i]] > 0]
        if top:
            followed[top[0]] = Fraction(1)
        else:
            ending = list(p)
    else:
        divide = config.rule == "mars-released" and config.released_q == "draft"
        reached, rest = Fraction(1), Fraction(1)
        for child in tried:
            mass = p[case.tokens[child]]
            chance = min(Fraction(1), mass / rest / (case.q[child] if divide else 1)) if rest else Fraction(0)
            followed[child] += reached * chance
            reached *= 1 - chance
            rest -= mass
        loose = [with_token[t] for t in (t1, t2) if t in with_token and p[t] > 0]
        if config.rule == "mars" and low and loose:
            followed[loose[0]] += reached
        elif rest:
            ending = [Fraction(0) if v in with_token else reached * x / rest for v, x in enumerate(p)]

    law: Law = defaultdict(Fraction)
    for token, probability in enumerate(ending):
        law[(token,)] += probability
    for child, probability in followed.items():
        if probability:
            for suffix, inner in formula(case, child, config).items():
                law[(case.tokens[child], *suffix)] += probability * inner
    return {emitted: probability for emitted, probability in law.items() if probability}


def check_exact_returns_the_target(temperature: float = 1.0, sizes: tuple[int, ...] = (1, 2, 3, 4, 5)) -> None:
    for nodes in sizes:
        collection = cases(nodes, temperature)
        for case, law in zip(collection, implemented_laws(collection, CONFIGS["exact"], temperature), strict=True):
            assert sum(law.values()) == 1
            for emitted, probability in law.items():
                assert probability == target_law(case, emitted)


def check_formula(name: str, temperature: float = 1.0, sizes: tuple[int, ...] = (1, 2, 3, 4, 5)) -> None:
    for nodes in sizes:
        collection = cases(nodes, temperature)
        for case, law in zip(collection, implemented_laws(collection, CONFIGS[name], temperature), strict=True):
            assert law == formula(case, 0, CONFIGS[name])


@pytest.mark.parametrize("temperature", [0.25, 1.0, 2.0])
def test_exact_returns_the_target(temperature: float) -> None:
    check_exact_returns_the_target(temperature)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "exact"])
def test_lossy_rules_have_their_written_law(name: str) -> None:
    check_formula(name, 1.0)
    check_formula(name, 0.5, sizes=(4,))


def test_mars_differs_from_the_target_only_by_rescues() -> None:
    """Where every child is kept off relaxation by protection, mars is exact: the formula itself says so."""
    everything = VerifyConfig(protected_ids=(0, 1, 2, 3))
    for case in cases(4, 1.0):
        config = everything.replace(protected_ids=tuple(range(len(case.z[0]))))
        assert formula(case, 0, config) == formula(case, 0, CONFIGS["exact"])
    collection = [case for case in cases(4, 1.0) if len(case.z[0]) == 4]
    for case, law in zip(collection, implemented_laws(collection, everything, 1.0), strict=True):
        assert law == formula(case, 0, CONFIGS["exact"])
