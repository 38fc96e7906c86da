"""What each acceptance rule gains and what it costs: `python -m evaluation.rules`.

The same prompts under every rule, one draft tree, paired with `exact`. Beside the acceptance length it reports how the
text changed, and at T > 0 how far each decision was from the target's distribution (total variation per visited node).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor
from transformers.utils import logging as hf_logging

from eagle_mars import EaModel, GenerationResult, SamplingConfig, VerifyConfig
from eagle_mars.embedded import embedded_head_path, embedded_target_path
from eagle_mars.engine import Engine, Request
from eagle_mars.prompts import read_prompts
from eagle_mars.render import progress
from eagle_mars.sampling import SamplingPlan, warp
from eagle_mars.stream import ResponseStream
from eagle_mars.tree import DraftTree
from eagle_mars.verify import Verdict, verify
from evaluation.law import Node, law, total_variation
from evaluation.provenance import append_row, provenance, write_atomically
from evaluation.sweep import HELDOUT, markdown, parse_tree

EXACT = "exact"
app = typer.Typer(add_completion=False)
err = Console(stderr=True)


def arms(temperature: float) -> dict[str, VerifyConfig]:
    """The rules under comparison; `exact` first."""
    chosen = {
        EXACT: VerifyConfig(rule="exact"),
        "mars θ .9": VerifyConfig(theta=0.9),
        "mars θ .96": VerifyConfig(theta=0.96),
        "mars gap 1": VerifyConfig(margin="logit-gap", gap=1.0),
        "mars gap .5": VerifyConfig(margin="logit-gap", gap=0.5),
        "mars θ .96 longest": VerifyConfig(theta=0.96, branch="longest"),
        "mars gap 1 longest": VerifyConfig(margin="logit-gap", gap=1.0, branch="longest"),
        "topk-delta": VerifyConfig(rule="topk-delta"),
        "prob-ratio": VerifyConfig(rule="prob-ratio"),
    }
    if temperature > 0:
        released = {"rule": "mars-released", "theta": 0.9}
        chosen |= {
            "typical": VerifyConfig(rule="typical"),
            "mars-paper θ .9": VerifyConfig(rule="mars-paper", theta=0.9),
            "released q draft, ratio on": VerifyConfig(**released),
            "released q draft, ratio off": VerifyConfig(**released, released_ratio=False),
            "released q 1, ratio on": VerifyConfig(**released, released_q="one"),
            "released q 1, ratio off": VerifyConfig(**released, released_q="one", released_ratio=False),
        }
    return chosen


@dataclass
class Watch:
    """Stands in for `verify` and measures the law of every node on the accepted path."""

    config: VerifyConfig
    sampling: SamplingPlan
    protected: frozenset[int]
    distances: list[float] = field(default_factory=list)
    seconds: float = 0.0  # its own, which are no part of decoding

    def __call__(self, tree: DraftTree, logits: Tensor, *arguments: Any, **options: Any) -> Verdict:
        verdict = verify(tree, logits, *arguments, **options)
        started = perf_counter()
        self._measure(tree, logits, verdict)
        self.seconds += perf_counter() - started
        return verdict

    def _measure(self, tree: DraftTree, logits: Tensor, verdict: Verdict) -> None:
        if self.sampling.draws and self.config.rule in ("exact", "mars", "mars-paper", "mars-released"):
            for index in verdict.path[0, : int(verdict.n_accepted[0]) + 1].tolist():
                node = _node(tree, logits, index, self.sampling)
                self.distances.append(total_variation(law(node, self.config, self.protected), node.p))


def _node(tree: DraftTree, logits: Tensor, index: int, sampling: SamplingPlan) -> Node:
    children = (tree.parents[0] == index).nonzero().flatten()
    w = warp(logits[:, index : index + 1], sampling)[0, 0]
    return Node(
        logits=logits[0, index],
        p=w.double().softmax(-1),
        w=w,
        children=tree.tokens[0, children].tolist(),
        q=tree.draft_logprob[0, children].exp().tolist(),
    )


@app.command()
def main(
    prompts: Annotated[list[Path] | None, typer.Option(help="Prompt files; repeatable.")] = None,
    per_file: Annotated[int | None, typer.Option(help="First N prompts of each file.")] = None,
    temperature: float = 0.0,
    tree: Annotated[str, typer.Option(help="chain-N, or total_token,depth,top_k.")] = "26,4,8",
    max_new_tokens: int = 64,
    seed: int = 0,
    threads: int = 1,
    out: Annotated[Path | None, typer.Option(help="Directory for rows.jsonl and the table.")] = None,
    model: Annotated[str | None, typer.Option(help="Target; the embedded one by default.")] = None,
    head: Annotated[str | None, typer.Option(help="Draft head; the embedded one by default.")] = None,
) -> None:
    """Compare acceptance rules on chat prompts."""
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    ea = EaModel.from_pretrained(
        model or str(embedded_target_path()), head or str(embedded_head_path()), dtype="float32"
    )
    ids = [ea.chat_ids(text) for path in prompts or [HELDOUT] for text in read_prompts(path)[:per_file]]
    draft = parse_tree(tree)
    configs = arms(temperature)
    measured: dict[str, list[Measured]] = {name: [] for name in configs}
    with progress(err, len(ids) * len(configs)) as advance:
        for index, prompt in enumerate(ids):
            sampling = SamplingConfig(temperature=temperature, seed=seed + index)
            for name, config in configs.items():
                measured[name].append(measure(ea, prompt, Request(max_new_tokens, draft, config, sampling)))
                advance()
    rows = [summarise(ea, ids, name, measured) for name in configs]
    settings = {
        "prompts": len(ids),
        "temperature": temperature,
        "tree": tree,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "dtype": "float32",
    }
    source = provenance()
    text = markdown(settings, rows, [], source)
    typer.echo(text)
    if out:
        append_row(out / "rows.jsonl", {**settings, "methods": rows, "provenance": source})
        write_atomically(out / f"rules-t{temperature:g}.md", text)


@dataclass(frozen=True)
class Measured:
    """One answer, the speed of its decoding, and the distances of its nodes."""

    result: GenerationResult
    tokens_per_second: float
    distances: list[float]


def measure(ea: EaModel, prompt: Sequence[int], request: Request) -> Measured:
    """Decode one prompt, watching every verification."""
    watch = Watch(request.verify, SamplingPlan.compile([request.sampling]), frozenset(ea.special_ids))
    request = replace(request, stop_ids=ea.stop_ids, special_ids=ea.special_ids)
    steps = Engine(ea.target, ea.ea_layer, verifier=watch).speculate(torch.tensor([list(prompt)]), request)
    result = ResponseStream(steps, ea.tokenizer, len(prompt), (), request.verify.rule, "").result
    return Measured(result, result.new_tokens / (result.seconds - watch.seconds), watch.distances)


def summarise(
    ea: EaModel, prompts: Sequence[Sequence[int]], name: str, measured: dict[str, list[Measured]]
) -> dict[str, Any]:
    """One row of the table, paired with `exact` where it compares."""
    ours, exact = measured[name], measured[EXACT]
    results = [m.result for m in ours]
    tokens, cycles = sum(r.new_tokens for r in results), sum(r.cycles for r in results)
    logprobs = [p for prompt, r in zip(prompts, results, strict=True) for p in log_probabilities(ea, prompt, r)]
    distances = [d for m in ours for d in m.distances]
    pairs = zip(ours, exact, strict=True)
    return {
        "rule": name,
        "tau": round(sum(n + 1 for r in results for n in r.accepted_lengths) / cycles, 3),
        "tok/s against exact": round(median(a.tokens_per_second / b.tokens_per_second for a, b in pairs), 2),
        "relaxed per 1000": round(1000 * sum(r.relaxed for r in results) / tokens, 1),
        "log-probability": round(fmean(logprobs), 3),
        "regret per 1000": round(1000 * sum(r.regret for r in results) / tokens, 1),
        "TV per node": round(fmean(distances), 4) if distances else "",
        "length ratio": round(tokens / sum(m.result.new_tokens for m in exact), 3),
        "4-gram loops": round(fmean(loop_rate(r.token_ids) for r in results), 4),
    }


@torch.inference_mode()
def log_probabilities(ea: EaModel, prompt: Sequence[int], result: GenerationResult) -> list[float]:
    """log p of every new token under the target at T = 1, by one plain forward."""
    ids = torch.tensor([[*prompt, *result.token_ids]], device=ea.device)
    logits = ea.base_model(ids, logits_to_keep=len(result.token_ids) + 1).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None]).flatten().tolist()


def loop_rate(tokens: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that occurred before in the same answer."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


if __name__ == "__main__":
    app()
