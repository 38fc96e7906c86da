"""`eagle-mars web`: the page over a running server, or over one of its own."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated

import typer

from eagle_mars.cli_options import (
    ChatTemplate,
    Compile,
    CpuPack,
    Depth,
    Device,
    DraftTopK,
    Dtype,
    Head,
    Model,
    Threads,
    TotalToken,
    draft_options,
    err,
    load,
    one_sentence_errors,
)
from eagle_mars.errors import ConfigError

if TYPE_CHECKING:
    from eagle_mars.chat.session import ChatService


def web(
    url: Annotated[
        str | None, typer.Option(help="URL of a running `eagle-mars serve`. Default: a server of its own.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="EAGLE_MARS_API_KEY", help="Key of that server.")] = None,
    host: Annotated[str, typer.Option(help="Address to bind; whoever reaches it can chat.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to bind.", min=1, max=65535)] = 7860,
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
    """Chat in a browser: theta and temperature as sliders, exact and relaxed answers side by side."""
    with one_sentence_errors():
        try:
            from eagle_mars.chat import web as page
            from eagle_mars.chat.client import ServerClient
        except ImportError as error:
            raise ConfigError(f"the web page needs more packages: pip install 'eagle-mars[web]' ({error}).") from error
        if url is None:
            from eagle_mars.chat.session import ChatService
            from eagle_mars.chat.templates import chat_template as read_template
            from eagle_mars.embedded import TARGET_NAME

            template = read_template(chat_template)
            pair = load(
                model, head, dtype, device, threads, cpu_pack, draft_options(total_token, depth, top_k), compile=compile
            )
            url = _serve_beside(ChatService(pair, template=template), Path(model).name if model else TARGET_NAME)
        elif model is not None:
            raise ConfigError("--url names a server that has its model already; leave --model and --head out.")
        built = page.build(ServerClient(url, api_key))
        err.print(f"chat at http://{host}:{port} (Ctrl-C ends it)", highlight=False)
        try:
            page.launch(built, host, port)
        except OSError as error:
            raise ConfigError(f"port {port} can't be bound; choose another with --port.") from error


def _serve_beside(service: ChatService, name: str) -> str:
    """Run the OpenAI server in a thread, on a free loopback port; returns its URL."""
    import uvicorn

    from eagle_mars.chat.metrics import Metrics
    from eagle_mars.chat.openai_server import ServerOptions, create_app

    app = create_app(service, Metrics(), ServerOptions(name))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = Thread(target=server.run, name="eagle-mars-server", daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise ConfigError("the page's own server could not start; its message is above.")
        time.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    return f"http://127.0.0.1:{port}"
