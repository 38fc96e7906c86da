"""`eagle-mars generate | compare | info`: the command line. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from eagle_mars.config import Branch, DraftConfig, Margin, Rule, SamplingConfig, VerifyConfig
from eagle_mars.errors import ConfigError, EagleMarsError

if TYPE_CHECKING:
    from eagle_mars.model import EaModel, Method

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Faster answers from large language models: EAGLE draft trees, exact or MARS verification.",
)
err = Console(stderr=True)

# Options that several commands share.
Model = Annotated[str | None, typer.Option(help="Target: directory or hub id. Default: the embedded SmolLM2-135M.")]
Head = Annotated[str | None, typer.Option(help="Draft head: directory or hub id; goes with --model.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto (the checkpoint's).")]
Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda, ...")]
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
TotalToken = Annotated[int | None, typer.Option(help="Nodes of the draft tree, root included.")]
Depth = Annotated[int | None, typer.Option(help="Tree depth: at most depth + 1 drafts on a path.")]
DraftTopK = Annotated[int | None, typer.Option("--top-k", help="Beam width and fan-out of the tree; 1 is a chain.")]
CpuPack = Annotated[
    bool | None, typer.Option("--cpu-pack/--no-cpu-pack", help="Second copy of the weights in oneDNN's layout.")
]
Raw = Annotated[bool, typer.Option("--raw", help="Give the prompt as it is, without the chat template.")]
System = Annotated[str | None, typer.Option(help="System message of the chat template.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Stop = Annotated[list[str] | None, typer.Option(help="String that ends the answer; repeatable.")]


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; read from stdin when missing or '-'.")] = None,
    rule: Annotated[Rule, typer.Option(help="Acceptance rule.")] = "mars",
    theta: Theta = 0.9,
    margin: MarginOption = "logit-ratio",
    gap: Gap = None,
    branch: BranchOption = "exact-first",
    max_regret: Annotated[float | None, typer.Option(help="Nats of regret per answer, then exact for good.")] = None,
    temperature: Temperature = 0.0,
    sample_top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    max_new_tokens: MaxNewTokens = 256,
    total_token: TotalToken = None,
    depth: Depth = None,
    top_k: DraftTopK = None,
    stop: Stop = None,
    raw: Raw = False,
    system: System = None,
    model: Model = None,
    head: Head = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    cpu_pack: CpuPack = None,
    as_json: Json = False,
) -> None:
    """Answer one prompt; the text streams to stdout, a line of statistics goes to stderr."""
    with _one_sentence_errors():
        verify = VerifyConfig(rule=rule, theta=theta, margin=margin, gap=gap, branch=branch, max_regret=max_regret)
        sampling = SamplingConfig(temperature=temperature, top_k=sample_top_k, top_p=top_p, seed=seed)
        text = sys.stdin.read() if prompt in (None, "-") else prompt or ""
        draft = _draft_options(total_token, depth, top_k)
        ea = load(model, head, dtype, device, threads, cpu_pack, draft)
        stream = ea.stream(
            _prompt_ids(ea, text, raw, system),
            max_new_tokens=max_new_tokens,
            verify=verify,
            sampling=sampling,
            stop=stop or (),
        )
        for piece in stream:
            if not as_json:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
        result = stream.result
        if as_json:
            from eagle_mars.render import result_json

            typer.echo(json.dumps(result_json(result), ensure_ascii=False))
        else:
            typer.echo()
            err.print(
                f"[dim]{result.new_tokens} tokens in {result.seconds:.2f} s ({result.tokens_per_second:.1f}/s), "
                f"tau {result.tau:.2f}, {result.relaxed} relaxed. {result.guarantee}[/dim]",
                highlight=False,
            )


@app.command()
def compare(
    prompt: Annotated[list[str] | None, typer.Argument(help="Prompts; or use --prompts.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="File: EAGLE's question.jsonl (first turns), or one prompt a line.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Use only the first N prompts.", min=1)] = None,
    theta: Theta = 0.9,
    margin: MarginOption = "logit-ratio",
    gap: Gap = None,
    branch: BranchOption = "exact-first",
    temperature: Temperature = 0.0,
    sample_top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 96,
    total_token: TotalToken = None,
    depth: Depth = None,
    top_k: DraftTopK = None,
    stop: Stop = None,
    raw: Raw = False,
    system: System = None,
    model: Model = None,
    head: Head = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    cpu_pack: CpuPack = None,
    as_json: Json = False,
) -> None:
    """Decode the same prompts with the target alone, exact and MARS verification, and show them side by side."""
    with _one_sentence_errors():
        from eagle_mars import render
        from eagle_mars.compare import BASELINE, Decode
        from eagle_mars.compare import compare as run
        from eagle_mars.prompts import read_prompts

        mars = VerifyConfig(rule="mars", theta=theta, margin=margin, gap=gap, branch=branch)
        sampling = SamplingConfig(temperature=temperature, top_k=sample_top_k, top_p=top_p, seed=seed)
        texts = [*(prompt or []), *(read_prompts(prompts) if prompts else [])][:limit]
        if not texts:
            raise ConfigError("there is no prompt to compare on; give one as an argument or a file with --prompts.")
        ea = load(model, head, dtype, device, threads, cpu_pack, _draft_options(total_token, depth, top_k))
        ids = [_prompt_ids(ea, text, raw, system) for text in texts]

        def arm(method: Method, verify: VerifyConfig | None = None) -> Decode:
            return lambda prompt, limit: ea.generate(
                prompt, max_new_tokens=limit, verify=verify, sampling=sampling, stop=stop or (), method=method
            )

        arms = {
            BASELINE: arm("autoregressive"),
            "exact": arm("speculative", VerifyConfig(rule="exact")),
            "mars": arm("speculative", mars),
        }
        with render.progress(err, len(ids) * len(arms)) as advance:
            comparison = run(ids, arms, max_new_tokens=max_new_tokens, on_result=lambda method, result: advance())
        if not as_json:
            render.comparison(Console(), texts, comparison)
        else:
            typer.echo(json.dumps(comparison.summary()))


@app.command()
def info(as_json: Json = False) -> None:
    """Versions, device, the embedded pair, and what is supported."""
    from eagle_mars import render
    from eagle_mars.info import collect

    facts = collect()
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        render.facts(Console(), facts)


def load(
    model: str | None,
    head: str | None,
    dtype: str,
    device: str,
    threads: int | None,
    cpu_pack: bool | None,
    draft: dict[str, int],
) -> EaModel:
    """The pair that the options name; the embedded one when they name none, with its weights packed if on a CPU."""
    if (model is None) != (head is None):
        raise ConfigError("--model and --head go together: name both, or neither for the embedded pair.")
    with err.status("loading the model"):
        import torch
        from transformers.utils import logging as hf_logging

        from eagle_mars.embedded import EMBEDDED_DRAFT, embedded_head_path, embedded_target_path
        from eagle_mars.model import EaModel

        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()
        if threads:
            torch.set_num_threads(threads)
        if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ConfigError(f"--dtype {dtype} is not a torch dtype; use float32, bfloat16, float16 or auto.")
        if device == "auto" and not torch.cuda.is_available():
            device = "cpu"
        if cpu_pack is None:
            cpu_pack = model is None and device == "cpu" and dtype in ("auto", "float32")
        tree = (DraftConfig() if model else EMBEDDED_DRAFT).replace(**draft)
        return EaModel.from_pretrained(
            model or str(embedded_target_path()),
            head or str(embedded_head_path()),
            **tree.model_dump(),
            dtype=dtype,
            device_map=device,
            cpu_pack=cpu_pack,
        )


def _draft_options(total_token: int | None, depth: int | None, top_k: int | None) -> dict[str, int]:
    given = {"total_token": total_token, "depth": depth, "top_k": top_k}
    return {name: value for name, value in given.items() if value is not None}


def _prompt_ids(ea: EaModel, text: str, raw: bool, system: str | None) -> Any:
    if not text.strip():
        raise ConfigError("the prompt is empty; write something.")
    if raw or ea.tokenizer.chat_template is None:
        return ea.tokenizer(text).input_ids
    messages = [{"role": "system", "content": system}] if system else []
    return ea.chat_ids([*messages, {"role": "user", "content": text}])


@contextmanager
def _one_sentence_errors() -> Iterator[None]:
    """A mistake that the user can mend is one sentence on stderr and exit code 1, never a traceback."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("eagle_mars.guarantee").disabled = True  # every command prints the guarantee itself
    try:
        yield
    except EagleMarsError as error:
        err.print("[bold red]error:[/bold red] " + escape(str(error)), highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


def main() -> None:
    app()
