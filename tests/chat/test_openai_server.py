"""The app in this process: shapes of the answers, and every mistake as one sentence with OpenAI's status."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="serving needs: pip install 'eagle-mars[chat]'")
from fastapi.testclient import TestClient

from eagle_mars import SamplingConfig, VerifyConfig
from eagle_mars.chat.metrics import Metrics
from eagle_mars.chat.openai_server import ServerOptions, create_app
from eagle_mars.chat.session import ChatService

HELLO = [{"role": "user", "content": "hello"}]
RELAXED = VerifyConfig(theta=0.6)


@pytest.fixture(scope="module")
def client(tiny) -> Iterator[TestClient]:
    metrics = Metrics()
    service = ChatService(tiny, verify=RELAXED, on_end=metrics.observe)
    app = create_app(service, metrics, ServerOptions("tiny", temperature=0.0, max_body=20_000))
    with TestClient(app, raise_server_exceptions=False) as running:
        yield running


def chat(client: TestClient, **fields) -> dict[str, Any]:
    answer = client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 12, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client: TestClient, path: str = "/v1/chat/completions", **fields) -> list[dict[str, Any]]:
    """Chunks of a streamed answer, which must end with [DONE]."""
    body = {"max_tokens": 12, "stream": True, **fields}
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_a_chat_answers_with_the_models_own_text(client, tiny) -> None:
    expected = tiny.generate(tiny.chat_ids(HELLO), max_new_tokens=12, verify=RELAXED)
    body = chat(client, model="tiny")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text}
    assert choice["finish_reason"] == "length"
    assert body["object"] == "chat.completion"
    prompt = expected.prompt_tokens
    assert body["usage"] == {"prompt_tokens": prompt, "completion_tokens": 12, "total_tokens": prompt + 12}
    told = body["speculation"]
    assert (told["rule"], told["guarantee"]) == ("mars", expected.guarantee)
    assert told["cycles"] == expected.cycles
    assert told["tau"] == pytest.approx(expected.tau)  # a quotient and its product
    assert (told["relaxed"], told["exact_prefix_tokens"]) == (expected.relaxed, expected.exact_prefix_tokens)
    assert told["regret"] == expected.regret
    assert choice["speculation"] == told


def test_exact_is_byte_identical_to_a_server_without_relaxation(client, tiny) -> None:
    strict = ChatService(tiny, verify=VerifyConfig(rule="exact"), max_active=1)
    app = create_app(strict, Metrics(), ServerOptions("tiny", temperature=0.0))
    with TestClient(app) as other:
        for sampling in ({"temperature": 0}, {"temperature": 1, "seed": 5}):
            relaxed = chat(client, max_tokens=20, **sampling)
            asked = [chat(client, max_tokens=20, **off, **sampling) for off in ({"rule": "exact"}, {"theta": None})]
            plain = chat(other, max_tokens=20, **sampling)
            texts = [body["choices"][0]["message"]["content"] for body in [*asked, plain]]
            assert texts[0] == texts[1] == texts[2]
            assert [body["speculation"]["relaxed"] for body in asked] == [0, 0]
            assert relaxed["speculation"]["relaxed"] > 0


def test_a_stream_is_role_text_end_and_usage(client) -> None:
    whole = chat(client)
    chunks = events(client, messages=HELLO, stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
    assert text == whole["choices"][0]["message"]["content"]
    *_, last, usage = chunks
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["speculation"]["relaxed"] == whole["speculation"]["relaxed"]
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["created"] > 0
        assert chunk["id"] == chunks[0]["id"]
    plain = events(client, messages=HELLO)
    assert all("usage" not in chunk for chunk in plain)


def test_choices_run_with_seed_plus_i(client, tiny) -> None:
    options = {"temperature": 1.0, "seed": 11}
    body = chat(client, n=3, **options)
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    expected = [
        tiny.generate(
            tiny.chat_ids(HELLO),
            max_new_tokens=12,
            verify=RELAXED,
            sampling=SamplingConfig(temperature=1.0, seed=11 + i),
        ).text
        for i in range(3)
    ]
    assert texts == expected
    assert body["usage"]["prompt_tokens"] == len(tiny.chat_ids(HELLO))
    assert body["usage"]["completion_tokens"] == 36
    streamed = {0: "", 1: "", 2: ""}
    for chunk in events(client, messages=HELLO, n=3, **options):
        choice = chunk["choices"][0]
        streamed[choice["index"]] += choice["delta"].get("content", "")
    assert list(streamed.values()) == texts


def test_stop_strings_end_the_answer(client) -> None:
    text = chat(client, rule="exact", max_tokens=30)["choices"][0]["message"]["content"]
    stop = text[7:9]
    (choice,) = chat(client, rule="exact", max_tokens=30, stop=[stop, "zz"])["choices"]
    assert choice["message"]["content"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"


def test_chat_logprobs(client, tiny) -> None:
    (choice,) = chat(client, rule="exact", logprobs=True, top_logprobs=2)["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in content) == choice["message"]["content"]
    for token in content:
        best = token["top_logprobs"]
        assert len(best) == 2
        assert best[0]["token"] == token["token"]  # greedy
        assert best[0]["logprob"] == token["logprob"] >= best[1]["logprob"]
        assert bytes(token["bytes"]).decode() == token["token"]
    streamed = [
        token
        for chunk in events(client, messages=HELLO, rule="exact", logprobs=True, top_logprobs=2)
        for token in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content
    assert chat(client)["choices"][0]["logprobs"] is None


def test_details_of_text_that_a_stop_string_held_back_to_the_end(client, tiny) -> None:
    text = tiny.generate(tiny.chat_ids(HELLO), max_new_tokens=12, verify=VerifyConfig(rule="exact")).text
    beginnings = [text[-2] + "!", text[-1] + "!"]  # the last token gives text free and is held back itself
    (choice,) = chat(client, rule="exact", stop=beginnings, details=True)["choices"]
    assert choice["message"]["content"] == text
    assert "".join(piece["text"] for piece in choice["details"]) == text
    assert choice["details"][-1]["best"] == []


def test_details_show_both_candidates_of_relaxed_tokens(client) -> None:
    (choice,) = chat(client, max_tokens=40, details=True)["choices"]
    assert "".join(piece["text"] for piece in choice["details"]) == choice["message"]["content"]
    relaxed = [piece for piece in choice["details"] if piece["provenance"] == "relaxed"]
    assert len(relaxed) == choice["speculation"]["relaxed"] > 0
    runners_up = 0
    for piece in relaxed:
        first, second = piece["best"]
        assert piece["text"] in (first["token"], second["token"])
        assert second["logit"] > 0.6 * first["logit"] > 0
        runners_up += piece["text"] == second["token"]
    assert runners_up  # at T = 0 the best token is accepted exactly


def test_completions_take_text_ids_and_lists(client, tiny) -> None:
    def ask(prompt, **fields) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 6, "rule": "exact", **fields}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    one = ask("abc")
    assert one["object"] == "text_completion"
    text = one["choices"][0]["text"]
    ids = tiny.tokenizer("abc").input_ids
    assert ask(ids)["choices"][0]["text"] == text
    both = ask(["abc", "xy"], n=2)
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in both["choices"]][:2] == [text, text]
    assert both["usage"]["prompt_tokens"] == 5
    assert [choice["text"] for choice in ask([ids, ids])["choices"]] == [text, text]
    scored = ask("abc", logprobs=1)["choices"][0]["logprobs"]
    assert "".join(scored["tokens"]) == text
    assert scored["text_offset"] == list(range(6))
    assert [next(iter(best.values())) for best in scored["top_logprobs"]] == scored["token_logprobs"]
    chunks = events(client, "/v1/completions", prompt="abc", max_tokens=6, rule="exact", logprobs=1)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    offsets = [o for chunk in chunks for o in (chunk["choices"][0]["logprobs"] or {"text_offset": []})["text_offset"]]
    assert offsets == list(range(6))


def test_models_health_and_metrics(client) -> None:
    (card,) = client.get("/v1/models").json()["data"]
    assert card["id"] == "tiny"
    assert client.get("/v1/models/tiny").json() == card
    assert client.get("/health").json()["status"] == "ok"

    def counters() -> dict[str, float]:
        rows = [line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line[0] != "#"]
        return {name: float(value) for name, value in rows}

    before = counters()
    body = chat(client)
    after = counters()
    assert (
        after['eagle_mars_requests_total{outcome="finished"}']
        == 1 + before['eagle_mars_requests_total{outcome="finished"}']
    )
    tokens = sum(value - before[name] for name, value in after.items() if "completion_tokens_total" in name)
    assert tokens == 12
    relaxed = 'eagle_mars_completion_tokens_total{provenance="relaxed"}'
    assert after[relaxed] - before[relaxed] == body["speculation"]["relaxed"]
    assert after["eagle_mars_cycles_total"] - before["eagle_mars_cycles_total"] == body["speculation"]["cycles"]
    assert (
        after["eagle_mars_time_to_first_token_seconds_count"]
        == 1 + before["eagle_mars_time_to_first_token_seconds_count"]
    )
    assert after["eagle_mars_queue_length"] == 0


@pytest.mark.parametrize(
    ("fields", "status", "sentence"),
    [
        ({"messages": []}, 400, "messages=[] is not usable"),
        ({"messages": None}, 400, "messages=None"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content=5"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "surrogate"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "'image_url' aren't supported"),
        ({"messages": [{"role": "cat", "content": ""}]}, 400, "messages.0.role='cat'"),
        ({"messages": [{"role": "user", "content": "a" * 2000}]}, 400, "the target's context is 1024"),
        ({"max_tokens": 5000}, 400, "lower max_new_tokens"),
        ({"max_tokens": "5"}, 400, "max_tokens='5'"),
        ({"max_tokens": 0}, 400, "max_tokens=0"),
        ({"max_tokens": 10**400}, 400, "max_tokens="),
        ({"theta": 1.5}, 400, "theta=1.5"),
        ({"rule": "typical"}, 400, "use one of: exact, mars"),
        ({"gap": 1.0, "theta": 0.9}, 400, "give one of them"),
        ({"draft": {"total_token": 10**9}}, 400, "only 53 nodes are reachable"),
        ({"draft": {"total_token": 300, "depth": 7, "top_k": 10}}, 400, "draft.total_token=300 is more than the 256"),
        ({"draft": {"depth": 10**9, "top_k": 1}}, 400, "lower it"),
        ({"draft": {"top_k": 64}}, 400, "draft.top_k=64 is more than the 16 allowed"),
        ({"stop": [""]}, 400, "a stop string is empty"),
        ({"n": 1000}, 400, "n=1000"),
        ({"model": "gpt-4"}, 404, "there is no model 'gpt-4' here; use 'tiny'"),
        ({"messages": [{"role": "user", "content": "a" * 30_000}]}, 413, "larger than 20000 bytes"),
    ],
)
def test_a_mistake_is_one_sentence(client, fields, status: int, sentence: str) -> None:
    for stream in (False, True):
        body = json.dumps({"messages": HELLO, "max_tokens": 4, "stream": stream, **fields})
        answer = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == status
        error = answer.json()["error"]
        assert sentence in error["message"]
        assert len(error["message"]) < 300
        assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("body", [b"", b"{", b"null", b"[]", b'"x"', b'{"messages": "\xff\xfe"}', b"[" * 19_000])
def test_a_body_that_is_no_json_object(client, body: bytes) -> None:
    answer = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_unknown_paths_and_methods_have_openais_errors(client) -> None:
    for method, path, status in (("GET", "/nope", 404), ("GET", "/v1/completions", 405), ("GET", "/v1/models/x", 404)):
        answer = client.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["type"]


def test_a_chunked_body_is_limited_as_well(client) -> None:
    parts = (b"a" * 1000 for _ in range(30))
    answer = client.post("/v1/chat/completions", content=parts, headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_ids_outside_the_vocabulary_are_refused(client) -> None:
    for prompt in ([10**6], [-1], [2**70], []):
        answer = client.post("/v1/completions", json={"prompt": prompt})
        assert answer.status_code == 400, prompt


def test_unknown_fields_are_logged_once(client, caplog) -> None:
    with caplog.at_level(logging.WARNING, "eagle_mars.chat.openai_server"):
        for _ in range(2):
            chat(client, thetta=0.5)
    assert [record.getMessage() for record in caplog.records].count(
        "ignoring fields that this server doesn't know: thetta"
    ) == 1


def test_the_api_key_guards_v1(tiny) -> None:
    app = create_app(ChatService(tiny), Metrics(), ServerOptions("tiny", api_key="secret"))
    with TestClient(app) as guarded:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            answer = guarded.get("/v1/models", headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert guarded.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
        assert guarded.get("/health").status_code == 200


def test_a_full_queue_is_429_and_all_choices_or_none(tiny) -> None:
    service = ChatService(tiny, max_active=1, max_waiting=1)
    with TestClient(create_app(service, Metrics(), ServerOptions("tiny"))) as small:
        answer = small.post("/v1/chat/completions", json={"messages": HELLO, "n": 3, "max_tokens": 900})
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "queue_full"
        assert answer.headers["retry-after"] == "1"
        assert small.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 2}).status_code == 200


def test_a_crash_is_a_500_or_an_event_and_costs_no_slot(tiny, monkeypatch) -> None:
    service = ChatService(tiny, max_active=1, max_waiting=4)
    with TestClient(create_app(service, Metrics(), ServerOptions("tiny")), raise_server_exceptions=False) as broken:
        with monkeypatch.context() as patch:
            patch.setattr(tiny.target, "forward_tree", lambda *args: 1 / 0)
            for stream in (False, True, False, True, False, True):
                body = {"messages": HELLO, "max_tokens": 9, "stream": stream}
                answer = broken.post("/v1/chat/completions", json=body)
                if stream:
                    assert answer.status_code == 200
                    error = json.loads(answer.text.split("\n\n")[-2].removeprefix("data: "))["error"]
                    assert "[DONE]" not in answer.text
                else:
                    assert answer.status_code == 500
                    error = answer.json()["error"]
                assert "ZeroDivisionError" in error["message"]
        assert broken.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 9}).status_code == 200
