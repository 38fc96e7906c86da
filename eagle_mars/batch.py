"""Several responses decoded together: one draft tree and one target forward a cycle for all of them.

Each response keeps what it has when decoded alone: its options, coins, stop rules and counters. So its text doesn't
depend on who shares its cycles, as far as floating point allows (T = 0 in fp32: the same tokens, exact ties apart).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from eagle_mars.config import DraftConfig
from eagle_mars.draft.batch_drafter import BatchDrafter
from eagle_mars.engine import Engine, Request, Speculation
from eagle_mars.errors import ConfigError, LogitsError
from eagle_mars.result import Step
from eagle_mars.sampling import Coins, History
from eagle_mars.target import TargetOutput
from eagle_mars.tree import DraftTree
from eagle_mars.verify import HostVerdict, RowPlan, Verdict, plan, unpack


class Batch:
    """Responses that share cycles; they join at any time and leave when they end or are told to.

    places: responses at most. draft: the tree of all of them, one shape per forward.
    Prompts are prefilled alone, so no prompt is padded; accepted paths differ in length, so what one cycle appends to a
    response's cache is its own, and the forward masks what lies behind the shorter ones.
    """

    def __init__(self, engine: Engine, draft: DraftConfig, places: int) -> None:
        if engine.head is None:
            raise ValueError("Batch needs an engine with a draft head")
        self.engine = engine
        self.draft = draft
        self.places = places
        self.responses: list[Speculation] = []
        self._cache = engine.target.new_cache(places, engine.target.max_context + draft.total_token)
        self._cache.reset(0)
        self._drafter = BatchDrafter(engine.head, draft, places)
        self._ready: dict[Speculation, deque[Step | LogitsError]] = {}  # what cycles that others ran gave
        self._plan: RowPlan | None = None  # of the responses as they are; None after one has come or gone

    @property
    def free(self) -> int:
        """Places that `join` may take."""
        return self.places - len(self.responses)

    @torch.inference_mode()
    def join(self, ids: Tensor, request: Request) -> tuple[Speculation, Step]:
        """Prefill ids [1, L]; the response, to be recognised in `cycle`, and its first token.

        A response that ends with its first token never takes a place.
        Raises ConfigError if the request wants another tree or protects other special tokens than the batch's.
        """
        if not self.free:
            raise RuntimeError(f"all {self.places} places are taken; wait until a response ends")
        if request.draft != self.draft:
            raise ConfigError(
                "all responses of a batch share one draft tree; leave `draft` out or decode this one alone."
            )
        if self.responses and set(request.special_ids) != set(self.responses[0].request.special_ids):
            raise ConfigError("responses of a batch share the tokenizer's special ids; decode this one alone.")
        response = Speculation(self.engine, ids, request)
        step = response.prefill()
        if step.finish_reason is None:
            response.feed_drafter()
            self._cache.join(response.cache)
            try:
                self._drafter.join(response.drafter)
            except Exception:  # out of memory, say: the others still can go on
                self._cache.drop(len(self.responses))
                raise
            response.release()
            self.responses.append(response)
            self._plan = None
        return response, step

    @torch.inference_mode()
    def leave(self, response: Speculation) -> None:
        """Give a response up and free its place; the last one moves there."""
        row = self.responses.index(response)
        self._cache.drop(row)
        self._drafter.drop(row)
        self.responses[row] = self.responses[-1]
        self.responses.pop()
        self._plan = None

    @torch.inference_mode()
    def cycle(self) -> list[tuple[Speculation, Step | LogitsError]]:
        """One cycle of every response; those that it ends have left when it returns. Empty without responses.

        A response whose logits can't be verified ends with a LogitsError in the place of its step; the others go on.
        """
        if not self.responses:
            return []
        tree = self._grow()
        out = self.engine.target.forward_tree(tree, self._cache)
        verdict = self._verify(tree, out)
        hosts = unpack(verdict.pack(tree).cpu(), tree.max_depth)  # the cycle's only device→host read
        faults = [_fault(host) for host in hosts]
        self._cache.commit([[0] if fault else host.path for host, fault in zip(hosts, faults, strict=True)])
        outcomes: list[tuple[Speculation, Step | LogitsError]] = []
        for row, (response, host, fault) in enumerate(zip(self.responses, hosts, faults, strict=True)):
            drafted = response.left > 1
            outcomes.append((response, fault or response.absorb(host, verdict, out, drafted, row)))
        for response, outcome in outcomes:
            if isinstance(outcome, LogitsError) or outcome.finish_reason is not None:
                self.leave(response)
        return outcomes

    def speculate(self, ids: Tensor, request: Request) -> Iterator[Step]:
        """Like `Engine.speculate`, sharing cycles: whoever asks for a step that isn't there yet runs one for all.

        Closing the iterator frees the place. Raises what `join` raises, and LogitsError.
        """
        response, step = self.join(ids, request)
        ready = self._ready[response] = deque[Step | LogitsError]()
        try:
            yield step
            while step.finish_reason is None:
                while not ready:
                    for other, outcome in self.cycle():
                        if other in self._ready:  # else somebody drives it by `cycle`
                            self._ready[other].append(outcome)
                found = ready.popleft()
                if isinstance(found, LogitsError):
                    raise found
                step = found
                yield step
        finally:
            del self._ready[response]
            if response in self.responses:
                self.leave(response)

    def _grow(self) -> DraftTree:
        """One tree per response; the bare root where one token is left, since a draft could add nothing."""
        roots = torch.cat([response.root for response in self.responses])
        bare = torch.tensor([response.left == 1 for response in self.responses])
        if bare.all():
            return DraftTree.from_parents(roots.unsqueeze(1), torch.full_like(roots, -1).unsqueeze(1), max_depth=0)
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
        requests = [response.request for response in self.responses]
        device = self.engine.target.device
        if self._plan is None:
            self._plan = plan(
                [request.verify for request in requests],
                [request.sampling for request in requests],
                vocab_size=self.engine.target.config.vocab_size,
                special_ids=requests[0].special_ids,
                device=device,
            )
        return self.engine.verifier(
            tree,
            out.logits.to(device),
            self._plan,
            self._coins(tree.nodes) if self._plan.sampling.draws else None,
            spent_regret=torch.cat([response.spent_regret for response in self.responses]),
            history=self._history() if self._plan.sampling.penalises else None,
            check=False,
        )

    def _coins(self, nodes: int) -> Coins:
        coins = [response.coins.next(nodes) for response in self.responses]
        return Coins(torch.cat([c.accept for c in coins]), torch.cat([c.draw for c in coins]))

    def _history(self) -> History:
        """What penalties count, padded with -1; of a response without penalties nothing."""
        nothing = torch.full((1, 0), -1, device=self.engine.target.device)
        parts = [response.history_before_root() or History(nothing, nothing) for response in self.responses]
        return History(_padded([part.prompt for part in parts]), _padded([part.generated for part in parts]))


def _fault(host: HostVerdict) -> LogitsError | None:
    try:
        host.raise_if_invalid()
    except LogitsError as error:
        return error
    return None


def _padded(rows: list[Tensor]) -> Tensor:
    """Rows [1, n_b] int64 → [B, max n_b], padded with -1."""
    return torch.nn.utils.rnn.pad_sequence([row[0] for row in rows], batch_first=True, padding_value=-1)
