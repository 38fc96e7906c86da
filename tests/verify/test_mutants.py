"""Plausible mistakes, each put into the reference, and the check that notices it.

A mutant rewrites one expression of one function; the check named beside it must then fail. The same checks pass on the
untouched code, here and in the suites that they come from. `docs/verification.md` lists the mutants.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_mars.config import SamplingConfig, VerifyConfig
from eagle_mars.errors import LogitsError
from eagle_mars.sampling import Coins
from eagle_mars.tree import DraftTree
from eagle_mars.verify import HostVerdict, reference, rules, statistics, unpack, verify
from eagle_mars.verify.statistics import Candidates
from tests.verify.test_law import check_exact_returns_the_target, check_formula
from tests.verify.test_reference import CONFIGS, SAMPLINGS, check_equals_oracle

NEG = float("-inf")
ROOT = Path(__file__).parents[2]


def decide(
    children: list[int],
    row: list[float],
    config: VerifyConfig,
    *,
    temperature: float = 0.0,
    coin: float = 0.999,
    spent: float = 0.0,
    **sampling: Any,
) -> HostVerdict:
    """The verdict on a root with those children, all nodes having the same logits."""
    nodes = len(children) + 1
    tree = DraftTree.from_parents(torch.tensor([[0, *children]]), torch.tensor([[-1] + [0] * len(children)]))
    verdict = verify(
        tree,
        torch.tensor(row).expand(1, nodes, -1),
        config,
        Coins(torch.full((1, nodes), coin), torch.tensor([0.5], dtype=torch.float64)),
        sampling=SamplingConfig(temperature=temperature, **sampling),
        spent_regret=torch.tensor([spent], dtype=torch.float64),
    )
    return unpack(verdict.pack(tree), tree.max_depth)[0]


def check_zero_probability() -> None:
    """A coin of exactly 0 doesn't accept what the target can't say."""
    for rule in ("exact", "mars", "mars-released"):
        verdict = decide([2], [1.0, 0.0, NEG], VerifyConfig(rule=rule), temperature=1.0, coin=0.0)
        assert verdict.tokens == []


def check_masked_runner_up() -> None:
    """Truncated away, a runner-up at low margin stays refused."""
    for rule in ("mars", "mars-paper", "mars-released"):
        assert decide([1], [5.0, 4.9, 0.0], VerifyConfig(rule=rule), temperature=1.0, top_k=1).tokens == []
    assert decide([1], [-5.0, -5.1, -9.0], VerifyConfig(rule="mars-released"), temperature=1.0, top_k=1).tokens == []


def check_thresholds_met_exactly() -> None:
    assert decide([1], [10.0, 9.0], VerifyConfig(theta=0.9)).tokens == []
    assert decide([1], [10.0, 9.0], VerifyConfig(margin="logit-gap", gap=1.0)).tokens == []
    assert decide([1], [0.0, -0.0], VerifyConfig(theta=0.9)).tokens == []
    assert decide([1], [-1.0, -9.0], VerifyConfig(theta=0.9)).tokens == []
    assert decide([1], [10.0, 9.001], VerifyConfig(theta=0.9)).tokens == [1]


def check_top1_before_runner_up() -> None:
    """Both are children, the runner-up drafted first."""
    for temperature in (0.0, 1.0):
        verdict = decide([1, 0], [5.0, 4.9, 4.8], VerifyConfig(), temperature=temperature)
        assert verdict.tokens == [0]
        assert verdict.relaxed == [temperature > 0]


def check_exact_child_before_relaxed() -> None:
    """The coins accept a third token; relaxation has no say although the margin is low and the top-1 is a child."""
    assert decide([2, 0], [5.0, 4.9, 4.8], VerifyConfig(), temperature=1.0, coin=0.1).tokens == [2]


def check_lowest_id_on_ties() -> None:
    assert decide([1, 2], [0.0, 3.0, 3.0, 3.0], VerifyConfig(rule="exact")).tokens == [1]
    assert decide([3, 2], [0.0, 3.0, 3.0, 3.0], VerifyConfig()).tokens == [2]


def check_protection() -> None:
    """Neither accepted nor overridden."""
    for protected in (0, 1):
        assert decide([1], [5.0, 4.9], VerifyConfig(protected_ids=(protected,))).tokens == []
    assert decide([2], [5.0, 4.9, 4.8], VerifyConfig(rule="topk-delta", protected_ids=(0,))).tokens == []


def check_budget() -> None:
    config = VerifyConfig(max_regret=1.0)
    assert decide([1], [10.0, 9.5], config).tokens == [1]
    assert decide([1], [10.0, 9.5], config, spent=0.5).tokens == [1]
    assert decide([1], [10.0, 9.5], config, spent=0.75).tokens == []
    assert decide([1], [10.0, 10.0], config, spent=1.0).tokens == []


def check_longest_ties() -> None:
    """Two paths of two drafts each: fewer relaxed nodes win, then less regret, never the order of the nodes."""
    tree = DraftTree.from_parents(torch.tensor([[0, 0, 1, 1, 0]]), torch.tensor([[-1, 0, 0, 1, 2]]))
    even, near, far = [5.0, 4.875, 0.0], [4.875, 5.0, 0.0], [5.0, 4.5625, 0.0]
    for after_2, expected in ((even, [0, 2, 4]), (near, [0, 1, 3])):
        logits = torch.tensor([[even, far, after_2, even, even]])
        verdict = verify(tree, logits, VerifyConfig(theta=0.9, branch="longest"))
        assert verdict.path[0, :3].tolist() == expected


def check_faults() -> None:
    for row in ([float("nan"), 1.0], [NEG, NEG], [float("inf"), 1.0]):
        with pytest.raises(LogitsError):
            decide([1], row, VerifyConfig())


def oracle_check(name: str, sampling: str) -> Callable[[], None]:
    def check() -> None:
        check_equals_oracle(CONFIGS[name], SAMPLINGS[sampling])

    check.__name__ = f"equals_oracle[{name}-{sampling}]"
    return check


def exact_law() -> None:
    check_exact_returns_the_target(sizes=(3, 4))


exact_law.__name__ = "law[exact]"


def law_of(name: str) -> Callable[[], None]:
    def check() -> None:
        check_formula(name, sizes=(3, 4))

    check.__name__ = f"law[{name}]"
    return check


@dataclass(frozen=True)
class Mutant:
    """Replace `old` by `new` in `function` of `owner`; `check` has to fail."""

    name: str
    owner: Any
    function: str
    old: str
    new: str
    check: Callable[[], None]

    def build(self) -> Any:
        member = inspect.getattr_static(self.owner, self.function)
        body = member.func if isinstance(member, cached_property) else member
        source = textwrap.dedent(inspect.getsource(body)).replace("@cached_property\n", "")
        assert self.old in source, "the mutant no longer fits the code"
        namespace: dict[str, Any] = {}
        exec(source.replace(self.old, self.new), body.__globals__, namespace)
        mutated = namespace[self.function]
        if isinstance(member, cached_property):
            mutated = cached_property(mutated)
            mutated.__set_name__(self.owner, self.function)
        return mutated


MUTANTS = [
    Mutant("the released p/q test", rules, "_coin_below", "< mass)", "< mass / c.tree.draft_logprob.exp())", exact_law),
    Mutant("<= for < at the coin", rules, "_coin_below", "< mass)", "<= mass)", check_zero_probability),
    Mutant("no renormalisation", rules, "_coin_below", "(1 - c.mass_before).clamp(min=0)", "1", exact_law),
    Mutant("later siblings counted", Candidates, "mass_before", "self.earlier", "self.siblings", exact_law),
    Mutant("missing residual", reference, "_next_token", ", removed[:, :vocab]", "", exact_law),
    Mutant("residual of all nodes", reference, "_next_token", "(c.tree.parents == last.unsqueeze(1))",
           "(c.tree.parents >= 0)", exact_law),
    Mutant("residual for the paper's rule", rules, "mars_paper", "always)", "~always)", law_of("mars-paper")),
    Mutant("residual after the ratio", rules, "mars_released", "c.valid & ~follows_ratio, greedy", "c.valid, greedy",
           law_of("mars-released")),
    Mutant("repeated sibling tried again", Candidates, "valid", " & ~repeats.any(-1)", "", exact_law),
    Mutant(">= for > at theta", Candidates, "low_margin", "top.z2 > plan", "top.z2 >= plan",
           check_thresholds_met_exactly),
    Mutant("<= for < at the gap", Candidates, "low_margin", "< plan.gap", "<= plan.gap", check_thresholds_met_exactly),
    Mutant("ratio by division", Candidates, "low_margin", "(top.z1 > 0) & (top.z2 > plan.theta.unsqueeze(1) * top.z1)",
           "top.z2 / top.z1 > plan.theta.unsqueeze(1)", check_thresholds_met_exactly),
    Mutant("ratio of log-probabilities", Candidates, "low_margin", "top, plan = self.top, self.plan",
           "plan = self.plan; top = top2(self.logits.float().log_softmax(-1))", oracle_check("mars", "t0.7-k3")),
    Mutant("gap of warped logits", Candidates, "low_margin", "top, plan = self.top, self.plan",
           "plan = self.plan; top = top2(temper(self.logits, plan.sampling))", oracle_check("mars-gap", "t0.7-k3")),
    Mutant("highest id on ties", statistics, "top2", "at = values.argmax(-1, keepdim=True)",
           "at = values.shape[-1] - 1 - values.flip(-1).argmax(-1, keepdim=True)", check_lowest_id_on_ties),
    Mutant("draft order for exact-first", reference, "_beaten", "better).any", "c.earlier).any",
           check_top1_before_runner_up),
    Mutant("relaxed before exact", rules, "mars", "~c.any_sibling(accepted)", "torch.ones_like(accepted)",
           oracle_check("mars-longest", "t1")),
    Mutant("relaxed beside exact", reference, "_choose_path", "& ~beside_exact & ~", "& ~",
           oracle_check("mars", "greedy")),
    Mutant("runner-up alone rescues", rules, "mars", "(c.is_top1 | c.is_top2)", "c.is_top2",
           check_top1_before_runner_up),
    Mutant("any child rescues", rules, "mars", "(c.is_top1 | c.is_top2)", "c.valid", law_of("mars")),
    Mutant("masked runner-up rescues", rules, "mars", " & c.has_mass", "", check_masked_runner_up),
    Mutant("masked runner-up by the ratio", rules, "mars_released", " & c.has_mass", "", check_masked_runner_up),
    Mutant("last sibling by the ratio", rules, "mars_released", "_first(c, (c.is_top1 | c.is_top2) & c.has_mass)",
           "(c.is_top1 | c.is_top2) & c.has_mass", law_of("mars-released")),
    Mutant("overridden token unprotected", rules, "_relaxable", "c.plan.protected.gather(1, c.top.t1) | ", "",
           check_protection),
    Mutant("accepted token unprotected", rules, "_relaxable", " | c.plan.protected.gather(1, c.top.t2)", "",
           check_protection),
    Mutant("comparator overrides a protected token", rules, "_likely",
           "c.of_parent(c.plan.protected.gather(1, c.top.t1)) | ", "", check_protection),
    Mutant("one relaxed token too few", reference, "_choose_path", "count <= plan", "count < plan",
           oracle_check("mars-capped", "greedy")),
    Mutant("cap forgotten", reference, "_choose_path", " & (count <= plan.max_relaxed.unsqueeze(1))", "",
           oracle_check("mars-capped", "greedy")),
    Mutant("budget of each cycle anew", reference, "_choose_path", "plan.max_regret - spent_regret",
           "plan.max_regret", check_budget),
    Mutant("budget overdrawn", reference, "_choose_path", " & (total <= budget.unsqueeze(1))", "", check_budget),
    Mutant("spent budget still relaxes ties", reference, "_choose_path",
           "(c.of_parent(total) < budget.unsqueeze(1)) & ", "", check_budget),
    Mutant("longest ignores relaxed count", reference, "_choose_path", "tree.nodes - count", "tree.nodes",
           check_longest_ties),
    Mutant("longest ignores regret", reference, "_choose_path", "total.masked_fill(~best",
           "(total * 0).masked_fill(~best", check_longest_ties),
    Mutant("NaN overlooked", Candidates, "fault", "z1.isnan()", "z1.isneginf()", check_faults),
    Mutant("infinite rows overlooked", Candidates, "fault", "z1.isinf()", "z1.isnan()", check_faults),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_killed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutated = mutant.build()
    monkeypatch.setattr(mutant.owner, mutant.function, mutated)
    for name, rule in rules.REGISTRY.items():
        if rule.__name__ == mutant.function:
            monkeypatch.setitem(rules.REGISTRY, name, mutated)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        mutant.check()


PLAIN_CHECKS = [
    check for name, check in globals().items() if name.startswith("check_") and check.__module__ == __name__
]


@pytest.mark.parametrize("check", PLAIN_CHECKS, ids=lambda check: check.__name__)
def test_untouched_code_passes(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_documents_list_the_mutant(mutant: Mutant) -> None:
    assert f"| {mutant.name} | `{mutant.check.__name__}` |" in (ROOT / "docs" / "verification.md").read_text()
