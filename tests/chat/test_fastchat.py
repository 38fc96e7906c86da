"""The FastChat worker behind a stock controller and API server: real processes, driven by the openai client."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from tests.chat.processes import Server, free_port

pytest.importorskip("fastchat", reason="FastChat isn't installed: pip install 'eagle-mars[chat]'")
openai = pytest.importorskip("openai")

HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]


class Cluster:
    """Controller, worker and API server, each on its port."""

    def __init__(self, directory: Path, pair: tuple[str, str]) -> None:
        self.directory, self.pair = directory, pair
        ports = [free_port() for _ in range(3)]
        self.controller_url, self.worker_url, self.api_url = (f"http://127.0.0.1:{port}" for port in ports)
        self.ports = dict(zip(("controller", "worker", "api"), map(str, ports), strict=True))
        self.controller, self.worker, self.api = self.start_controller(), self.start_worker(), self.start_api()
        self.client = openai.OpenAI(base_url=f"{self.api_url}/v1", api_key="none", timeout=120, max_retries=0)
        self.worker.wait_until(lambda: self.post("worker", "worker_get_status"))
        self.api.wait_until(self.models)

    def start_controller(self) -> Server:
        log, port = self.directory / "controller.log", self.ports["controller"]
        return Server(log, "fastchat", "controller", "--host", "127.0.0.1", "--port", port)

    def start_worker(self) -> Server:
        options = {
            "--port": self.ports["worker"],
            "--controller-address": self.controller_url,
            "--name": "tiny",
            "--model": self.pair[0],
            "--head": self.pair[1],
            "--total-token": "8",
            "--depth": "3",
            "--top-k": "4",
            "--rule": "exact",
        }
        arguments = [part for option in options.items() for part in option]
        beat = {"FASTCHAT_WORKER_HEART_BEAT_INTERVAL": "1"}
        return Server(self.directory / "worker.log", "fastchat", "worker", *arguments, **beat)

    def start_api(self) -> Server:
        where = ("--host", "127.0.0.1", "--port", self.ports["api"], "--controller-address", self.controller_url)
        return Server(self.directory / "api.log", "fastchat", "api", *where)

    def models(self) -> list[str]:
        try:
            return [model.id for model in self.client.models.list()]
        except openai.OpenAIError:
            return []

    def post(self, which: str, path: str, body: object = None) -> dict:
        with suppress(httpx.TransportError):
            return httpx.post(f"http://127.0.0.1:{self.ports[which]}/{path}", json=body, timeout=120).json()
        return {}

    def chat(self, **options) -> str:
        return self.client.chat.completions.create(
            **{"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 12, **options}
        )

    def queue_length(self) -> int:
        return self.post("worker", "worker_get_status")["queue_length"]


@pytest.fixture(scope="module")
def cluster(tiny_pair, tmp_path_factory) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("cluster"), tiny_pair)
    yield running
    for server in (running.api, running.worker, running.controller):
        assert server.stop() in (0, -signal.SIGTERM)


@pytest.fixture(scope="module")
def greedy(tiny_pair) -> str:
    """The target's own answer to HELLO."""
    from eagle_mars import EaModel

    model = EaModel.from_pretrained(*tiny_pair, total_token=8, depth=3, top_k=4)
    return model.generate(model.chat_ids(HELLO), max_new_tokens=12, method="autoregressive").text


def test_whole_answers(cluster: Cluster, greedy: str) -> None:
    answer = cluster.chat()
    assert answer.choices[0].message.content == greedy
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens == answer.usage.total_tokens - 12


def test_streamed_answers(cluster: Cluster, greedy: str) -> None:
    chunks = list(cluster.chat(stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == greedy
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk.created for chunk in chunks)


def test_fields_that_stock_drops_or_fails_on(cluster: Cluster, greedy: str) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert cluster.chat(messages=messages).choices[0].message.content == greedy
    assert cluster.chat(max_completion_tokens=3, max_tokens=None).usage.completion_tokens == 3
    continued = [*HELLO, {"role": "assistant", "content": greedy[:4]}]
    assert cluster.chat(messages=continued, max_tokens=8).choices[0].message.content == greedy[4:]
    one, two = cluster.chat(temperature=2, seed=5, n=2).choices
    assert one.message.content == cluster.chat(temperature=2, seed=5).choices[0].message.content
    assert one.message.content != two.message.content


def test_ends_of_answers(cluster: Cluster) -> None:
    direct = {"model": "tiny", "prompt": "hello", "temperature": 0, "max_new_tokens": 16}
    free = cluster.post("worker", "worker_generate", {**direct, "stop": [""]})
    assert (len(free["text"]), free["finish_reason"]) == (16, "length")
    letter = free["text"][5]
    token = ord(letter)  # the vocabulary of the tiny pair begins with the printable bytes
    for end in ({"stop": letter}, {"stop": [letter]}, {"stop_token_ids": [token - 33]}):
        cut = cluster.post("worker", "worker_generate", {**direct, **end})
        assert cut["finish_reason"] == "stop"
        assert cut["text"].rstrip(letter) == free["text"][: free["text"].index(letter)]


def test_relaxation_is_per_request(cluster: Cluster) -> None:
    direct = {"model": "tiny", "prompt": "hello", "temperature": 0, "max_new_tokens": 24}
    exact = cluster.post("worker", "worker_generate", direct)
    relaxed = cluster.post("worker", "worker_generate", {**direct, "gap": 9.0})
    assert exact["speculation"]["relaxed"] == 0
    assert relaxed["speculation"]["relaxed"] > 0
    through_api = [
        cluster.client.completions.create(
            model="tiny", prompt="hello", temperature=0, max_tokens=24, extra_body=extra, logprobs=1
        ).choices[0]
        for extra in ({}, {"gap": 9.0})
    ]
    assert [choice.text for choice in through_api] == [exact["text"], relaxed["text"]]
    assert through_api[0].logprobs.text_offset[:3] == [0, 1, 2]


def test_raw_stream_of_the_worker(cluster: Cluster) -> None:
    body = {"model": "tiny", "prompt": "hello", "temperature": 0, "max_new_tokens": 20, "echo": True}
    raw = httpx.post(f"{cluster.worker_url}/worker_generate_stream", json=body, timeout=120).content
    *parts, rest = raw.split(b"\0")
    assert rest == b""
    states = [json.loads(part) for part in parts]
    texts = [state["text"] for state in states]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert texts[0].startswith("hello")
    assert [state["finish_reason"] for state in states] == [None] * (len(states) - 1) + ["length"]
    assert states[-1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 20, "total_tokens": 25}


def test_bad_requests_cost_nothing(cluster: Cluster) -> None:
    """Six failures: stock FastChat's worker would have lost all of its five slots."""
    bad = [
        {"prompt": "hello", "temperature": "hot"},
        {"prompt": 7},
        ["not", "an", "object"],
        {"prompt": "x" * 5000, "max_new_tokens": 5},
        {"prompt": "hello", "theta": 7},
        {"prompt": "hello", "use_beam_search": True},
    ]
    for body in bad:
        assert cluster.post("worker", "worker_generate", body)["error_code"] >= 40000, body
        raw = httpx.post(f"{cluster.worker_url}/worker_generate_stream", json=body, timeout=120).content
        assert json.loads(raw.removesuffix(b"\0"))["error_code"] >= 40000, body
    assert httpx.post(f"{cluster.worker_url}/worker_generate", content=b"{").status_code == 500
    assert cluster.post("worker", "worker_get_embeddings", {"input": ["x"]})["error_code"] >= 40000
    for refused in (
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"extra_body": {"theta": 7}},
        {"top_p": 9},
    ):
        with pytest.raises(openai.BadRequestError):
            cluster.chat(**refused)
    assert cluster.chat(temperature=None).choices[0].message.content
    assert cluster.queue_length() == 0


def test_over_long_prompts_are_refused(cluster: Cluster) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024"):
        cluster.chat(messages=[{"role": "user", "content": "x" * 2000}])


def test_a_client_that_leaves_frees_its_place(cluster: Cluster) -> None:
    stream = cluster.chat(stream=True, max_tokens=900)
    next(iter(stream))
    cluster.worker.wait_until(lambda: cluster.queue_length() == 1)
    stream.close()
    cluster.worker.wait_until(lambda: cluster.queue_length() == 0)
    direct = {"prompt": "hello", "temperature": 0, "max_new_tokens": 900}
    with httpx.stream("POST", f"{cluster.worker_url}/worker_generate_stream", json=direct, timeout=120) as response:
        next(response.iter_raw())
    cluster.worker.wait_until(lambda: cluster.queue_length() == 0)


def test_concurrent_streams(cluster: Cluster, greedy: str) -> None:
    texts: list[str] = []

    def ask() -> None:
        texts.append("".join(chunk.choices[0].delta.content or "" for chunk in cluster.chat(stream=True)))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [greedy] * 4


def test_controller_and_worker_restart(cluster: Cluster, greedy: str) -> None:
    """The API server keeps the first worker's template for ever, so the second must understand its markers."""
    assert cluster.controller.stop(signal.SIGINT) in (0, -signal.SIGINT)
    cluster.controller = cluster.start_controller()
    cluster.controller.wait_until(lambda: cluster.models() == ["tiny"])
    cluster.worker.stop(signal.SIGKILL)
    cluster.worker = cluster.start_worker()
    cluster.worker.wait_until(lambda: cluster.post("worker", "worker_get_status"))
    cluster.worker.wait_until(lambda: cluster.models() == ["tiny"])
    assert cluster.chat().choices[0].message.content == greedy
