"""Properties that hold for every tree, found by hypothesis: what is promised to a user, stated as code."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle_mars.config import SamplingConfig, VerifyConfig
from eagle_mars.errors import ConfigError, LogitsError
from eagle_mars.sampling import Coins, warp
from eagle_mars.tree import DraftTree
from eagle_mars.verify import Verdict, plan, unpack, verify
from tests.verify.generated import random_coins, random_logits, random_tree

RULES = ("exact", "mars", "mars-paper", "mars-released", "typical", "topk-delta", "prob-ratio")
BATCH = 24
profile = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

seeds = st.integers(0, 2**20)
temperatures = st.sampled_from([0.0, 0.3, 1.0, 1.7])
thetas = st.floats(0.05, 0.999)


@dataclasses.dataclass
class Inputs:
    tree: DraftTree
    logits: torch.Tensor
    coins: Coins

    def verify(self, config: VerifyConfig, sampling: SamplingConfig, **changes: torch.Tensor) -> Verdict:
        return verify(self.tree, changes.get("logits", self.logits), config, self.coins, sampling=sampling)


def inputs(seed: int, nodes: int = 9, vocab: int = 6) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    tree = random_tree(BATCH, nodes, vocab, generator)
    return Inputs(tree, random_logits(BATCH, nodes, vocab, generator, tree), random_coins(BATCH, nodes, generator))


def assert_identical(one: Verdict, other: Verdict) -> None:
    for field in dataclasses.fields(Verdict):
        assert torch.equal(getattr(one, field.name), getattr(other, field.name)), field.name


@profile
@given(seeds, temperatures)
def test_relaxation_switched_off_is_exact_bit_for_bit(seed: int, temperature: float) -> None:
    given_, sampling = inputs(seed), SamplingConfig(temperature=temperature)
    exact = given_.verify(VerifyConfig(rule="exact"), sampling)
    off = [
        VerifyConfig(theta=None),
        VerifyConfig(theta=1.0),
        VerifyConfig(theta=None, branch="longest"),
        VerifyConfig(margin="logit-gap", gap=0),
        VerifyConfig(max_relaxed_per_cycle=0),
        VerifyConfig(max_regret=0),
        VerifyConfig(protected_ids=tuple(range(6))),
        VerifyConfig(rule="mars-released", released_ratio=False, released_q="one"),
    ]
    for config in off:
        verdict = given_.verify(config, sampling)
        if config.relaxes:
            verdict = dataclasses.replace(
                verdict, low_margin=exact.low_margin, nonpositive_top=exact.nonpositive_top
            )  # protection hides nothing from the counters
        assert_identical(verdict, exact)


@profile
@given(seeds, temperatures, thetas, st.sampled_from(["exact-first", "longest"]))
def test_without_a_relaxed_token_mars_is_exact(seed: int, temperature: float, theta: float, branch: str) -> None:
    given_, sampling = inputs(seed), SamplingConfig(temperature=temperature)
    exact = given_.verify(VerifyConfig(rule="exact"), sampling)
    mars = given_.verify(VerifyConfig(theta=theta, branch=branch), sampling)
    strict = ~mars.relaxed.any(-1)
    assert torch.equal(mars.path[strict], exact.path[strict])
    assert torch.equal(mars.next_token[strict], exact.next_token[strict])


@profile
@given(seeds, temperatures, thetas, thetas)
def test_the_accepted_path_grows_as_theta_falls(seed: int, temperature: float, one: float, other: float) -> None:
    given_, sampling = inputs(seed), SamplingConfig(temperature=temperature)
    strict = given_.verify(VerifyConfig(theta=max(one, other)), sampling)
    loose = given_.verify(VerifyConfig(theta=min(one, other)), sampling)
    shared = torch.where(strict.path >= 0, loose.path, strict.path)
    assert torch.equal(shared, strict.path)  # the strict path begins the loose one
    assert (loose.n_accepted >= strict.n_accepted).all()


@profile
@given(seeds, temperatures, st.integers(-40, 40))
def test_gap_decisions_ignore_a_constant_added_to_all_logits(seed: int, temperature: float, shift: int) -> None:
    given_, sampling = inputs(seed), SamplingConfig(temperature=temperature)
    config = VerifyConfig(margin="logit-gap", gap=1.1)
    moved = given_.verify(config, sampling, logits=given_.logits + shift)  # quarters: the sum is exact
    still = given_.verify(config, sampling)
    assert torch.equal(moved.path, still.path)
    assert torch.equal(moved.relaxed, still.relaxed)
    assert torch.equal(moved.regret, still.regret)


def test_ratio_decisions_do_not_ignore_it() -> None:
    tree = DraftTree.from_parents(torch.tensor([[0, 1]]), torch.tensor([[-1, 0]]))
    row = torch.tensor([10.0, 5.0]).expand(1, 2, -1)
    assert verify(tree, row, VerifyConfig()).n_accepted.tolist() == [0]
    assert verify(tree, row + 100, VerifyConfig()).n_accepted.tolist() == [1]


@profile
@given(seeds, st.sampled_from(RULES), st.sampled_from([{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.3}, {}]))
def test_no_emitted_token_has_probability_zero(seed: int, rule: str, truncation: dict[str, float]) -> None:
    given_ = inputs(seed)
    coins = given_.coins
    given_.coins = Coins(coins.accept * (coins.accept > 0.5), coins.draw)  # many coins of exactly 0
    sampling = SamplingConfig(temperature=1, **truncation)
    rows = plan(VerifyConfig(rule=rule, theta=0.5), sampling, vocab_size=6, batch=BATCH)
    verdict = verify(given_.tree, given_.logits, rows, given_.coins)
    kept = warp(given_.logits, rows.sampling).isfinite()
    for row, host in enumerate(unpack(verdict.pack(given_.tree), given_.tree.max_depth)):
        emitted = [*host.tokens, host.next_token]
        assert all(kept[row, node, token] for node, token in zip(host.path, emitted, strict=True))


@profile
@given(seeds, temperatures, st.sampled_from(["mars", "mars-paper", "typical", "topk-delta", "prob-ratio"]))
def test_protected_tokens_are_neither_accepted_nor_overridden(seed: int, temperature: float, rule: str) -> None:
    given_ = inputs(seed)
    config = VerifyConfig(rule=rule, theta=0.4, rank=6, rho=0.1, protected_ids=(1, 4), branch="longest")
    verdict = given_.verify(config, SamplingConfig(temperature=temperature))
    for row, host in enumerate(unpack(verdict.pack(given_.tree), given_.tree.max_depth)):
        for parent, token, relaxed in zip(host.path, host.tokens, host.relaxed, strict=False):
            if relaxed:
                assert not {token, int(given_.logits[row, parent].argmax())} & {1, 4}


@profile
@given(seeds, st.sampled_from(["mars", "exact", "mars-paper", "prob-ratio"]), thetas)
def test_temperature_to_zero_is_continuous(seed: int, rule: str, theta: float) -> None:
    given_ = inputs(seed)
    noise = torch.rand(given_.logits.shape, generator=torch.Generator().manual_seed(seed)) / 50
    logits = given_.logits + noise  # a tie is split by coins at any temperature above 0, and by id at 0
    config = VerifyConfig(rule=rule, theta=theta, rank=1)
    cold = given_.verify(config, SamplingConfig(temperature=2e-5), logits=logits)
    zero = given_.verify(config, SamplingConfig(temperature=0), logits=logits)
    for name in ("path", "next_token", "relaxed", "regret"):
        assert torch.equal(getattr(cold, name), getattr(zero, name)), name


@profile
@given(seeds, st.sampled_from(RULES), temperatures)
def test_a_row_of_a_batch_is_verified_as_if_alone(seed: int, rule: str, temperature: float) -> None:
    """Rules, options and temperatures of all kinds share the batch."""
    given_ = inputs(seed)
    others = [VerifyConfig(rule=name, theta=0.7) for name in RULES]
    configs = [VerifyConfig(rule=rule)] + [others[i % len(others)] for i in range(BATCH - 1)]
    samplings = [SamplingConfig(temperature=temperature)] + [
        SamplingConfig(temperature=i % 3, top_k=i % 4) for i in range(BATCH - 1)
    ]
    together = verify(given_.tree, given_.logits, configs, given_.coins, sampling=samplings)
    for row in (0, 1 + seed % (BATCH - 1)):
        tree = DraftTree(
            *(getattr(given_.tree, f.name)[row : row + 1] for f in dataclasses.fields(DraftTree)[:-1]),
            max_depth=given_.tree.max_depth,
        )
        coins = Coins(given_.coins.accept[row : row + 1], given_.coins.draw[row : row + 1])
        alone = verify(tree, given_.logits[row : row + 1], configs[row], coins, sampling=samplings[row])
        assert_identical(
            Verdict(*(getattr(together, f.name)[row : row + 1] for f in dataclasses.fields(Verdict))), alone
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_half_precision_logits_decide_as_their_own_values(dtype: torch.dtype, temperature: float) -> None:
    given_, sampling = inputs(3), SamplingConfig(temperature=temperature)
    for rule in RULES:
        half = given_.verify(VerifyConfig(rule=rule), sampling, logits=given_.logits.to(dtype))
        assert_identical(half, given_.verify(VerifyConfig(rule=rule), sampling))  # quarters are exact in both


@pytest.mark.parametrize("rule", RULES)
def test_padding_nodes_are_nobodys_child_and_may_hold_anything(rule: str) -> None:
    given_ = inputs(5)
    padding = (given_.tree.parents < 0) & (torch.arange(given_.tree.nodes) > 0)
    garbage = dataclasses.replace(given_.tree, tokens=given_.tree.tokens.masked_fill(padding, 10**6))
    logits = given_.logits.masked_fill(padding.unsqueeze(-1), float("nan"))
    for temperature in (0, 1):
        sampling = SamplingConfig(temperature=temperature)
        got = verify(garbage, logits, VerifyConfig(rule=rule), given_.coins, sampling=sampling)
        assert_identical(got, given_.verify(VerifyConfig(rule=rule), sampling))
    assert padding.any()


@pytest.mark.parametrize("rule", RULES)
def test_a_lone_root_emits_the_targets_token(rule: str) -> None:
    tree = DraftTree.from_parents(torch.tensor([[3]]), torch.tensor([[-1]]))
    logits = torch.tensor([[[0.0, 2.0, 1.0]]])
    verdict = verify(tree, logits, VerifyConfig(rule=rule))
    assert verdict.path.tolist() == [[0]]
    assert verdict.next_token.tolist() == [1]


@pytest.mark.parametrize(("value", "cause"), [("nan", "contain NaN"), ("-inf", "no finite maximum")])
@pytest.mark.parametrize("rule", RULES)
def test_unusable_logits_are_refused_with_the_cause(rule: str, value: str, cause: str) -> None:
    given_ = inputs(7)
    logits = given_.logits.clone()
    logits[0, 0] = float(value)
    for temperature in (0, 1):
        with pytest.raises(LogitsError, match=rf"row 0 .*{cause}"):
            given_.verify(VerifyConfig(rule=rule), SamplingConfig(temperature=temperature), logits=logits)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rule": "mars-released", "theta": None}, "released_ratio=False"),
        ({"rule": "mars-released", "max_regret": 1.0}, "no guards"),
        ({"rule": "mars-released", "branch": "longest"}, "use rule='mars'"),
        ({"theta": 0}, "theta"),
        ({"theta": 1.01}, "theta"),
        ({"theta": float("nan")}, "theta"),
        ({"rule": "marsh"}, "rule"),
        ({"thetta": 0.9}, "no option 'thetta'"),
    ],
)
def test_impossible_options_name_the_way_out(options: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        VerifyConfig(**options)


def test_contradicting_inputs_are_refused() -> None:
    given_ = inputs(1)
    hot = SamplingConfig(temperature=1)
    with pytest.raises(ConfigError, match=r"pass coins="):
        verify(given_.tree, given_.logits, VerifyConfig(), sampling=hot)
    with pytest.raises(ConfigError, match="coins have shapes"):
        verify(given_.tree, given_.logits, VerifyConfig(), random_coins(2, 3, torch.Generator()), sampling=hot)
    with pytest.raises(ConfigError, match="logits have shape"):
        verify(given_.tree, given_.logits[:, 1:], VerifyConfig())
    with pytest.raises(ConfigError, match="make the lengths agree"):
        verify(given_.tree, given_.logits, [VerifyConfig()] * 3)
    with pytest.raises(ConfigError, match="vocabulary has 6 tokens"):
        verify(given_.tree, given_.logits, VerifyConfig(protected_ids=(6,)))
    with pytest.raises(ConfigError, match="give them to plan"):
        verify(given_.tree, given_.logits, plan(VerifyConfig(), vocab_size=6, batch=BATCH), sampling=hot)


def test_chi_square_of_exact_on_random_trees() -> None:
    """|V| = 25, T = 1: the first emitted token is distributed as the root's p; 10 000 draws per tree.

    The statistic stays below the 1 - 1e-6 quantile of chi-square with 24 degrees of freedom (76.4), and the released
    code's division by the draft's probability exceeds it.
    """
    draws, vocab = 10_000, 25
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        tree = random_tree(1, 10, vocab, generator, padding=False)
        logits = (torch.randn(1, 10, vocab, generator=generator) * 1.5).expand(draws, -1, -1)
        many = DraftTree.from_parents(
            *(x.expand(draws, -1) for x in (tree.tokens, tree.parents, tree.draft_logprob)), tree.max_depth
        )
        expected = logits[0, 0].double().softmax(-1) * draws
        statistics = []
        for config in (VerifyConfig(rule="exact"), VerifyConfig(rule="mars-released", released_ratio=False)):
            coins = random_coins(draws, 10, generator)
            verdict = verify(many, logits, config, coins, sampling=SamplingConfig(temperature=1))
            second = many.tokens.gather(1, verdict.path[:, 1:2].clamp(min=0)).squeeze(1)
            first = torch.where(verdict.n_accepted > 0, second, verdict.next_token)
            seen = first.bincount(minlength=vocab).double()
            statistics.append(float(((seen - expected) ** 2 / expected).sum()))
        assert statistics[0] < 76.4 < statistics[1]
