"""FastChat's controller and API server, started with the few repairs that they need beside today's libraries.

Each repair first checks that what it mends is as expected: fschat 0.2.36 is the newest release, and the only one known
here. FastChat's modules replace sys.stdout when imported, so a process that launches one does nothing else.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module, metadata
from threading import Thread
from types import SimpleNamespace
from typing import Any

from eagle_mars.errors import ConfigError

FSCHAT = "0.2.36"
_INSTALL = "pip install 'eagle-mars[chat]'"


def run_controller(arguments: Sequence[str]) -> None:
    """FastChat's controller until it is stopped; arguments are its own (--host, --port, --dispatch-method, --ssl)."""
    module = _fastchat("serve.controller", arguments)
    mend_controller(module)
    args, module.controller = module.create_controller()
    _serve(module.app, args)


def run_api(arguments: Sequence[str]) -> None:
    """FastChat's API server until it is stopped; arguments are its own (--host, --port, --controller-address, ...)."""
    # Its limit on the time between two chunks: a long prompt on a CPU takes longer than the stock 100 s.
    os.environ.setdefault("FASTCHAT_WORKER_API_TIMEOUT", "3600")
    module = _fastchat("serve.openai_api_server", arguments)
    from eagle_mars.chat.fastchat_api import mend_api

    mend_api(module)
    _serve(module.app, module.create_openai_api_server())


def require_fschat() -> None:
    """Raise ConfigError unless the FastChat that is known here is installed."""
    try:
        version = metadata.version("fschat")
    except metadata.PackageNotFoundError:
        raise ConfigError(f"FastChat isn't installed; {_INSTALL}.") from None
    if version != FSCHAT:
        raise ConfigError(f"fschat {version} is installed, but the repairs are for {FSCHAT}; {_INSTALL}.")


def url_of(host: str, port: int, option: str) -> str:
    """Where others reach what binds to host and port.

    Raises ConfigError, naming the option that tells it, for an address that is no destination.
    """
    if host in ("0.0.0.0", "::", "") or port == 0:
        raise ConfigError(f"FastChat can't come to {host}:{port}; name the URL under which it reaches this: {option}.")
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def mend_controller(module: Any) -> None:
    """Let Ctrl-C end the controller: its heart-beat thread keeps the process alive because it is no daemon."""
    require("threading.Thread(" in inspect.getsource(module.Controller.__init__), "Controller.__init__")
    module.threading = SimpleNamespace(Thread=partial(Thread, daemon=True))


def require(as_expected: bool, name: str) -> None:
    """Raise ConfigError if FastChat's `name` isn't what a repair was made for."""
    if not as_expected:
        raise ConfigError(f"FastChat's {name} isn't that of {FSCHAT}, so it can't be mended; {_INSTALL}.")


def _fastchat(name: str, arguments: Sequence[str]) -> Any:
    require_fschat()
    os.environ.setdefault("LOGDIR", "")  # else it writes log files into the current directory
    module = import_module(f"fastchat.{name}")
    sys.argv = [f"eagle-mars {name}", *arguments]  # its functions parse it
    return module


def _serve(app: Any, args: Any) -> None:
    """What FastChat's modules do under `if __name__ == "__main__"`."""
    import uvicorn

    keys: dict[str, Any] = {}
    if args.ssl:
        keys = {"ssl_keyfile": os.environ["SSL_KEYFILE"], "ssl_certfile": os.environ["SSL_CERTFILE"]}
    uvicorn.run(app, host=args.host, port=args.port, log_level="info", **keys)
