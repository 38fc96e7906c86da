"""How long verification takes, against the time that reading the logits takes.

Variants: `naive`, the walk as EAGLE's code does it (logits gathered per path, a Python loop over nodes, `exact` only);
`reference`; `compiled`, the reference under torch.compile; `triton`, on a GPU. Nothing is timed before all variants
have taken the same decisions. Reading is half of a device-to-device copy of the logits: a copy reads and writes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from eagle_mars.config import SamplingConfig, VerifyConfig
from eagle_mars.errors import EagleMarsError
from eagle_mars.sampling import Coins, CoinStream
from eagle_mars.tree import DraftTree
from eagle_mars.verify import RowPlan, plan, verify
from eagle_mars.verify.reference import verify_reference
from evaluation.provenance import append_row, provenance

Decision = tuple[list[list[int]], list[int]]


class DisagreementError(EagleMarsError):
    """Two variants decided differently: their times would compare different work."""


def inputs(batch: int, nodes: int, vocab: int, dtype: torch.dtype, device: str, seed: int) -> tuple[DraftTree, Tensor]:
    """Trees of fan-out 4 over logits whose best tokens are often drafted, so that paths have a usual length."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.tensor([-1] + [(node - 1) // 4 for node in range(1, nodes)]).expand(batch, -1).contiguous()
    logits = torch.randn(batch, nodes, vocab, generator=generator) * 3
    tokens = torch.randint(0, vocab, (batch, nodes), generator=generator)
    rows = torch.arange(batch).unsqueeze(1)
    logits[rows, parents.clamp(min=0), tokens] += torch.rand(batch, nodes, generator=generator) * 20
    tree = DraftTree.from_parents(tokens.to(device), parents.to(device))
    deepest = int(tree.depth.max())
    tree = DraftTree(tree.tokens, tree.parents, tree.depth, tree.ancestors, tree.draft_logprob, deepest)
    return tree, logits.to(dtype).to(device)


def naive_walk(tree: DraftTree, logits: Tensor, temperature: float, coins: Coins) -> Decision:
    """`exact` path by path and node by node, reading the device at each step, as a baseline."""
    accepted_paths, following = [], []
    for row, paths in enumerate(tree.paths()):
        width = max(map(len, paths))
        index = torch.tensor([path + [-1] * (width - len(path)) for path in paths], device=logits.device)
        gathered = logits[row, index]
        if temperature:
            gathered = gathered.float() / temperature
        path, leaf = [0], 0
        removed: list[int] = []
        while True:
            at = gathered[leaf, len(path) - 1]
            children = list(dict.fromkeys(p[len(path)] for p in paths if p[: len(path)] == path and len(p) > len(path)))
            accepted, removed = None, []
            mass = torch.softmax(at, -1) if temperature else at
            for child in children:
                token = int(tree.tokens[row, child])
                hit = token == int(at.argmax())
                if temperature:
                    hit = float(coins.accept[row, child]) < float(mass[token])
                if hit:
                    accepted = child
                    break
                removed.append(token)
                if temperature:
                    mass[token] = 0
                    mass = mass / mass.sum()
            if accepted is None:
                break
            path.append(accepted)
            leaf = next(i for i, p in enumerate(paths) if p[: len(path)] == path)
        accepted_paths.append(path)
        following.append(int((mass.double().cumsum(-1) <= coins.draw[row]).sum()) if temperature else int(at.argmax()))
    return accepted_paths, following


def decision(tree: DraftTree, logits: Tensor, rows: RowPlan, coins: Coins, run: Callable[..., Any]) -> Decision:
    verdict = run(tree, logits, rows, coins)
    paths = [[node for node in path if node >= 0] for path in verdict.path.tolist()]
    return paths, verdict.next_token.tolist()


def milliseconds(run: Callable[[], object], device: str, repeats: int) -> float:
    """Median wall time of one call, the device idle before and after."""
    times = []
    for repeat in range(repeats + 3):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        if repeat >= 3:
            times.append((time.perf_counter() - start) * 1e3)
    return median(times)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def variants(device: str, compiled: bool) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {"reference": verify_reference}
    if compiled:
        found["compiled"] = torch.compile(verify_reference)
    if device != "cpu":
        from eagle_mars.verify.triton_backend import verify_triton

        found["triton"] = verify_triton
    return found


def measure(
    batch: int, nodes: int, vocab: int, dtype: torch.dtype, temperature: float, rule: str, device: str, repeats: int,
    compiled: bool,
) -> dict[str, Any]:  # fmt: skip
    """One row: bytes of logits, milliseconds of a copy and of each variant, and their ratio to reading the logits."""
    tree, logits = inputs(batch, nodes, vocab, dtype, device, seed=nodes)
    sampling = SamplingConfig(temperature=temperature)
    rows = plan(VerifyConfig(rule=rule), sampling, vocab_size=vocab, batch=batch, device=device)
    coins = CoinStream(list(range(batch)), device).next(nodes)
    expected = decision(tree, logits, rows, coins, partial(verify, backend="reference"))
    runs: dict[str, Callable[[], object]] = {}
    for name, run in variants(device, compiled).items():
        if decision(tree, logits, rows, coins, run) != expected:
            raise DisagreementError(f"{name} differs from the reference at {nodes} nodes x {vocab}: nothing is timed.")
        runs[name] = partial(run, tree, logits, rows, coins)
    if rule == "exact":
        if naive_walk(tree, logits, temperature, coins) != expected:
            raise DisagreementError(f"naive differs from the reference at {nodes} nodes x {vocab}: nothing is timed.")
        runs["naive"] = partial(naive_walk, tree, logits, temperature, coins)
    if device != "cpu":
        from eagle_mars.verify.triton_backend import Launch, launch_statistics

        runs["triton statistics"] = partial(launch_statistics, logits, rows, Launch())

    target = torch.empty_like(logits)
    copy = milliseconds(partial(target.copy_, logits), device, repeats)
    times = {name: milliseconds(run, device, repeats) for name, run in runs.items()}
    return {
        "batch": batch, "nodes": nodes, "vocab": vocab, "dtype": str(dtype).removeprefix("torch."),
        "temperature": temperature, "rule": rule, "bytes": logits.numel() * logits.element_size(), "copy_ms": copy,
        "ms": times, "ratio_to_reading": {name: value / (copy / 2) for name, value in times.items()},
    }  # fmt: skip


def resource_table() -> Table:
    """Registers, spills and shared memory of each kernel for each target, compiled here without a GPU."""
    from eagle_mars.verify.compiled import TARGETS, compile_variant, resources
    from eagle_mars.verify.compiled import variants as kernel_variants

    table = Table(
        "target", "kernel", "registers", "spills", "shared bytes", title="64 nodes x 152 k, bf16, T > 0, top-p"
    )
    for name, target in TARGETS.items():
        for variant in kernel_variants(nodes=64, block=4096, splits=64, draws=True, cut=True):
            used = resources(compile_variant(variant, target), target)
            table.add_row(name, variant.name, str(used.registers), str(used.spills), str(used.shared))
    return table


def main(
    nodes: Annotated[list[int], typer.Option(help="nodes per tree")] = [26, 64],  # noqa: B006
    vocab: Annotated[list[int], typer.Option(help="vocabulary sizes")] = [49152, 151936],  # noqa: B006
    batch: Annotated[list[int], typer.Option(help="sequences")] = [1],  # noqa: B006
    temperature: Annotated[list[float], typer.Option()] = [0.0, 1.0],  # noqa: B006
    rule: Annotated[list[str], typer.Option()] = ["exact", "mars"],  # noqa: B006
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16")] = "float32",
    device: Annotated[str, typer.Option()] = "cuda" if torch.cuda.is_available() else "cpu",
    repeats: Annotated[int, typer.Option()] = 20,
    compiled: Annotated[bool, typer.Option(help="also time the reference under torch.compile")] = True,
    resources: Annotated[bool, typer.Option(help="print the kernels' registers, spills and shared memory")] = False,
    out: Annotated[Path | None, typer.Option(help="append JSON rows to this file")] = None,
) -> None:
    """Time verification over nodes x vocabulary x batch: milliseconds, and their ratio to reading the logits once."""
    console = Console()
    if resources:
        console.print(resource_table())
    source = provenance()
    table = Table("B", "nodes", "vocab", "T", "rule", "MB", "copy ms", "variant: ms (x reading)")
    for sizes in itertools.product(batch, nodes, vocab):
        for t, name in itertools.product(temperature, rule):
            row = measure(*sizes, getattr(torch, dtype), t, name, device, repeats, compiled)
            cells = ", ".join(f"{k}: {v:.3f} ({row['ratio_to_reading'][k]:.1f})" for k, v in row["ms"].items())
            table.add_row(*map(str, sizes), f"{t:g}", name, f"{row['bytes'] / 1e6:.1f}", f"{row['copy_ms']:.3f}", cells)
            if out:
                append_row(out, {**row, "provenance": source})
    console.print(table)
