"""The law of sampled rewriting in vLLM's own V2 kernels, run by Triton's interpreter on a vocabulary of 8.

A chi-square test against the law in closed form. Seeds are fixed, so a run passes or fails for good.
"""

from __future__ import annotations

from math import inf

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from eagle_mars.engines.vllm_rows import RowRule, rewrite
from tests.engines.e2e import interpreted

DRAWS = 1000
# Under the right law a p-value as small comes once in 1000 runs.
P_VALUE = 1e-3
V = 8
THETA = 0.9
LOW = torch.tensor([3.0, 2.8, 2.0, 1.5, 1.0, 0.5, 0.0, -0.5])  # token 1 within the margin
CLEAR = torch.tensor([3.0, 2.2, 2.0, 1.5, 1.0, 0.5, 0.0, -0.5])
BONUS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 2.8, 3.0])


def p(row: Tensor, temperature: float) -> Tensor:
    return (row.double() / temperature).softmax(0)


def draw(rows: list[Tensor], drafts: Tensor, temperature: float, draft_logits: Tensor | None = None) -> Tensor:
    """Tokens [DRAWS, K + 1] that vLLM's kernels emit, -1 after the end, for DRAWS requests with drafts [DRAWS, K]."""
    interpreted.pretend_backend()
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    count = drafts.shape[1]
    owner = torch.arange(DRAWS).repeat_interleave(count + 1)
    local = torch.arange(count + 1).repeat(DRAWS)
    logits = torch.stack(rows).repeat(DRAWS, 1)
    rule = RowRule(THETA, 0.0, 1 << 30, temperature, 0, 1.0, 0.0)
    numbers = torch.tensor([rule.numbers()], dtype=torch.float64).expand(len(owner), -1)
    verified = torch.nn.functional.pad(drafts, (0, 1), value=-1).flatten()
    rewrite(logits, verified, local, numbers, [rule], torch.zeros(V, dtype=torch.bool))
    fed = torch.nn.functional.pad(drafts, (1, 0), value=0).flatten()
    sampled, length = rejection_sample(
        target_logits=logits / temperature,
        draft_logits=draft_logits,
        draft_sampled=fed,
        cu_num_logits=torch.arange(0, len(owner) + 1, count + 1, dtype=torch.int32),
        pos=100 + local,
        idx_mapping=torch.arange(DRAWS, dtype=torch.int32),
        expanded_idx_mapping=owner.int(),
        expanded_local_pos=local.int(),
        temperature=torch.full((DRAWS,), temperature),
        seed=torch.arange(DRAWS) * 7919 + 1,
        num_speculative_steps=count,
    )
    return torch.where(torch.arange(count + 1) < length.unsqueeze(1), sampled, -1)


def agrees(tokens: Tensor, law: Tensor) -> bool:
    """Whether tokens [N] may have been drawn from law [V]; what is impossible must not appear."""
    seen = torch.bincount(tokens, minlength=V).double()
    possible = law > 0
    assert not seen[~possible].any()
    if possible.sum() == 1:
        return True
    return chisquare(seen[possible], law[possible] / law.sum() * len(tokens)).pvalue > P_VALUE


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_a_relaxed_draft_is_emitted_surely_and_what_follows_is_the_targets(temperature: float) -> None:
    tokens = draw([LOW, CLEAR, BONUS], torch.ones(DRAWS, 2, dtype=torch.long), temperature)
    assert (tokens[:, 0] == 1).all()
    assert agrees(tokens[:, 1], p(CLEAR, temperature))  # a draft from a point mass leaves the target's law as it is
    kept = tokens[tokens[:, 1] == 1]
    assert len(kept) > DRAWS // 10
    assert agrees(kept[:, 2], p(BONUS, temperature))
    assert (tokens[tokens[:, 1] != 1, 2] == -1).all()


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_an_exact_test_before_a_relaxed_draft_is_the_stock_one(temperature: float) -> None:
    tokens = draw([CLEAR, LOW, BONUS], torch.ones(DRAWS, 2, dtype=torch.long), temperature)
    assert agrees(tokens[:, 0], p(CLEAR, temperature))
    kept = tokens[tokens[:, 0] == 1]
    assert (kept[:, 1] == 1).all()
    assert agrees(kept[:, 2], p(BONUS, temperature))


def test_the_law_with_a_sampling_drafter() -> None:
    """q spread over the vocabulary: t1 and t2 are emitted whenever they are drafted, else the stock test decides."""
    q_row = torch.tensor([0.5, 3.0, 1.5, 0.0, 1.0, -inf, 0.5, 1.0])  # the runner-up more likely than to the target
    q, target = q_row.double().softmax(0), p(LOW, 1.0)
    drafts = torch.multinomial(q.float(), DRAWS, replacement=True, generator=torch.Generator().manual_seed(3))
    tokens = draw([LOW, BONUS], drafts.unsqueeze(1), 1.0, q_row.expand(DRAWS, 1, V).contiguous())[:, 0]
    accepted = torch.minimum(torch.ones(V), target / q.clamp(min=1e-30))
    accepted[:2] = 1.0
    residual = (target - q).clamp(min=0)
    law = q * accepted + (q * (1 - accepted)).sum() * residual / residual.sum()
    assert agrees(tokens, law)
    assert not agrees(tokens, target)  # so many draws tell the two laws apart
