"""The same prompts decoded several ways in one process, paired prompt by prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from eagle_mars.result import GenerationResult

BASELINE = "ar"

Decode = Callable[[Sequence[int], int], GenerationResult]
"""One way to decode: (prompt ids, max_new_tokens) → result."""


@dataclass
class Comparison:
    """Results of each method, in prompt order; `ar` is among the methods and is what the others are compared with."""

    results: dict[str, list[GenerationResult]] = field(default_factory=dict)

    def speedup(self, method: str, over: str = BASELINE) -> float:
        """Median over prompts of tokens per second against another method's on the same prompt."""
        pairs = zip(self.results[method], self.results[over], strict=True)
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
    prompts: Sequence[Sequence[int]],
    arms: Mapping[str, Decode],
    *,
    max_new_tokens: int,
    on_result: Callable[[str, GenerationResult], None] = lambda method, result: None,
) -> Comparison:
    """Decode every prompt with every arm; the order of the arms rotates, so that drift of the machine cancels out.

    prompts: token ids. arms: by name, `ar` among them. The first prompt is decoded briefly beforehand and thrown away,
    which warms every arm up.
    """
    names = list(arms)
    for name in names:
        arms[name](prompts[0], min(8, max_new_tokens))
    collected: dict[str, list[GenerationResult]] = {name: [] for name in names}
    for index, prompt in enumerate(prompts):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            result = arms[name](prompt, max_new_tokens)
            collected[name].append(result)
            on_result(name, result)
    return Comparison(collected)


def identical_prefix(ours: GenerationResult, base: GenerationResult) -> int:
    """Tokens until the first difference."""
    pairs = zip(ours.token_ids, base.token_ids, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(ours.new_tokens, base.new_tokens))
