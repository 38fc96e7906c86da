"""Many clients on real sockets: streams side by side, clients that leave, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

pytest.importorskip("fastapi", reason="serving needs: pip install 'eagle-mars[chat]'")
import uvicorn

from eagle_mars import VerifyConfig
from eagle_mars.chat.metrics import Metrics
from eagle_mars.chat.openai_server import ServerOptions, create_app
from eagle_mars.chat.session import ChatService
from tests.chat.processes import free_port

LONG = 900  # tokens of an answer that nobody could wait for here
HELLO = [{"role": "user", "content": "hello"}]


@dataclass
class Running:
    url: str
    service: ChatService

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=120, limits=httpx.Limits(max_connections=40))

    def metric(self, name: str) -> float:
        rows = httpx.get(f"{self.url}/metrics").text.splitlines()
        return next((float(row.rsplit(" ", 1)[1]) for row in rows if row.startswith(name + " ")), 0.0)

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + 60
        while self.service.scheduler.active or self.service.scheduler.waiting:
            assert time.monotonic() < deadline, "a generation that nobody reads goes on"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def server(tiny) -> Iterator[Running]:
    """The real server in a thread, on a free port."""
    metrics = Metrics()
    service = ChatService(tiny, verify=VerifyConfig(rule="exact"), max_active=4, max_waiting=16, on_end=metrics.observe)
    app = create_app(service, metrics, ServerOptions("tiny", temperature=0.0))
    uvicorn_server = uvicorn.Server(uvicorn.Config(app, port=free_port(), log_level="warning"))
    thread = threading.Thread(target=uvicorn_server.run, daemon=True)
    thread.start()
    while not uvicorn_server.started:
        time.sleep(0.01)
    yield Running(f"http://127.0.0.1:{uvicorn_server.config.port}", service)
    uvicorn_server.should_exit = True
    thread.join(60)
    assert not thread.is_alive(), "an open connection keeps the server from ending"


async def stream(client: httpx.AsyncClient, tokens: int, leave_after: int | None = None) -> str:
    """The text of a streamed answer; a client that leaves closes its connection after some chunks."""
    text, chunks = "", 0
    body = {"messages": HELLO, "stream": True, "max_tokens": tokens}
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if chunks == leave_after:
                return text
            if line == "data: [DONE]":
                return text
            if line:
                chunks += 1
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                text += choice["delta"].get("content", "")
    raise AssertionError("the stream ended without [DONE]")


@pytest.mark.parametrize("clients", [1, 4, 16])
def test_concurrent_streams_all_get_the_same_whole_answer(server, tiny, clients: int) -> None:
    expected = tiny.generate(tiny.chat_ids(HELLO), max_new_tokens=6, verify=VerifyConfig(rule="exact")).text

    async def run() -> list[str]:
        async with server.client() as client:
            return await asyncio.gather(*(stream(client, 6) for _ in range(clients)))

    assert asyncio.run(run()) == [expected] * clients
    server.wait_until_idle()


def test_clients_that_leave_midway_and_in_the_queue_leave_nothing_behind(server) -> None:
    luck = random.Random(0)
    before = server.metric('eagle_mars_requests_total{outcome="cancelled"}')

    async def leave(client: httpx.AsyncClient) -> None:
        if luck.random() < 0.5:
            await stream(client, LONG, leave_after=luck.randrange(1, 6))
            return
        body = {"messages": HELLO, "max_tokens": LONG, "stream": luck.random() < 0.5}
        with pytest.raises(TimeoutError):  # four answer at a time, so most of these wait in the queue
            await asyncio.wait_for(client.post("/v1/chat/completions", json=body), luck.uniform(0.1, 0.5))

    async def run() -> str:
        async with server.client() as client:
            await asyncio.gather(*(leave(client) for _ in range(14)))
            return await stream(client, 5)

    assert len(asyncio.run(run())) == 5
    server.wait_until_idle()
    assert server.metric('eagle_mars_requests_total{outcome="cancelled"}') - before == 14


def test_more_clients_than_places_get_429_and_their_turn_when_others_leave(server) -> None:
    body = {"messages": HELLO, "max_tokens": LONG}
    queue = server.service.scheduler
    places = queue.max_active + queue.max_waiting

    async def run() -> list[int]:
        async with server.client() as client:
            crowd = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for _ in range(places)]
            while queue.active + queue.waiting < places:
                await asyncio.sleep(0.01)
            refused = await client.post("/v1/chat/completions", json=body)
            for task in crowd:
                task.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)
            while queue.active + queue.waiting == places:
                await asyncio.sleep(0.01)
            answered = await client.post("/v1/chat/completions", json={**body, "max_tokens": 2})
            return [refused.status_code, answered.status_code]

    assert asyncio.run(asyncio.wait_for(run(), 120)) == [429, 200]
    server.wait_until_idle()
