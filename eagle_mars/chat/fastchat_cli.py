"""`eagle-mars fastchat controller | api | worker`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eagle_mars.cli_options import (
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
    Model,
    Theta,
    Threads,
    TotalToken,
    draft_options,
    load,
    one_sentence_errors,
)
from eagle_mars.config import Rule, VerifyConfig

app = typer.Typer(no_args_is_help=True, help="FastChat's controller and API server, mended, and our worker for them.")

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=_PASS_ON)
def controller(context: typer.Context) -> None:
    """FastChat's controller, such that Ctrl-C ends it. The options are its own: see `controller --help`."""
    with one_sentence_errors():
        from eagle_mars.chat.fastchat_launch import run_controller

        run_controller(context.args)


@app.command(context_settings=_PASS_ON)
def api(context: typer.Context) -> None:
    """FastChat's API server with streaming mended. The options are its own: see `api --help`."""
    with one_sentence_errors():
        from eagle_mars.chat.fastchat_launch import run_api

        run_api(context.args)


@app.command()
def worker(
    controller_address: Annotated[str, typer.Option(help="URL of the controller.")] = "http://localhost:21001",
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to bind.", min=1, max=65535)] = 21002,
    worker_address: Annotated[
        str | None, typer.Option(help="URL under which others reach this worker. Default: http://HOST:PORT.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Model name for clients. Default: the target's last path part.")] = (
        None
    ),
    rule: Annotated[Rule, typer.Option(help="Acceptance rule of requests that name none.")] = "mars",
    theta: Theta = 0.9,
    margin: MarginOption = "logit-ratio",
    gap: Gap = None,
    max_active: Annotated[int, typer.Option(help="Requests that share the engine, cycle by cycle.", min=1)] = 4,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; more are refused.", min=0)] = 32,
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
    """A worker for FastChat. `eagle-mars serve --fastchat-controller` is the same beside the OpenAI server."""
    with one_sentence_errors():
        from eagle_mars.chat.fastchat_launch import require_fschat, url_of

        require_fschat()
        address = worker_address or url_of(host, port, "--worker-address")
        from eagle_mars.chat.fastchat_worker import EagleMarsWorker, serve_worker
        from eagle_mars.chat.session import ChatService
        from eagle_mars.chat.templates import chat_template as read_template
        from eagle_mars.embedded import TARGET_NAME

        verify = VerifyConfig(rule=rule, theta=theta, margin=margin, gap=gap)
        template = read_template(chat_template)
        service = ChatService(
            load(
                model, head, dtype, device, threads, cpu_pack, draft_options(total_token, depth, top_k), compile=compile
            ),
            template=template,
            verify=verify,
            max_active=max_active,
            max_waiting=max_waiting,
        )
        model_name = name or (Path(model).name if model else TARGET_NAME)
        serve_worker(EagleMarsWorker(service, controller_address, address, model_name), host, port)
