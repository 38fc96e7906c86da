"""EAGLE-2's dynamic draft tree (arXiv 2406.16858; EAGLE_SPEC section 3): depth x top-k growth, then the global top-n.

Growth scores a pool of `top_k + depth * top_k**2` candidates. Every candidate has a *flat number*: the root is 0, then
level by level, row-major (beam slot, then rank). Scores are cumulative log-probabilities in fp32 and are ordered by
(score descending, flat number ascending). A child's score is never above its parent's and its flat number is larger, so
any best-n prefix of this order contains the parent of each of its members: ties can't tear a tree apart.

Everything stays on the device; shapes depend only on the configuration and on the number of rows in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Categorical

from eagle_mars.config import DraftConfig
from eagle_mars.draft.layers import Start
from eagle_mars.draft.proposer import KeyValue, Proposer
from eagle_mars.tree import DraftTree


@dataclass(frozen=True)
class Pool:
    """All candidates in flat order, the root first; every field is [B, P]. parents: flat numbers, -1 for the root."""

    tokens: Tensor
    parents: Tensor
    logprob: Tensor
    scores: Tensor


def grow(
    head: Proposer,
    cache: list[KeyValue],
    rows: int | Sequence[int] | Tensor,
    root: Tensor,
    output: Tensor,
    config: DraftConfig,
    read: int | None = None,
) -> DraftTree:
    """Draft a tree of `config.total_token` nodes under `root`.

    cache: the head's key/value buffers, `rows` real rows followed by scratch space for depth * top_k draft rows.
    rows: of every sequence, or of each of them; a tensor [B] keeps them on the device, and then `read` says how many
        rows of the buffers are read: at least the longest sequence's and its draft rows.
    root: [B] int64, the newest token. output: [B, 1, H], the head's output at its newest real row.
    """
    scratch = _Scratch(rows, root.shape[0], config.top_k, config.depth, root.device, read)
    return _select(_expand(head, cache, scratch, root, output, config), config)


def _expand(
    head: Proposer, cache: list[KeyValue], scratch: _Scratch, root: Tensor, output: Tensor, config: DraftConfig
) -> Pool:
    batch, k, device = root.shape[0], config.top_k, root.device
    logprob, tokens, entropy = _best_children(head, output, k, config.entropy_stop is not None)
    # Beam: the k candidates that the next step expands, best first.
    beam_tokens, beam_scores = tokens[:, 0], logprob[:, 0]
    beam_flat = torch.arange(1, k + 1, device=device).expand(batch, k)
    x = output.expand(-1, k, -1)

    none = torch.zeros(batch, 1, device=device)
    parents = [torch.full_like(beam_flat[:, :1], -1), torch.zeros_like(beam_flat)]
    all_tokens, all_logprob, all_scores = [root.unsqueeze(1), beam_tokens], [none, beam_scores], [none, beam_scores]

    own = torch.eye(k, dtype=torch.bool, device=device).expand(batch, k, k)
    lineage = own  # which draft rows each beam member may see: its ancestors and itself
    first_flat = k + 1
    for step in range(config.depth):
        if entropy is not None and config.entropy_stop is not None and bool((entropy > config.entropy_stop**2).all()):
            break
        start, mask = scratch.step(step, lineage)
        output = head(x, beam_tokens, scratch.positions + step, mask, cache, start)
        logprob, tokens, entropy = _best_children(head, output, k, entropy is not None)
        tokens, logprob = tokens.flatten(1), logprob.flatten(1)
        scores = beam_scores.repeat_interleave(k, dim=1) + logprob
        parents.append(beam_flat.repeat_interleave(k, dim=1))
        all_tokens.append(tokens)
        all_logprob.append(logprob)
        all_scores.append(scores)

        beam_scores, choice = _best_first(scores, k)
        slot = (choice // k).unsqueeze(-1)  # the beam row that a new member descends from
        beam_tokens, beam_flat = tokens.gather(1, choice), choice + first_flat
        x = output.gather(1, slot.expand(-1, -1, output.shape[-1]))
        lineage = torch.cat((lineage.gather(1, slot.expand(-1, -1, lineage.shape[-1])), own), dim=-1)
        first_flat += k * k
    return Pool(torch.cat(all_tokens, 1), torch.cat(parents, 1), torch.cat(all_logprob, 1), torch.cat(all_scores, 1))


class _Scratch:
    """Where draft rows go and what they see: the real rows of their sequence and their own lineage."""

    def __init__(
        self,
        rows: int | Sequence[int] | Tensor,
        batch: int,
        k: int,
        depth: int,
        device: torch.device,
        read: int | None,
    ) -> None:
        if not isinstance(rows, (int, Tensor)) and len(set(rows)) == 1:
            rows = rows[0]
        self._k = k
        self._rows: Start
        if isinstance(rows, int):
            self._longest, self._rows = rows, rows
            self._mask = torch.ones(batch, 1, k, rows + depth * k, dtype=torch.bool, device=device)
            self.positions = torch.full((batch, k), rows, device=device)
        else:
            if isinstance(rows, Tensor):
                assert read is not None
                self._longest, self._rows = read - depth * k, rows
            else:
                self._longest, self._rows = max(rows), torch.tensor(rows, device=device)
            real = torch.arange(self._longest + depth * k, device=device) < self._rows.unsqueeze(1)
            self._mask = real.view(batch, 1, 1, -1).repeat(1, 1, k, 1)
            self.positions = self._rows.unsqueeze(1).expand(batch, k)

    def step(self, step: int, lineage: Tensor) -> tuple[Start, Tensor]:
        """First row and mask of a step. lineage [B, k, (step + 1) * k] bool: the draft rows that a beam slot sees."""
        end = self._longest + (step + 1) * self._k
        if isinstance(self._rows, int):
            self._mask[:, 0, :, self._rows : end] = lineage
        else:
            columns = self._rows.view(-1, 1, 1) + torch.arange(lineage.shape[-1], device=lineage.device)
            self._mask[:, 0].scatter_(2, columns.expand_as(lineage), lineage)
        return self._rows + step * self._k, self._mask[..., :end]


def _best_children(head: Proposer, output: Tensor, k: int, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """The k likeliest next tokens of each row, best first: log-probabilities in fp32 and target ids, both [B, T, k].

    Also the mean entropy of the T distributions, in nats: [B].

    Top-k on the logits and one normaliser give the same as a log-softmax over the vocabulary, for less, and never more
    than 0. Logits that are exactly equal (common in half precision) come in an order that torch leaves open: either is
    a valid sibling order, and for a given device it is always the same.
    """
    logits = head.logits(output)
    best, ids = logits.topk(k, dim=-1)
    best = best.float()
    top = best[..., :1]
    below = logits.float() - top
    logprob = (best - top) - below.exp().sum(-1, keepdim=True).log()
    entropy = Categorical(logits=below, validate_args=False).entropy().mean(-1) if with_entropy else None
    # A NaN would rank above its own parent; as -inf the tree stays well-formed and the node is the last to be chosen.
    return logprob.nan_to_num(nan=-torch.inf, neginf=-torch.inf), head.to_target(ids), entropy


def _best_first(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best of each row of scores [B, n] and their indices, ties by ascending index on every device."""
    values, order = scores.sort(dim=1, descending=True, stable=True)
    return values[:, :count], order[:, :count]


def _select(pool: Pool, config: DraftConfig) -> DraftTree:
    """Keep the best `total_token` candidates (the root scores 0 and comes first) and renumber them in flat order."""
    count = min(config.total_token, pool.scores.shape[1])  # entropy_stop may have left fewer candidates
    chosen = _best_first(pool.scores, count)[1].sort(dim=1).values
    batch, nodes = chosen.shape
    numbers = torch.arange(nodes, device=chosen.device).expand(batch, nodes)
    renumbered = torch.zeros_like(pool.parents).scatter_(1, chosen, numbers)
    parents = renumbered.gather(1, pool.parents.gather(1, chosen).clamp(min=0))
    parents[:, 0] = -1
    return DraftTree.from_parents(
        pool.tokens.gather(1, chosen), parents, pool.logprob.gather(1, chosen), max_depth=config.levels
    )
