"""What the commands share: their options, the loading of the pair that options name, and how a mistake is told."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from eagle_mars.config import Branch, DraftConfig, Margin
from eagle_mars.errors import ConfigError, EagleMarsError

if TYPE_CHECKING:
    from eagle_mars.cpu import PackedWeights
    from eagle_mars.model import EaModel

err = Console(stderr=True)

Model = Annotated[str | None, typer.Option(help="Target: directory or hub id. Default: the embedded SmolLM2-135M.")]
Head = Annotated[str | None, typer.Option(help="Draft head: directory or hub id; goes with --model.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto (the checkpoint's).")]
Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda, ...")]
TensorParallel = Annotated[int, typer.Option(help="Processes of torchrun that hold the target together.", min=1)]
Threads = Annotated[int | None, typer.Option(help="CPU threads.", min=1)]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to generate at most.")]
Theta = Annotated[float | None, typer.Option(help="Low margin is z2/z1 > theta; 1 switches relaxation off.")]
MarginOption = Annotated[Margin, typer.Option(help="How the margin is measured.")]
Gap = Annotated[float | None, typer.Option(help="Low margin is z1 - z2 < gap nats (with --margin logit-gap).")]
BranchOption = Annotated[Branch, typer.Option(help="Path to follow among acceptable ones.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option("--sample-top-k", help="Sample among the k best tokens; 0 is off.")]
TopP = Annotated[float, typer.Option("--top-p", help="Sample inside this probability mass; 1 is off.")]
Seed = Annotated[int | None, typer.Option(help="Seed of all coins.", min=0)]
TotalToken = Annotated[int | None, typer.Option(help="Nodes of the draft tree, root included; -1 measures (`tune`).")]
Depth = Annotated[int | None, typer.Option(help="Tree depth: at most depth + 1 drafts on a path.")]
DraftTopK = Annotated[int | None, typer.Option("--top-k", help="Beam width and fan-out of the tree; 1 is a chain.")]
CpuPack = Annotated[
    bool | None, typer.Option("--cpu-pack/--no-cpu-pack", help="Second copy of the weights in oneDNN's layout.")
]
Compile = Annotated[
    bool, typer.Option("--compile", help="Compile forwards (CUDA: graphs); the first answer waits a minute or two.")
]
ChatTemplate = Annotated[
    str | None, typer.Option(help="vicuna, llama-2, chatml, raw, or a Jinja file. Default: the tokenizer's template.")
]
Raw = Annotated[bool, typer.Option("--raw", help="Give the prompt as it is, without the chat template.")]
System = Annotated[str | None, typer.Option(help="System message of the chat template.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Stop = Annotated[list[str] | None, typer.Option(help="String that ends the answer; repeatable.")]


def load(
    model: str | None,
    head: str | None,
    dtype: str,
    device: str,
    threads: int | None,
    cpu_pack: bool | None,
    draft: dict[str, int],
    tensor_parallel: int = 1,
    compile: bool = False,
) -> EaModel:
    """The pair that the options name; the embedded one when they name none, with its weights packed if on a CPU."""
    if (model is None) != (head is None):
        raise ConfigError("--model and --head go together: name both, or neither for the embedded pair.")
    with err.status("loading the model"):
        import torch
        from transformers.utils import logging as hf_logging

        from eagle_mars.embedded import EMBEDDED_DRAFT, embedded_head_path, embedded_target_path
        from eagle_mars.loading import tensor_parallel_options
        from eagle_mars.model import EaModel

        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()
        if threads:
            torch.set_num_threads(threads)
        if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ConfigError(f"--dtype {dtype} is not a torch dtype; use float32, bfloat16, float16 or auto.")
        if device == "auto" and not torch.cuda.is_available():
            device = "cpu"
        packing: bool | PackedWeights = bool(cpu_pack)
        alone = tensor_parallel == 1
        if cpu_pack is None and alone and model is None and device == "cpu" and dtype in ("auto", "float32"):
            packing = "float16"  # docs/speed.md
        tree = (DraftConfig() if model else EMBEDDED_DRAFT).model_dump() | draft
        return EaModel.from_pretrained(
            model or str(embedded_target_path()),
            head or str(embedded_head_path()),
            **tree,
            dtype=dtype,
            **(tensor_parallel_options(tensor_parallel) or {"device_map": device}),
            cpu_pack=packing,
            compile=compile,
        )


def draft_options(total_token: int | None, depth: int | None, top_k: int | None) -> dict[str, int]:
    given = {"total_token": total_token, "depth": depth, "top_k": top_k}
    return {name: value for name, value in given.items() if value is not None}


@contextmanager
def one_sentence_errors(tells_guarantee: bool = True) -> Iterator[None]:
    """A mistake that the user can mend is one sentence on stderr and exit code 1, never a traceback.

    tells_guarantee: the command prints the rule's guarantee itself, so the library needn't announce it.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    announcer = logging.getLogger("eagle_mars.guarantee")
    announcer.disabled = tells_guarantee
    try:
        yield
    except EagleMarsError as error:
        err.print("[bold red]error:[/bold red] " + escape(str(error)), highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    finally:
        announcer.disabled = False  # a program that calls a command goes on with the library
