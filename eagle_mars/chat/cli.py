"""`eagle-mars chat | serve`. Everything heavy is imported when a command runs, so that --help stays quick."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from eagle_mars.cli_options import (
    BranchOption,
    ChatTemplate,
    Compile,
    CpuPack,
    Depth,
    Device,
    DraftTopK,
    Dtype,
    Gap,
    Head,
    MarginOption,
    MaxNewTokens,
    Model,
    Seed,
    System,
    Temperature,
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

if TYPE_CHECKING:
    from fastapi import FastAPI

    from eagle_mars.chat.session import ChatService

DefaultRule = Annotated[Rule, typer.Option(help="Acceptance rule of requests that name none.")]
MaxRegret = Annotated[float | None, typer.Option(help="Nats of regret per answer, then exact for good.")]


def serve(
    host: Annotated[str, typer.Option(help="Address to bind; anything but loopback should have an API key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port to bind.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="EAGLE_MARS_API_KEY", help="Bearer token that /v1 demands.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Model name for clients. Default: the target's last path part.")] = (
        None
    ),
    rule: DefaultRule = "mars",
    theta: Theta = 0.9,
    margin: MarginOption = "logit-ratio",
    gap: Gap = None,
    branch: BranchOption = "exact-first",
    max_regret: MaxRegret = None,
    rules: Annotated[str, typer.Option(help="Rules that requests may name, separated by commas.")] = "exact,mars",
    max_theta_relaxation: Annotated[
        float | None, typer.Option(help="Ceiling on 1 - theta; 0.1 refuses theta below 0.9.", min=0, max=1)
    ] = None,
    max_gap: Annotated[float | None, typer.Option(help="Ceiling on gap, in nats.", min=0)] = None,
    temperature: Annotated[float, typer.Option(help="Of requests that name none.", min=0, max=2)] = 1.0,
    max_tokens: Annotated[int, typer.Option(help="Of requests that name none.", min=1)] = 1024,
    max_active: Annotated[int, typer.Option(help="Requests that share the engine, cycle by cycle.", min=1)] = 4,
    batch: Annotated[
        bool, typer.Option("--batch/--no-batch", help="Active requests share target forwards: more tokens per second.")
    ] = False,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; beyond it the answer is 429.", min=0)] = 32,
    max_body_mib: Annotated[int, typer.Option(help="Size limit of a request.", min=1)] = 4,
    drain_seconds: Annotated[int, typer.Option(help="Time that running requests get after SIGTERM.", min=0)] = 30,
    fastchat_controller: Annotated[
        str | None, typer.Option(help="URL of a FastChat controller: also serve as its worker, under /fc.")
    ] = None,
    fastchat_address: Annotated[
        str | None, typer.Option(help="URL under which FastChat reaches /fc. Default: http://HOST:PORT/fc.")
    ] = None,
    chat_template: ChatTemplate = None,
    total_token: TotalToken = None,
    depth: Depth = None,
    top_k: DraftTopK = None,
    model: Model = None,
    head: Head = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    cpu_pack: CpuPack = None,
    compile: Compile = False,
) -> None:
    """Serve OpenAI's API (/v1/chat/completions, /v1/completions, /v1/models), /health and /metrics."""
    with one_sentence_errors():
        try:
            import uvicorn

            from eagle_mars.chat.metrics import Metrics
            from eagle_mars.chat.openai_server import ServerOptions, create_app
        except ImportError as error:
            raise ConfigError(f"serving needs more packages: pip install 'eagle-mars[chat]' ({error}).") from error
        from eagle_mars.chat.fastchat_launch import url_of
        from eagle_mars.chat.limits import Limits
        from eagle_mars.chat.session import ChatService
        from eagle_mars.chat.templates import chat_template as read_template
        from eagle_mars.embedded import TARGET_NAME

        if fastchat_controller and not fastchat_address:
            fastchat_address = url_of(host, port, "--fastchat-address") + "/fc"
        verify = VerifyConfig(rule=rule, theta=theta, margin=margin, gap=gap, branch=branch, max_regret=max_regret)
        limits = Limits(_rules(rules), max_theta_relaxation, max_gap)
        template = read_template(chat_template)
        metrics = Metrics()
        service = ChatService(
            load(
                model, head, dtype, device, threads, cpu_pack, draft_options(total_token, depth, top_k), compile=compile
            ),
            template=template,
            verify=verify,
            limits=limits,
            default_max_new_tokens=max_tokens,
            max_active=max_active,
            max_waiting=max_waiting,
            share_forwards=batch,
            on_end=metrics.observe,
        )
        name = name or (Path(model).name if model else TARGET_NAME)
        app = create_app(service, metrics, ServerOptions(name, api_key, temperature, max_body_mib * 2**20))
        if host not in ("127.0.0.1", "localhost", "::1") and not api_key:
            err.print(f"[yellow]anyone who reaches {host}:{port} can use this server; set --api-key.[/yellow]")
        if fastchat_controller and fastchat_address:
            _mount_worker(app, service, fastchat_controller, fastchat_address, name)
            if api_key:
                err.print("[yellow]FastChat's protocol knows no API key: /fc answers everyone.[/yellow]")
        uvicorn.run(app, host=host, port=port, timeout_graceful_shutdown=drain_seconds)


def _mount_worker(app: FastAPI, service: ChatService, controller: str, address: str, name: str) -> None:
    from eagle_mars.chat.fastchat_launch import require_fschat

    require_fschat()
    from eagle_mars.chat.fastchat_worker import EagleMarsWorker

    worker = EagleMarsWorker(service, controller, address, name)
    app.mount("/fc", worker.app)
    worker.init_heart_beat()


def chat(
    rule: Annotated[Rule, typer.Option(help="Acceptance rule; !!rule changes it.")] = "mars",
    theta: Theta = 0.9,
    margin: MarginOption = "logit-ratio",
    gap: Gap = None,
    branch: BranchOption = "exact-first",
    max_regret: MaxRegret = None,
    temperature: Temperature = 0.0,
    sample_top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.", min=0.1)] = 1.0,
    max_new_tokens: MaxNewTokens = 512,
    system: System = None,
    chat_template: ChatTemplate = None,
    total_token: TotalToken = None,
    depth: Depth = None,
    top_k: DraftTopK = None,
    model: Model = None,
    head: Head = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    cpu_pack: CpuPack = None,
    compile: Compile = False,
) -> None:
    """Chat in the terminal; relaxed tokens are coloured, !!help lists the commands."""
    with one_sentence_errors():
        import readline  # noqa: F401  # gives `input` a history and line editing

        from rich.console import Console

        from eagle_mars.chat.limits import Limits
        from eagle_mars.chat.session import ChatOptions, ChatService
        from eagle_mars.chat.templates import chat_template as read_template
        from eagle_mars.chat.terminal import Terminal

        verify = VerifyConfig(rule=rule, theta=theta, margin=margin, gap=gap, branch=branch, max_regret=max_regret)
        sampling = SamplingConfig(
            temperature=temperature,
            top_k=sample_top_k,
            top_p=top_p,
            seed=seed,
            repetition_penalty=repetition_penalty,
        )
        template = read_template(chat_template)
        pair = load(
            model, head, dtype, device, threads, cpu_pack, draft_options(total_token, depth, top_k), compile=compile
        )
        everything = Limits(rules=get_args(Rule))
        service = ChatService(
            pair, template=template, verify=verify, limits=everything, default_max_new_tokens=max_new_tokens
        )
        try:
            Terminal(service, ChatOptions(sampling=sampling), Console(), input, system).run()
        finally:
            service.close()


def _rules(names: str) -> tuple[Rule, ...]:
    given = tuple(name.strip() for name in names.split(","))
    for name in given:
        if name not in get_args(Rule):
            raise ConfigError(f"--rules names {name!r}, which is no rule; known are {', '.join(get_args(Rule))}.")
    return cast("tuple[Rule, ...]", given)
