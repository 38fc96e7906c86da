"""Responses that share draft trees' cycles: one draft and one target forward over all trees."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_mars.batch import Batch, Outcome
from eagle_mars.config import DraftConfig
from eagle_mars.draft.batch_drafter import BatchDrafter
from eagle_mars.engine import Engine, Request, Speculation
from eagle_mars.errors import ConfigError, LogitsError
from eagle_mars.sampling import Coins
from eagle_mars.target import TargetOutput
from eagle_mars.tree import DraftTree
from eagle_mars.verify import HostVerdict, Verdict, unpack


class SpeculativeBatch(Batch[Speculation]):
    """Responses that draft and verify together. draft: the tree of all of them, one shape per forward."""

    def __init__(self, engine: Engine, draft: DraftConfig, places: int) -> None:
        if engine.head is None:
            raise ValueError("SpeculativeBatch needs an engine with a draft head")
        super().__init__(engine, places, rows=draft.total_token)
        self.draft = draft
        self._drafter = BatchDrafter(engine.head, draft, places)

    def _response(self, ids: Tensor, request: Request) -> Speculation:
        if request.draft != self.draft:
            raise ConfigError(
                "all responses of a batch share one draft tree; leave `draft` out or decode this one alone."
            )
        return Speculation(self.engine, ids, request)

    def _take(self, response: Speculation) -> None:
        response.feed_drafter()
        super()._take(response)
        try:
            self._drafter.join(response.drafter)
        except Exception:  # out of memory, say: the others still can go on
            super()._drop(len(self.responses))
            raise

    def _drop(self, row: int) -> None:
        super()._drop(row)
        self._drafter.drop(row)

    def _advance(self) -> list[Outcome]:
        tree = self._grow()
        out = self.engine.target.forward_tree(tree, self._cache)
        verdict = self._verify(tree, out)
        hosts = unpack(verdict.pack(tree).cpu(), tree.max_depth)  # the cycle's only device→host read
        self.engine.target.require_same("what they decided", *(host.decision for host in hosts))
        faults = [_fault(host) for host in hosts]
        self._cache.commit([[0] if fault else host.path for host, fault in zip(hosts, faults, strict=True)])
        outcomes: list[Outcome] = []
        for row, (response, host, fault) in enumerate(zip(self.responses, hosts, faults, strict=True)):
            drafted = response.left > 1
            outcomes.append(fault or response.absorb(host, verdict, out, drafted, row))
        return outcomes

    def _grow(self) -> DraftTree:
        """One tree per response; the bare root where one token is left, since a draft could add nothing."""
        roots = self._roots()
        bare = torch.tensor([response.left == 1 for response in self.responses])
        if bare.all():
            return DraftTree.bare(roots)
        news = [response.news() for response in self.responses]
        self._drafter.extend([features for features, _ in news], [tokens for _, tokens in news])
        for response in self.responses:  # now, since what follows may fail for one of them and be repeated
            response.fed()
        tree = self._drafter.grow(roots).to(roots.device)
        if bare.any():
            orphans = torch.where(bare.to(roots.device).unsqueeze(1), -1, tree.parents)
            tree = DraftTree.from_parents(tree.tokens, orphans, tree.draft_logprob, tree.max_depth)
        return tree

    def _verify(self, tree: DraftTree, out: TargetOutput) -> Verdict:
        rows = self._row_plan()
        return self.engine.verifier(
            tree,
            out.logits.to(self.engine.target.device),
            rows,
            self._coins(tree.nodes) if rows.sampling.draws else None,
            spent_regret=torch.cat([response.spent_regret for response in self.responses]),
            history=self._padded_history([response.history_before_root() for response in self.responses]),
            check=False,
        )

    def _coins(self, nodes: int) -> Coins:
        coins = [response.coins.next(nodes) for response in self.responses]
        return Coins(torch.cat([c.accept for c in coins]), torch.cat([c.draw for c in coins]))


def _fault(host: HostVerdict) -> LogitsError | None:
    try:
        host.raise_if_invalid()
    except LogitsError as error:
        return error
    return None
