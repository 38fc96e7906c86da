"""vLLM's OpenAI server with MARS: options per request, refusals that leave the server alive, the metric."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.engines.e2e.conftest import MAX_TOKENS, ROOT, environment, pair_engine

START_SECONDS = 400


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    engine = pair_engine(additional_config={"eagle_mars": {"theta": 0.9}})
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--no-enable-prefix-caching"]
    del engine["enable_prefix_caching"]
    command += ["--enforce-eager"] * engine.pop("enforce_eager")
    for name, value in engine.items():
        command += [f"--{name.replace('_', '-')}", json.dumps(value) if isinstance(value, dict) else str(value)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "pair"]
    # Over several processes the worker's metric is only shown through this directory.
    shared = tmp_path_factory.mktemp("metrics")
    log_file = ROOT / "runs" / "engines" / "http.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    env = environment(PROMETHEUS_MULTIPROC_DIR=str(shared), VLLM_ENABLE_V1_MULTIPROCESSING="1")
    with log_file.open("w") as log, subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
                _wait(client, process, log_file)
                yield client
        finally:
            process.terminate()


def _wait(client: httpx.Client, process: subprocess.Popen, log_file: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(2)
    raise AssertionError(log_file.read_text("utf-8")[-3000:])


@pytest.fixture(scope="module")
def ask(server: httpx.Client, prompts: list[list[int]]) -> Callable[..., httpx.Response]:
    def post(options: dict, **more: object) -> httpx.Response:
        body = {"model": "pair", "prompt": prompts[0], "temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
        return server.post("/v1/completions", json={**body, "vllm_xargs": options, **more})

    return post


def relaxed(server: httpx.Client) -> float:
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("eagle_mars_relaxed_tokens_total"))


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def test_each_request_has_its_own_theta_and_a_control_reports_nothing(
    server: httpx.Client, ask: Callable[..., httpx.Response]
) -> None:
    strict = text(ask({"mars_theta": 1.0}))
    assert relaxed(server) == 0
    by_default = text(ask({}))
    after_default = relaxed(server)
    assert after_default > 0
    assert by_default == text(ask({"mars_theta": 0.9})) != strict
    before = relaxed(server)
    assert text(ask({"mars_theta": 1.0})) == strict
    assert relaxed(server) == before


@pytest.mark.parametrize(
    ("options", "more", "words"),
    [
        ({"mars_theta": 7}, {}, "mars_theta=7"),
        ({"mars_theta": "low"}, {}, "mars_theta='low'"),
        ({"mars_tehta": 0.9}, {}, "'mars_tehta' is no MARS option"),
        ({"mars_theta": 0.9, "mars_gap": 1.0}, {}, "contradict"),
        ({"mars_theta": 0.9}, {"structured_outputs": {"choice": ["yes", "no"]}}, "structured_outputs rules out"),
    ],
)
def test_what_cant_be_done_is_a_400_and_the_server_lives(
    server: httpx.Client, ask: Callable[..., httpx.Response], options: dict, more: dict, words: str
) -> None:
    refused = ask(options, **more)
    assert refused.status_code == 400, refused.text
    assert words in refused.text
    assert server.get("/health").status_code == 200
    text(ask({"mars_theta": 1.0}, max_tokens=4))


def test_a_structured_answer_is_strict_under_a_relaxing_default(
    server: httpx.Client, ask: Callable[..., httpx.Response]
) -> None:
    before = relaxed(server)
    answer = text(ask({}, structured_outputs={"choice": ["lighthouse keeper", "bicycle repair"]}, ignore_eos=False))
    assert answer in ("lighthouse keeper", "bicycle repair")
    assert relaxed(server) == before
