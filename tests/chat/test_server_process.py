"""`eagle-mars serve` as users run it: a process, driven by the openai client and curl, ended by SIGTERM."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

pytest.importorskip("fastapi", reason="serving needs: pip install 'eagle-mars[chat]'")
pytest.importorskip("openai")
import openai

from tests.chat.processes import Server, free_port

HELLO = [{"role": "user", "content": "hello"}]
BAD = [
    {"extra_body": {"theta": 0.1}},
    {"extra_body": {"theta": "much"}},
    {"messages": []},
    {"messages": [{"role": "user", "content": 5}]},
    {"max_tokens": 10**9},
    {"temperature": -1},
]


def test_a_servers_life(tiny_pair, tmp_path: Path) -> None:
    target, head = tiny_pair
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    tree = ("--total-token", "8", "--depth", "3", "--top-k", "4")
    pair = ("--model", target, "--head", head, "--name", "tiny", *tree)
    ceiling = ("--max-theta-relaxation", "0.4")
    server = Server(tmp_path / "log", "serve", "--port", str(port), *pair, *ceiling, EAGLE_MARS_API_KEY="secret")

    def ready() -> bool:
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            return False

    server.wait_until(ready)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", timeout=120, max_retries=0)
    _drive_with_the_openai_client(client, url)
    _drive_with_curl(url)
    for options in BAD:
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**{"model": "tiny", "messages": HELLO, **options})
    good = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=3)
    assert good.usage.completion_tokens == 3  # more bad requests than places: none of them has kept its place
    _stop_while_it_answers(server, client, url)


def _drive_with_the_openai_client(client: openai.OpenAI, url: str) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    asked = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_completion_tokens": 10}
    whole = client.chat.completions.create(**asked, extra_body={"rule": "exact"})
    text = whole.choices[0].message.content
    assert whole.usage.completion_tokens == 10
    assert whole.speculation["relaxed"] == 0
    stream = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}, extra_body={"rule": "exact"}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage == whole.usage
    relaxed = client.chat.completions.create(**asked, extra_body={"theta": 0.6})
    assert relaxed.speculation["guarantee"].startswith("Lossy")
    completion = client.completions.create(model="tiny", prompt="abc", max_tokens=4, logprobs=1)
    assert len(completion.choices[0].logprobs.tokens) == 4
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.BadRequestError, match=r"use 0\.6 or more"):
        client.chat.completions.create(**asked, extra_body={"theta": 0.5})


def _drive_with_curl(url: str) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl isn't installed")
    body = json.dumps({"messages": HELLO, "max_tokens": 5, "stream": True})
    headers = ("-H", "Content-Type: application/json", "-H", "Authorization: Bearer secret")
    command = [curl, "-sSN", "--fail-with-body", *headers, "-d", body, f"{url}/v1/chat/completions"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("data: [DONE]\n\n")


def _stop_while_it_answers(server: Server, client: openai.OpenAI, url: str) -> None:
    """SIGTERM: the running answer is finished, new clients are turned away, the process ends."""
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=60, stream=True, temperature=0, extra_body={"rule": "exact"}
    )
    first = next(stream)
    server.process.send_signal(signal.SIGTERM)
    rest = list(stream)
    assert first.choices[0].delta.role == "assistant"
    assert rest[-1].choices[0].finish_reason == "length"
    assert server.process.wait(timeout=60) in (0, -signal.SIGTERM)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
