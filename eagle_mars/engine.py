"""The decoding loop: draft a tree, one target forward over it, verify, keep the accepted path, repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from eagle_mars.compiled import Compiled
from eagle_mars.config import DraftConfig, SamplingConfig, VerifyConfig
from eagle_mars.draft.compiled_drafter import CompiledDrafter, compiled_cycle
from eagle_mars.draft.drafter import Drafter
from eagle_mars.draft.head import Head
from eagle_mars.draft.proposer import Proposer
from eagle_mars.errors import ConfigError, LogitsError
from eagle_mars.result import Provenance, Step, TokenScores
from eagle_mars.sampling import CoinStream, History, SamplingPlan, draw
from eagle_mars.scores import score
from eagle_mars.target import TargetModel, TargetOutput
from eagle_mars.tree import DraftTree
from eagle_mars.verify import HostVerdict, Verdict, plan, unpack, verify


@dataclass(frozen=True)
class Request:
    """Everything that one response depends on.

    stop_ids: the response ends with the first of them. special_ids: what relaxation leaves alone by default.
    top_logprobs: every step tells the target's scores of its tokens and of that many best ones; None asks for none.
    """

    max_new_tokens: int
    draft: DraftConfig = field(default_factory=DraftConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    stop_ids: frozenset[int] = frozenset()
    special_ids: tuple[int, ...] = ()
    top_logprobs: int | None = None


@dataclass(frozen=True)
class Drawn:
    """One token per row that no draft preceded. tokens: [B] int64. best: [B], the rows' largest logits."""

    tokens: Tensor
    best: Tensor  # NaN and all -inf show in the maximum

    @classmethod
    def of(cls, logits: Tensor, plan: SamplingPlan, coins: Tensor | None, history: History | None) -> Drawn:
        """Draw from logits [B, V]."""
        return cls(draw(logits, plan, coins, history), logits.amax(-1))

    def read(self) -> list[tuple[int, float]]:
        """The rows' tokens and best logits on the host; one device→host read."""
        return [(int(t), b) for t, b in torch.stack((self.tokens.double(), self.best.double()), dim=1).tolist()]


class Engine:
    """Decodes one sequence at a time with a target and, for `speculate`, a draft head or a draft model.

    All state of a response lives in its generator: responses on one engine may interleave.
    verifier: `verify`, or something with its signature that watches it (the evaluation measures rules that way).
    """

    def __init__(
        self, target: TargetModel, head: Proposer | None = None, verifier: Callable[..., Verdict] = verify
    ) -> None:
        self.target = target
        self.head = head
        self.verifier = verifier
        self._cycles: dict[DraftConfig, Compiled] = {}

    def new_drafter(self, config: DraftConfig) -> Drafter:
        """A drafter for one response; compiled when the target is and the proposer is a head."""
        if self.head is None:
            raise ValueError("Engine.speculate needs a draft head; pass one to Engine or call autoregress")
        if not (self.target.compiled and isinstance(self.head, Head)):
            return Drafter(self.head, config)
        if config.entropy_stop is not None:
            raise ConfigError("compiled forwards need trees of one size; leave entropy_stop or compile out.")
        if config not in self._cycles:
            self._cycles[config] = compiled_cycle(self.head, config)
        return CompiledDrafter(self.head, config, self._cycles[config])

    def speculate(self, ids: Tensor, request: Request) -> Iterator[Step]:
        """Yield the response to ids [1, L] cycle by cycle; the first step is the token that prefill gives."""
        run = Speculation(self, ids, request)
        step = run.prefill()
        yield step
        while step.finish_reason is None:
            step = run.cycle()
            yield step

    def autoregress(self, ids: Tensor, request: Request) -> Iterator[Step]:
        """The baseline: the target alone, same cache, stop rules and counters; a step per token."""
        run = Autoregression(self, ids, request)
        step = run.prefill()
        yield step
        while step.finish_reason is None:
            step = run.cycle()
            yield step


class Response:
    """What every way of decoding shares: the cache, the coins, the token budget and the clock."""

    root: Tensor  # [1] int64, the newest token: chosen, not yet fed to the target

    def __init__(self, engine: Engine, ids: Tensor, request: Request, tree_rows: int = 1) -> None:
        self.target = engine.target
        self.request = request
        self.ids = ids.to(self.target.device)
        rows = ids.shape[1] + request.max_new_tokens + tree_rows
        self.cache = self.target.new_cache(batch=1, max_length=rows)
        seed = request.sampling.seed
        if seed is None:  # from torch's global generator, so that torch.manual_seed governs scripts written for EAGLE
            seed = int(torch.randint(2**62, ()))
        if self.target.ranks is not None:
            self.target.ranks.require_same("their prompts or options", type(self).__name__, ids, request)
            seed = self.target.ranks.of_the_first(seed)
        self.coins = CoinStream([seed], self.target.device)
        self.plan = plan(
            request.verify,
            request.sampling,
            vocab_size=self.target.config.vocab_size,
            special_ids=request.special_ids,
            batch=1,
            device=self.target.device,
        )
        self.history: History | None = None
        if request.sampling.penalises:
            self.history = History(self.ids, self.ids[:, :0])
        self.left = request.max_new_tokens
        self.clock = perf_counter()

    def release(self) -> None:
        """Free the cache: a batch holds its rows now."""
        del self.cache

    def _draw_step(self, logits: Tensor) -> Step:
        """Draw from logits [1, 1, V]; the step's only device→host read."""
        logits = logits[:, -1].to(self.target.device)
        coin = None if self.request.sampling.greedy else self.coins.single()
        drawn = Drawn.of(logits, self.plan.sampling, coin, self.history)
        return self.take(drawn, drawn.read()[0], logits)

    def take(self, drawn: Drawn, read: tuple[int, float], logits: Tensor, row: int = 0) -> Step:
        """Go on behind a token drawn without a draft; `row` is this response's in drawn and logits [B, V].

        Raises LogitsError if the target's logits couldn't be drawn from.
        """
        token, best = read
        self.target.require_same("what they decided", token, abs(best) < float("inf"))
        if not abs(best) < float("inf"):
            raise LogitsError(
                f"the target's best logit is {best}, so no token can be chosen; "
                "check the checkpoint, or load it with dtype=torch.float32."
            )
        self.root = drawn.tokens[row : row + 1]
        self._remember([token])
        return self._step([token], ["target"], accepted=None, scores=self._scores(logits[row : row + 1], [token]))

    def _remember(self, tokens: list[int]) -> None:
        if self.history is not None:
            new = torch.tensor([tokens], device=self.target.device)
            self.history = History(self.history.prompt, torch.cat((self.history.generated, new), dim=1))

    def _scores(self, logits: Tensor, tokens: list[int]) -> tuple[TokenScores, ...]:
        """Scores of `tokens` under logits [T, V]; a second device→host read, made only for who asked."""
        if self.request.top_logprobs is None:
            return ()
        return score(logits, tokens, self.request.top_logprobs)

    def _step(
        self,
        tokens: list[int],
        provenance: list[Provenance],
        accepted: int | None,
        verdict: HostVerdict | None = None,
        scores: tuple[TokenScores, ...] = (),
    ) -> Step:
        """Cut at the budget and at the first stop id, and stop the clock."""
        reason: Literal["stop", "length"] | None = None
        keep = len(tokens)
        if keep >= self.left:
            keep, reason = self.left, "length"
        for index, token in enumerate(tokens[:keep]):
            if token in self.request.stop_ids:
                keep, reason = index + 1, "stop"
                break
        self.left -= keep
        now = perf_counter()
        seconds, self.clock = now - self.clock, now
        return Step(
            tokens=tuple(tokens[:keep]),
            provenance=tuple(provenance[:keep]),
            accepted=accepted,
            seconds=seconds,
            finish_reason=reason,
            regret=verdict.regret if verdict else 0.0,
            low_margin=verdict.low_margin if verdict else 0,
            rescued=verdict.rescued if verdict else 0,
            nonpositive_top=verdict.nonpositive_top if verdict else 0,
            scores=scores[:keep],
        )


class Autoregression(Response):
    """A response of the target alone: a token per cycle."""

    @torch.inference_mode()
    def prefill(self) -> Step:
        return self._draw_step(self.target.prefill(self.ids, self.cache, features=False).logits)

    @torch.inference_mode()
    def cycle(self) -> Step:
        return self._draw_step(self.target.step(self.root.unsqueeze(1), self.cache))


class Speculation(Response):
    """A response whose cycles draft and verify a tree."""

    features: Tensor | None  # [1, T, F] target features that the head hasn't seen yet; None if it reads none,
    tokens: Tensor  # [1, T] and the token after each of them

    def __init__(self, engine: Engine, ids: Tensor, request: Request) -> None:
        super().__init__(engine, ids, request, tree_rows=request.draft.total_token)
        self.drafter = engine.new_drafter(request.draft)
        self.verifier = engine.verifier
        self.spent_regret = torch.zeros(1, dtype=torch.float64, device=self.target.device)

    @torch.inference_mode()
    def prefill(self) -> Step:
        shifted = self.ids[:, self.drafter.head.first_row :]  # the token that goes with each row of features
        fed = 0
        for out in self.target.prefill_chunks(self.ids, self.cache):
            done = self.cache.committed
            if done < self.ids.shape[1]:  # else the features of a long prompt would pile up
                self.drafter.extend(out.features, shifted[:, fed:done])
                fed = done
        step = self._draw_step(out.logits)
        # What the head has yet to be fed; it waits until a tree is really needed, so the last cycle drafts nothing.
        self.features, self.tokens = out.features, torch.cat((shifted[:, fed:], self.root.unsqueeze(1)), dim=1)
        return step

    @torch.inference_mode()
    def cycle(self) -> Step:
        tree = self._draft()
        out = self.target.forward_tree(tree, self.cache)
        verdict = self.verifier(
            tree,
            out.logits.to(self.target.device),
            self.plan,
            None if self.request.sampling.greedy else self.coins.next(tree.nodes),
            spent_regret=self.spent_regret,
            history=self.history_before_root(),
            check=False,
        )
        host = unpack(verdict.pack(tree).cpu(), tree.max_depth)[0]  # the cycle's only device→host read
        self.target.require_same("what they decided", host.decision)
        host.raise_if_invalid()
        self.cache.commit([host.path])
        return self.absorb(host, verdict, out, drafted=tree.nodes > 1)

    def release(self) -> None:
        """Free the caches: a batch holds their rows now."""
        super().release()
        del self.drafter

    def absorb(self, host: HostVerdict, verdict: Verdict, out: TargetOutput, drafted: bool, row: int = 0) -> Step:
        """Go on behind the accepted path; `row` is this response's in verdict and out. The cache has it already."""
        self.features = None if out.features is None else out.features[row : row + 1, host.path]
        self.root = verdict.next_token[row : row + 1]
        tokens = [*host.tokens, host.next_token]
        self.tokens = torch.tensor([tokens], device=self.target.device)
        self.spent_regret = self.spent_regret + verdict.regret[row : row + 1]
        self._remember(tokens)
        provenance: list[Provenance] = ["relaxed" if flag else "exact" for flag in host.relaxed]
        accepted = len(host.tokens) if drafted else None
        scores = self._scores(out.logits[row, host.path], tokens)
        return self._step(tokens, [*provenance, "target"], accepted, host, scores)

    def news(self) -> tuple[Tensor | None, Tensor]:
        """What the drafter hasn't been fed yet: features [1, T, F] (None if it reads none) and tokens [1, T]."""
        return self.features, self.tokens

    def feed_drafter(self) -> None:
        """Extend this response's own drafter with the news."""
        self.drafter.extend(self.features, self.tokens)
        self.fed()

    def fed(self) -> None:
        """The drafter has the news: there are none until the next cycle."""
        self.features, self.tokens = None if self.features is None else self.features[:, :0], self.tokens[:, :0]

    def history_before_root(self) -> History | None:
        """What penalties count besides the tree, whose first node is the root."""
        if self.history is None:
            return None
        return History(self.history.prompt, self.history.generated[:, :-1])

    def _draft(self) -> DraftTree:
        """The tree under the newest token; the bare root when one token is left, since a draft could add nothing."""
        if self.left == 1:
            return DraftTree.bare(self.root)
        tree = self.drafter.draft(self.features, self.tokens)
        self.fed()
        return tree.to(self.target.device)
