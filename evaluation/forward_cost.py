"""What nodes cost on this CPU, and which tau that asks for: `python -m evaluation.forward_cost`.

Two measurements in one process, kernels interleaved: all linear layers of the target alone, for every kernel that torch
offers, and whole forwards with verification for the layouts that a pair can be loaded with. Break-even is the tau at
which a cycle of n nodes, its drafting included, is as fast as plain decoding with the best stock layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from eagle_mars import EaModel
from eagle_mars.embedded import embedded_head_path, embedded_target_path
from eagle_mars.errors import ConfigError
from eagle_mars.prompts import read_prompts
from eagle_mars.tuning.costs import draft_cost, target_seconds
from eagle_mars.tuning.replay import Recording
from evaluation.metrics import Cell
from evaluation.plots import COLOURS
from evaluation.provenance import append_row, provenance, write_atomically
from evaluation.sweep import HELDOUT
from evaluation.table import markdown_table
from evaluation.timing import begin

Product = Callable[[Tensor], Tensor]
LAYOUTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "float32 packed": {"dtype": "float32", "cpu_pack": "float32"},
    "float16 packed": {"dtype": "float32", "cpu_pack": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 packed": {"dtype": "bfloat16", "cpu_pack": "float32"},  # oneDNN's layout of the model's own dtype
}
_STOCK = ("float32", "bfloat16")
_DRAFT = {"depth": 2, "top_k": 2}  # the drafting that break-even counts


def main(
    sizes: Annotated[list[int], typer.Option(help="Nodes; repeatable.")] = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16],  # noqa: B006
    rounds: int = 5,
    threads: int = 2,
    cpu_time: Annotated[bool, typer.Option("--cpu-time", help="One thread's CPU seconds, for a busy machine.")] = False,
    model: Annotated[str | None, typer.Option(help="Target; the embedded one by default.")] = None,
    head: Annotated[str | None, typer.Option(help="Draft head; the embedded one by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for forward-cost.jsonl, .md and .png.")] = None,
) -> None:
    """Time products and forwards over a few rows."""
    clock = begin(threads, cpu_time)
    target, drafter = model or str(embedded_target_path()), head or str(embedded_head_path())
    pairs = dict(_loadable(target, drafter))
    prompt = torch.tensor([pairs["float32"].chat_ids(read_prompts(HELDOUT)[0])])
    products = linear_seconds(pairs["float32"].base_model, sizes, rounds, clock)
    forwards = {name: target_seconds(pair.target, prompt, sizes, rounds, clock) for name, pair in pairs.items()}
    drafting = {name: _drafting(pair, prompt, rounds, clock) for name, pair in pairs.items()}
    plain = min(forwards[name][1] for name in _STOCK)
    break_even = {
        name: {size: (seconds + drafting[name]) / plain for size, seconds in row.items() if size > 1}
        for name, row in forwards.items()
    }
    source = provenance()
    settings = {"rounds": rounds, "clock": "CPU time" if cpu_time else "wall time", "target": Path(target).name}
    text = markdown(settings, source, products, forwards, break_even)
    typer.echo(text)
    if out:
        row = {**settings, "linear_s": products, "forward_s": forwards, "drafting_s": drafting,
               "break_even_tau": break_even, "provenance": source}  # fmt: skip
        append_row(out / "forward-cost.jsonl", row)
        write_atomically(out / "forward-cost.md", text)
        picture(forwards, break_even, out / "forward-cost.png")


def _loadable(target: str, head: str) -> Iterator[tuple[str, EaModel]]:
    """The pair in every layout that this processor has."""
    for name, options in LAYOUTS.items():
        try:
            yield name, EaModel.from_pretrained(target, head, **options)
        except ConfigError as error:
            typer.echo(f"{name} is left out: {error}", err=True)


@torch.inference_mode()
def linear_seconds(
    model: nn.Module, sizes: Sequence[int], rounds: int, clock: Callable[[], float]
) -> dict[str, dict[int, float]]:
    """Median seconds of all linear layers of a float32 model over n rows, by kernel."""
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    seconds: dict[str, dict[int, float]] = {}
    for name, (dtype, prepare) in KERNELS.items():
        try:
            products = [(layer.in_features, prepare(layer.weight.detach())) for layer in layers]
        except RuntimeError as error:  # the only way to ask whether this processor has the layout
            typer.echo(f"{name} is left out: {error}", err=True)
            continue
        seconds[name] = {}
        for size in sizes:
            rows = {width: torch.randn(size, width, dtype=dtype) for width in {width for width, _ in products}}
            times = []
            for _ in range(rounds + 1):
                started = clock()
                for width, product in products:
                    product(rows[width])
                times.append(clock() - started)
            seconds[name][size] = median(times[1:])
    return seconds


def _stock(weight: Tensor) -> Product:
    return lambda x: F.linear(x, weight)


def _onednn(weight: Tensor) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _fbgemm(weight: Tensor) -> Product:
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    return lambda x: torch.ops.quantized.linear_dynamic_fp16(x, packed)


def _int8_weights(weight: Tensor) -> Product:
    scale = weight.abs().amax(1) / 127
    numbers, scale = (weight / scale.unsqueeze(1)).round().to(torch.int8), scale.bfloat16()
    return lambda x: torch.ops.aten._weight_int8pack_mm(x, numbers, scale)


KERNELS: dict[str, tuple[torch.dtype, Callable[[Tensor], Product]]] = {
    "float32": (torch.float32, _stock),
    "float32 packed (oneDNN)": (torch.float32, _onednn),
    "float16 packed (FBGEMM)": (torch.float32, _fbgemm),
    "bfloat16": (torch.bfloat16, lambda weight: _stock(weight.bfloat16())),
    "bfloat16 packed (oneDNN)": (torch.bfloat16, lambda weight: _onednn(weight.bfloat16())),
    "int8 weights, bfloat16": (torch.bfloat16, _int8_weights),
}


def _drafting(pair: EaModel, prompt: Tensor, rounds: int, clock: Callable[[], float]) -> float:
    features = pair.target.prefill(prompt, pair.target.new_cache(1, prompt.shape[1])).features
    recording = Recording(prompt, features, prompt.shape[1] - 2 * rounds - 2)
    return draft_cost(pair.ea_layer, recording, _DRAFT["depth"], _DRAFT["top_k"], rounds, clock).of(_DRAFT["depth"])


def markdown(
    settings: Mapping[str, Any],
    source: Mapping[str, Any],
    products: Mapping[str, Mapping[int, float]],
    forwards: Mapping[str, Mapping[int, float]],
    break_even: Mapping[str, Mapping[int, float]],
) -> str:
    """Three tables with what is needed to repeat them."""
    parts = [
        f"`{source['command']}`",
        ", ".join(f"{key} {value}" for key, value in settings.items()) + ".  \n"
        f"{source['device']}, {source['threads']} threads, torch {source['packages']['torch']}, commit "
        f"{source['commit'][:10]}, {source['date']}.",
        "All linear layers of one forward, ms, by rows:",
        _table(products, 1000, "kernel"),
        "Forward of the target with verification, ms, by nodes:",
        _table(forwards, 1000, "weights"),
        "Tau from which a tree pays against plain decoding with the best stock weights, drafting included:",
        _table(break_even, 1, "weights"),
    ]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _table(numbers: Mapping[str, Mapping[int, float]], scale: float, first: str) -> str:
    rows = {name: {str(size): Cell(scale * value) for size, value in row.items()} for name, row in numbers.items()}
    return markdown_table(rows, first)


def picture(
    forwards: Mapping[str, Mapping[int, float]], break_even: Mapping[str, Mapping[int, float]], path: Path
) -> None:
    """Milliseconds and break-even tau by nodes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    cost, needed = figure.subplots(1, 2)
    for colour, name in zip(COLOURS, forwards, strict=False):
        cost.plot(list(forwards[name]), [1000 * s for s in forwards[name].values()], "o-", color=colour, label=name)
        needed.plot(list(break_even[name]), list(break_even[name].values()), "o-", color=colour, label=name)
    cost.set(xlabel="nodes", ylabel="ms per forward", ylim=(0, None))
    needed.set(xlabel="nodes", ylabel="tau at break-even", ylim=(0, None))
    cost.legend(frameon=False)
    for axes in (cost, needed):
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    typer.run(main)
