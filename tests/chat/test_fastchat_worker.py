"""The FastChat worker inside the OpenAI server's process, its prompts and its registration."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

pytest.importorskip("fastchat", reason="FastChat isn't installed: pip install 'eagle-mars[chat]'")
from fastapi import FastAPI
from fastapi.testclient import TestClient
from fastchat.serve import base_model_worker
from typer.testing import CliRunner

from eagle_mars import EaModel, VerifyConfig
from eagle_mars.chat import fastchat_worker
from eagle_mars.chat.fastchat_launch import require_fschat
from eagle_mars.chat.fastchat_params import split_prompt
from eagle_mars.chat.fastchat_worker import EagleMarsWorker
from eagle_mars.chat.session import ChatOptions, ChatService
from eagle_mars.cli import app as cli
from eagle_mars.errors import ConfigError
from tests.chat.processes import free_port


@pytest.fixture(scope="module")
def service(tiny_pair) -> Iterator[ChatService]:
    model = EaModel.from_pretrained(*tiny_pair, total_token=8, depth=3, top_k=4)
    service = ChatService(model, verify=VerifyConfig(rule="exact"), max_active=1, max_waiting=1)
    yield service
    service.close()


@pytest.fixture
def worker(service, monkeypatch) -> EagleMarsWorker:
    monkeypatch.setattr(base_model_worker, "worker", None)
    return EagleMarsWorker(service, f"http://127.0.0.1:{free_port()}", "http://127.0.0.1:1/fc", "tiny")


@pytest.fixture
def client(worker) -> TestClient:
    app = FastAPI()
    app.mount("/fc", worker.app)
    return TestClient(app)


def test_making_a_worker_leaves_the_streams_alone(service: ChatService, monkeypatch) -> None:
    for name in ("worker", "logger"):
        monkeypatch.setattr(base_model_worker, name, None)
    for name in ("stdout", "stderr"):  # put back, should FastChat take them after all
        monkeypatch.setattr(sys, name, getattr(sys, name))
    before = sys.stdout, sys.stderr
    EagleMarsWorker(service, "http://127.0.0.1:1", "http://127.0.0.1:1/fc", "tiny")
    assert (sys.stdout, sys.stderr) == before


def test_the_template_carries_messages(worker: EagleMarsWorker) -> None:
    conversation = worker.conv.copy()
    conversation.set_system_message("Be brief.")
    for role, text in ((0, "Hi\n"), (1, "Hello."), (0, ""), (1, None)):
        conversation.append_message(conversation.roles[role], text)
    assert split_prompt(conversation.get_prompt()) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi\n"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": ""},
    ]
    bare = worker.conv.copy()
    bare.append_message(bare.roles[0], "Hi")
    assert split_prompt(bare.get_prompt()) == [{"role": "user", "content": "Hi"}]
    assert split_prompt("USER: Hi ASSISTANT:") is None
    assert split_prompt("") is None


def test_mounted_under_a_prefix(client: TestClient, service: ChatService) -> None:
    assert client.post("/fc/worker_get_status").json() == {"model_names": ["tiny"], "speed": 1, "queue_length": 0}
    assert client.post("/fc/model_details").json() == {"context_length": 1024}
    assert client.post("/fc/count_token", json={"prompt": "hello"}).json() == {"count": 5, "error_code": 0}
    assert client.post("/fc/count_token", json={}).json()["error_code"] == 40302
    answer = client.post("/fc/worker_generate", json={"prompt": "hello", "max_new_tokens": 9, "top_p": 0}).json()
    assert answer["text"] == service.model.generate("hello", max_new_tokens=9, verify=service.verify).text
    assert answer["speculation"]["guarantee"].startswith("Lossless")


def test_a_full_queue_and_a_fault_are_answers(client: TestClient, service: ChatService, monkeypatch) -> None:
    running = [service.submit(service.text_ids("hello"), ChatOptions(max_new_tokens=900)) for _ in range(2)]
    refused = client.post("/fc/worker_generate", json={"prompt": "hello"}).json()
    assert (refused["error_code"], "try again" in refused["text"]) == (42903, True)
    for response in running:
        response.cancel()
        list(response)
    with monkeypatch.context() as patched:
        patched.setattr(service, "submit", lambda *a: 1 / 0)
        for _ in range(7):  # more than the five slots that FastChat's worker has
            assert client.post("/fc/worker_generate", json={"prompt": "hello"}).json()["error_code"] == 50001
            raw = client.post("/fc/worker_generate_stream", json={"prompt": "hello"}).content
            assert json.loads(raw.removesuffix(b"\0"))["error_code"] == 50001
    assert client.post("/fc/worker_get_status").json()["queue_length"] == 0


def test_registration_outlives_an_absent_and_a_forgetful_controller(worker: EagleMarsWorker, monkeypatch) -> None:
    """First nobody answers, then the controller refuses, then it takes the worker and forgets it again."""
    monkeypatch.setattr(fastchat_worker, "_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(fastchat_worker, "WORKER_HEART_BEAT_INTERVAL", 0.05)
    calls: list[str] = []

    class Controller(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            calls.append(self.path)
            self.send_response(500 if len(calls) == 1 else 200)
            self.end_headers()
            self.wfile.write(json.dumps({"exist": len(calls) > 4}).encode())

        def log_message(self, *args: object) -> None:
            pass

    worker.init_heart_beat()
    controller = HTTPServer(("127.0.0.1", int(worker.controller_addr.rpartition(":")[2])), Controller)
    Thread(target=controller.serve_forever, daemon=True).start()
    try:
        while len(calls) < 7:
            assert worker.heart_beat_thread.is_alive()
            time.sleep(0.01)
    finally:
        worker.stop_heart_beat()
        controller.shutdown()
        controller.server_close()
    register, beat = "/register_worker", "/receive_heart_beat"
    assert calls[:6] == [register, register, beat, register, beat, beat]


def test_another_fastchat_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.2.37")
    with pytest.raises(ConfigError, match=r"fschat 0\.2\.37 is installed"):
        require_fschat()


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--host", "0.0.0.0", "--fastchat-controller", "http://127.0.0.1:1"],
        ["serve", "--port", "0", "--fastchat-controller", "http://127.0.0.1:1"],
        ["fastchat", "worker", "--host", "::"],
    ],
)
def test_an_address_that_nobody_can_come_to_is_not_registered(arguments: list[str]) -> None:
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 1
    assert "name the URL under which it reaches this: --" in " ".join(done.stderr.split())
