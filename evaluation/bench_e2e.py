"""Ours against every peer on the same weights and prompts: `python scripts/bench_e2e.py`.

All arms run in one process, interleaved prompt by prompt: transformers' greedy `generate` in single precision and in
bfloat16, its prompt lookup and assisted generation, the same three on our packed weights (`packed`, which tells what
the kernels give and what the method), our target alone (`ar`), `exact` and `mars`. `--eagle-loop` adds EAGLE's loop.
`--compiled-tree` adds ours in bfloat16, compiled (`eagle_mars.compiled`). Every lossless arm in single precision must
give the text of `ar` on its weights, else the run fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Annotated, Any

import typer
from rich.console import Console
from transformers import PreTrainedModel

from eagle_mars import EaModel, GenerationResult, VerifyConfig
from eagle_mars.cli_options import one_sentence_errors
from eagle_mars.compare import BASELINE, Comparison, Decode, compare
from eagle_mars.config import DraftConfig
from eagle_mars.cpu import PackedWeights, pack_linears
from eagle_mars.embedded import embedded_head_path, embedded_target_path
from eagle_mars.errors import EagleMarsError
from eagle_mars.loading import load_target
from eagle_mars.model import Method
from eagle_mars.prompts import read_prompts
from eagle_mars.render import progress
from evaluation import eagle_loop
from evaluation.forward_clock import ForwardClock
from evaluation.metrics import Cell, interval, median_ratio
from evaluation.peers import hf_generate, shallow
from evaluation.provenance import append_row, provenance, write_atomically
from evaluation.sweep import HELDOUT, parse_tree
from evaluation.table import markdown_table, plain
from evaluation.timing import begin

STOCK = "generate float32"
LOOP = "eagle loop"
_TOKENS_TO_COMPILE = 24  # several cycles: the first one after a prompt isn't compiled
err = Console(stderr=True)


class DifferentTextError(EagleMarsError):
    """A lossless arm gave another text than the target alone."""


@dataclass(frozen=True)
class Shares:
    """Per prompt of one arm: decoding time outside forwards, as a share, and new tokens per target forward."""

    overhead: list[float] = field(default_factory=list)
    tau: list[float] = field(default_factory=list)


def main(
    prompts: Annotated[Path, typer.Option(help="question.jsonl or one prompt a line.")] = HELDOUT,
    limit: Annotated[int | None, typer.Option(help="First N of the prompts.")] = None,
    every: Annotated[int, typer.Option(help="Use every n-th prompt.")] = 1,
    max_new_tokens: int = 48,
    exact_tree: Annotated[str, typer.Option(help="Tree of `exact`: chain-N, or total_token,depth,top_k.")] = "8,3,4",
    mars_tree: Annotated[str, typer.Option(help="Tree of `mars`.")] = "8,3,4",
    theta: float = 0.9,
    pack: Annotated[str, typer.Option(help="Our weights on a CPU: float32 or float16 (`eagle_mars.cpu`).")] = "float16",
    lookup: Annotated[int, typer.Option(help="Tokens that prompt lookup drafts.")] = 3,
    assistant_layers: Annotated[int, typer.Option(help="Layers of the assistant; 0 leaves it out.")] = 0,
    loop: Annotated[bool, typer.Option("--eagle-loop", help="EAGLE's loop as an arm.")] = False,
    static: Annotated[bool, typer.Option("--static", help="`generate` with a static cache as an arm.")] = False,
    compiled_tree: Annotated[str | None, typer.Option(help="Tree of compiled bfloat16 arms; none without it.")] = None,
    bf16: Annotated[bool, typer.Option("--bf16/--no-bf16", help="`generate` in bfloat16 as an arm.")] = True,
    threads: int = 2,
    cpu_time: Annotated[bool, typer.Option("--cpu-time", help="One thread's CPU seconds, for a busy machine.")] = False,
    model: Annotated[str | None, typer.Option(help="Target; the embedded one by default.")] = None,
    head: Annotated[str | None, typer.Option(help="Draft head; the embedded one by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for e2e.jsonl and e2e.md.")] = None,
) -> None:
    """Time every way of decoding the same prompts."""
    read = begin(threads, cpu_time)
    with one_sentence_errors():
        target = model or str(embedded_target_path())
        packing = _packing(pack)
        ea = EaModel.from_pretrained(
            target, head or str(embedded_head_path()), dtype="float32", device_map="cpu", cpu_pack=packing
        )
        ids = [ea.chat_ids(text) for text in read_prompts(prompts)[::every][:limit]]
        clock = ForwardClock(read)
        shares: dict[str, Shares] = {}
        arms = _ours(ea, clock, shares, parse_tree(exact_tree), parse_tree(mars_tree), theta, loop)
        arms |= _peers("packed", ea.base_model, ea.tokenizer, lookup, assistant_layers, packing)
        stock, _ = load_target(target, dtype="float32", device_map="cpu")
        arms |= _peers("float32", stock, ea.tokenizer, lookup, assistant_layers)
        if static:
            arms["generate static"] = partial(_generate, stock, ea.tokenizer, "static", cache_implementation="static")
        if bf16:
            half, _ = load_target(target, dtype="bfloat16", device_map="cpu")
            arms["generate bfloat16"] = partial(_generate, half, ea.tokenizer, "generate bfloat16")
        if compiled_tree:
            arms |= _compiled(target, head or str(embedded_head_path()), parse_tree(compiled_tree), theta, ids[0])
        if cpu_time:
            arms = {name: partial(_in_cpu_seconds, arm) for name, arm in arms.items()}
        with progress(err, len(ids) * len(arms)) as advance, clock.watching(ea):
            comparison = compare(ids, arms, max_new_tokens=max_new_tokens, on_result=lambda name, result: advance())
        require_same_texts(comparison)
    rows = summarise(comparison, {name: _without_warm_up(share, len(ids)) for name, share in shares.items()})
    settings = {
        "prompts": len(ids),
        "clock": "CPU time" if cpu_time else "wall time",
        "max_new_tokens": max_new_tokens,
        "exact": exact_tree,
        "mars": f"{mars_tree} theta {theta}",
        "pack": pack,
        "compiled": compiled_tree,
        "lookup": lookup,
        "assistant_layers": assistant_layers,
    }
    source = provenance()
    text = markdown(settings, rows, source)
    typer.echo(text)
    if out:
        append_row(
            out / "e2e.jsonl",
            {**settings, "arms": {name: plain(row) for name, row in rows.items()}, "provenance": source},
        )
        write_atomically(out / "e2e.md", text)


def _packing(name: str) -> PackedWeights:
    if name == "float16":
        return "float16"
    if name == "float32":
        return "float32"
    raise typer.BadParameter(f"{name!r} is neither float32 nor float16", param_hint="--pack")


def _ours(
    ea: EaModel,
    clock: ForwardClock,
    shares: dict[str, Shares],
    exact_tree: DraftConfig,
    mars_tree: DraftConfig,
    theta: float,
    loop: bool,
) -> dict[str, Decode]:
    exact, mars = VerifyConfig(rule="exact"), VerifyConfig(theta=theta)
    ways: dict[str, Callable[[Sequence[int], int, Callable[[], None]], GenerationResult]] = {
        BASELINE: partial(_stream, ea, "autoregressive", None, None),
        "exact": partial(_stream, ea, "speculative", exact_tree, exact),
        "mars": partial(_stream, ea, "speculative", mars_tree, mars),
    }
    if loop:
        ways[LOOP] = partial(eagle_loop.decode, ea, exact_tree)
    for name in ways:
        shares[name] = Shares()
    return {name: partial(_clocked, way, clock, shares[name]) for name, way in ways.items()}


def _compiled(target: str, head: str, tree: DraftConfig, theta: float, prompt: Sequence[int]) -> dict[str, Decode]:
    """Ours in bfloat16, compiled while they decode `prompt`."""
    ea = EaModel.from_pretrained(target, head, dtype="bfloat16", device_map="cpu", compile=True)
    rules = {"exact": VerifyConfig(rule="exact"), "mars": VerifyConfig(theta=theta)}
    arms: dict[str, Decode] = {f"{BASELINE} compiled": partial(_stream, ea, "autoregressive", None, None)}
    arms |= {f"{name} compiled": partial(_stream, ea, "speculative", tree, rule) for name, rule in rules.items()}
    for decode in arms.values():
        decode(prompt, _TOKENS_TO_COMPILE)
    return arms


def _peers(
    name: str,
    model: PreTrainedModel,
    tokenizer: Any,
    lookup: int,
    assistant_layers: int,
    packing: PackedWeights | None = None,
) -> dict[str, Decode]:
    arms: dict[str, Decode] = {
        f"generate {name}": partial(_generate, model, tokenizer, f"generate {name}"),
        f"lookup {name}": partial(_generate, model, tokenizer, f"lookup {name}", prompt_lookup_num_tokens=lookup),
    }
    if assistant_layers:
        assistant = shallow(model, assistant_layers)
        if packing:
            pack_linears(assistant, packing)
        arms[f"assisted {name}"] = partial(_generate, model, tokenizer, f"assisted {name}", assistant_model=assistant)
    return arms


def _generate(
    model: PreTrainedModel, tokenizer: Any, name: str, prompt: Sequence[int], limit: int, **options: Any
) -> GenerationResult:
    return hf_generate(model, tokenizer, prompt, limit, name, **options)


def _stream(
    ea: EaModel,
    method: Method,
    draft: DraftConfig | None,
    verify: VerifyConfig | None,
    prompt: Sequence[int],
    limit: int,
    on_prefill: Callable[[], None] = lambda: None,
) -> GenerationResult:
    stream = ea.stream(prompt, max_new_tokens=limit, draft=draft, verify=verify, method=method)
    next(stream.cycles())
    on_prefill()
    return stream.result


def _clocked(
    way: Callable[[Sequence[int], int, Callable[[], None]], GenerationResult],
    clock: ForwardClock,
    shares: Shares,
    prompt: Sequence[int],
    limit: int,
) -> GenerationResult:
    result = way(prompt, limit, clock.reset)
    shares.overhead.append(1 - clock.seconds / clock.elapsed)
    shares.tau.append((result.new_tokens - 1) / max(clock.target_calls, 1))
    return result


def _in_cpu_seconds(decode: Decode, prompt: Sequence[int], limit: int) -> GenerationResult:
    started = thread_time()
    result = decode(prompt, limit)
    return replace(result, prefill_seconds=0.0, decode_seconds=thread_time() - started)


def _without_warm_up(shares: Shares, prompts: int) -> Shares:
    return Shares(shares.overhead[-prompts:], shares.tau[-prompts:])


def require_same_texts(comparison: Comparison) -> None:
    """Raise DifferentTextError unless every lossless arm in single precision gave the text of its own weights."""
    groups = {BASELINE: ["exact", LOOP, "generate packed", "lookup packed", "assisted packed"],
              STOCK: ["lookup float32", "assisted float32", "generate static"]}  # fmt: skip
    for base, arms in groups.items():
        expected = [result.token_ids for result in comparison.results[base]]
        for arm in arms:
            given = [result.token_ids for result in comparison.results.get(arm, [])] or expected
            wrong = [index for index, pair in enumerate(zip(given, expected, strict=True)) if pair[0] != pair[1]]
            if wrong:
                raise DifferentTextError(f"{arm!r} differs from {base!r} on prompts {wrong}, in single precision.")


def summarise(comparison: Comparison, shares: Mapping[str, Shares]) -> dict[str, dict[str, Cell]]:
    """One row per arm; ratios are medians over prompts of tokens per second, with bootstrap intervals."""
    speeds = {name: [r.tokens_per_second for r in results] for name, results in comparison.results.items()}
    totals = {
        name: sum(r.new_tokens for r in results) / sum(r.seconds for r in results)
        for name, results in comparison.results.items()
    }
    stock = [name for name in totals if name.startswith("generate") and name != "generate packed"]
    best = max(stock, key=lambda name: totals[name])
    texts = {name: [r.token_ids for r in results] for name, results in comparison.results.items()}
    rows = {}
    for name, speed in speeds.items():
        row = {
            "tokens per second": Cell(totals[name]),
            f"over {best}": interval([speed, speeds[best]], median_ratio),
            "over generate packed": interval([speed, speeds["generate packed"]], median_ratio),
            "same text as ar": Cell(float(sum(a == b for a, b in zip(texts[name], texts[BASELINE], strict=True)))),
        }
        nothing = Cell.empty("of our own loops only")
        measured = shares.get(name)
        taus = measured.tau if measured else [r.tau for r in comparison.results[name] if r.accepted_lengths]
        row["tokens per forward"] = Cell(median(taus)) if taus else nothing
        row["outside forwards, %"] = Cell(100 * median(measured.overhead)) if measured else nothing
        rows[name] = row
    return rows


def markdown(settings: dict[str, Any], rows: dict[str, dict[str, Cell]], source: dict[str, Any]) -> str:
    """The table with what is needed to repeat it."""
    return "\n".join(
        [
            f"`{source['command']}`",
            "",
            ", ".join(f"{key} {value}" for key, value in settings.items()) + ", T = 0.",
            f"{source['device']}, {source['threads']} threads, torch {source['packages']['torch']}, transformers "
            f"{source['packages']['transformers']}, commit {source['commit'][:10]}, {source['date']}.",
            "Ratios: medians over prompts of tokens per second, prefill included, with 95 % intervals.",
            "",
            markdown_table(rows),
        ]
    )
