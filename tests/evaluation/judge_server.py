"""A judge on this machine: an OpenAI-compatible endpoint whose judgments a function makes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[dict[str, Any]], "str | tuple[int, dict[str, Any]]"]


@dataclass
class JudgeServer:
    """url: for `--base-url`. reply: request body → judgment, or (status, error body). requests: bodies so far."""

    url: str
    reply: Reply
    requests: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def judge_server(reply: Reply) -> Iterator[JudgeServer]:
    """Serve on a free loopback port for as long as the context is open."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # http.server's name
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            state.requests.append(body)
            told = state.reply(body)
            if isinstance(told, str):
                message = {"role": "assistant", "content": told}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                fields = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"]}
                told = 200, {**fields, "choices": [choice]}
            status, content = told
            raw = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            """No log on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state = JudgeServer(f"http://127.0.0.1:{server.server_port}/v1", reply)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
