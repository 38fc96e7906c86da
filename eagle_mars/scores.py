"""Log-probabilities of emitted tokens and of the target's best ones, for who asks for them."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_mars.result import Candidate, TokenScores


def score(logits: Tensor, tokens: list[int], best: int) -> tuple[TokenScores, ...]:
    """Scores of tokens[t] and of the `best` highest tokens under raw logits [T, V]; one packed device→host read."""
    logits = logits.float()
    chosen = torch.tensor(tokens, device=logits.device).unsqueeze(1)
    top = logits.topk(min(best, logits.shape[-1]), dim=-1)
    ids = torch.cat((chosen, top.indices), dim=1)
    values = torch.cat((logits.gather(1, chosen), top.values), dim=1)
    # float64 holds every token id exactly, so that one tensor carries all of it.
    packed = torch.stack((ids.double(), values.double(), (values - logits.logsumexp(-1, keepdim=True)).double()), dim=2)
    rows = [[Candidate(int(i), z, p) for i, z, p in row] for row in packed.tolist()]
    return tuple(TokenScores(row[0], tuple(row[1:])) for row in rows)
