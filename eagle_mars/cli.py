"""`eagle-mars generate | compare | tune | info | chat | serve | web | fastchat`: results go to stdout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from eagle_mars.chat.cli import chat, serve
from eagle_mars.chat.fastchat_cli import app as fastchat
from eagle_mars.chat.web_cli import web
from eagle_mars.cli_options import (
    BranchOption,
    Compile,
    CpuPack,
    Depth,
    Device,
    DraftTopK,
    Dtype,
    Gap,
    Head,
    Json,
    MarginOption,
    MaxNewTokens,
    Model,
    Raw,
    Seed,
    Stop,
    System,
    Temperature,
    TensorParallel,
    Theta,
    Threads,
    TopK,
    TopP,
    TotalToken,
    draft_options,
    err,
    load,
    one_sentence_errors,
)
from eagle_mars.config import Rule, SamplingConfig, VerifyConfig
from eagle_mars.errors import ConfigError
from eagle_mars.tune_cli import tune

if TYPE_CHECKING:
    from eagle_mars.model import EaModel, Method

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Faster answers from large language models: EAGLE draft trees, exact or MARS verification.",
)


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
    tensor_parallel: TensorParallel = 1,
    threads: Threads = None,
    cpu_pack: CpuPack = None,
    compile: Compile = False,
    as_json: Json = False,
) -> None:
    """Answer one prompt; the text streams to stdout, a line of statistics goes to stderr."""
    with one_sentence_errors():
        verify = VerifyConfig(rule=rule, theta=theta, margin=margin, gap=gap, branch=branch, max_regret=max_regret)
        sampling = SamplingConfig(temperature=temperature, top_k=sample_top_k, top_p=top_p, seed=seed)
        text = _stdin() if prompt is None or prompt == "-" else prompt
        draft = draft_options(total_token, depth, top_k)
        ea = load(model, head, dtype, device, threads, cpu_pack, draft, tensor_parallel, compile)
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
    compile: Compile = False,
    as_json: Json = False,
) -> None:
    """Decode the same prompts with the target alone, exact and MARS verification, and show them side by side."""
    with one_sentence_errors():
        from eagle_mars import render
        from eagle_mars.compare import BASELINE, Decode
        from eagle_mars.compare import compare as run
        from eagle_mars.prompts import read_prompts

        mars = VerifyConfig(rule="mars", theta=theta, margin=margin, gap=gap, branch=branch)
        sampling = SamplingConfig(temperature=temperature, top_k=sample_top_k, top_p=top_p, seed=seed)
        texts = [*(prompt or []), *(read_prompts(prompts) if prompts else [])][:limit]
        if not texts:
            raise ConfigError("there is no prompt to compare on; give one as an argument or a file with --prompts.")
        ea = load(
            model, head, dtype, device, threads, cpu_pack, draft_options(total_token, depth, top_k), compile=compile
        )
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


def _stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise ConfigError("stdin holds bytes that are no UTF-8; correct its encoding.") from None


def _prompt_ids(ea: EaModel, text: str, raw: bool, system: str | None) -> Any:
    if not text.strip():
        raise ConfigError("the prompt is empty; write something.")
    if raw or ea.tokenizer.chat_template is None:
        return ea.text_ids(text)
    messages = [{"role": "system", "content": system}] if system else []
    return ea.chat_ids([*messages, {"role": "user", "content": text}])


app.command()(tune)
app.command()(chat)
app.command()(serve)
app.command()(web)
app.add_typer(fastchat, name="fastchat")


def main() -> None:
    app()
