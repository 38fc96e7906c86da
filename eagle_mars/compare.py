"""The same prompts decoded several ways in one process, paired prompt by prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from eagle_mars.config import DraftConfig, SamplingConfig, VerifyConfig
from eagle_mars.model import EaModel
from eagle_mars.result import GenerationResult

BASELINE = "ar"


@dataclass(frozen=True)
class Arm:
    """One way to decode. verify None is the target alone; draft None is the model's own tree."""

    verify: VerifyConfig | None
    draft: DraftConfig | None = None


@dataclass
class Comparison:
    """Results of each method, in prompt order; `ar` is among the methods and is what the others are compared with."""

    results: dict[str, list[GenerationResult]] = field(default_factory=dict)

    def speedup(self, method: str) -> float:
        """Median over prompts of tokens per second against the baseline's on the same prompt."""
        pairs = zip(self.results[method], self.results[BASELINE], strict=True)
        return median(ours.tokens_per_second / base.tokens_per_second for ours, base in pairs)

    def identical(self, method: str) -> int:
        """Prompts whose token ids equal the baseline's."""
        pairs = zip(self.results[method], self.results[BASELINE], strict=True)
        return sum(ours.token_ids == base.token_ids for ours, base in pairs)

    def tau(self, method: str) -> float:
        """Tokens per cycle over all prompts; 1 for the baseline, by definition."""
        lengths = [n for result in self.results[method] for n in result.accepted_lengths]
        return sum(n + 1 for n in lengths) / len(lengths) if lengths else 1.0

    def summary(self) -> dict[str, Any]:
        """The object that `eagle-mars compare --json` prints."""
        methods = {}
        for name, results in self.results.items():
            tokens, seconds = sum(r.new_tokens for r in results), sum(r.seconds for r in results)
            methods[name] = {
                "tokens": tokens,
                "seconds": round(seconds, 4),
                "tok_per_s": round(tokens / seconds, 3),
                "tau": round(self.tau(name), 4),
                "relaxed": sum(r.relaxed for r in results),
            }
        others = [name for name in self.results if name != BASELINE]
        return {
            "prompts": len(self.results[BASELINE]),
            "methods": methods,
            "speedup_vs_ar": {name: round(self.speedup(name), 4) for name in others},
            "identical_to_ar": {name: self.identical(name) for name in others},
        }


def compare(
    model: EaModel,
    prompts: Sequence[Sequence[int]],
    arms: Mapping[str, Arm],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig | None = None,
    stop: Sequence[str] = (),
    on_result: Callable[[str, GenerationResult], None] = lambda method, result: None,
) -> Comparison:
    """Decode every prompt with every arm; the order of the arms rotates, so that drift of the machine cancels out.

    prompts: token ids. The first prompt is decoded briefly beforehand and thrown away, which warms every arm up.
    """
    names = list(arms)
    for name in names:
        _decode(model, prompts[0], arms[name], min(8, max_new_tokens), sampling, stop)
    collected: dict[str, list[GenerationResult]] = {name: [] for name in names}
    for index, prompt in enumerate(prompts):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            result = _decode(model, prompt, arms[name], max_new_tokens, sampling, stop)
            collected[name].append(result)
            on_result(name, result)
    return Comparison(collected)


def _decode(
    model: EaModel,
    prompt: Sequence[int],
    arm: Arm,
    max_new_tokens: int,
    sampling: SamplingConfig | None,
    stop: Sequence[str],
) -> GenerationResult:
    return model.generate(
        prompt,
        max_new_tokens=max_new_tokens,
        draft=arm.draft,
        verify=arm.verify,
        sampling=sampling,
        stop=stop,
        method="speculative" if arm.verify else "autoregressive",
    )


def identical_prefix(ours: GenerationResult, base: GenerationResult) -> int:
    """Tokens until the first difference."""
    pairs = zip(ours.token_ids, base.token_ids, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(ours.new_tokens, base.new_tokens))
