"""What the session layer adds to the engine: scores of tokens, default lengths, ids of prompts."""

from __future__ import annotations

import pytest
import torch

from eagle_mars import SamplingConfig, VerifyConfig
from eagle_mars.chat.session import ChatOptions, ChatService
from eagle_mars.config import DraftConfig
from eagle_mars.errors import ConfigError, ContextLengthError

EXACT = VerifyConfig(rule="exact")


@pytest.mark.parametrize("method", ["speculative", "autoregressive"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_are_those_of_a_teacher_forced_forward(tiny, method: str, temperature: float) -> None:
    ids = tiny.chat_ids("hello")
    sampling = SamplingConfig(temperature=temperature, seed=3, presence_penalty=1.0)
    stream = tiny.stream(
        ids, max_new_tokens=20, verify=VerifyConfig(theta=0.6), sampling=sampling, method=method, top_logprobs=3
    )
    pieces = list(stream)
    result = stream.result
    tokens = [token for piece in pieces for token in piece.tokens]
    scores = [score for piece in pieces for score in piece.scores]
    assert tuple(tokens) == result.token_ids[: len(tokens)]
    assert len(scores) == len(tokens)
    with torch.inference_mode():
        rows = tiny.base_model(torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1 : -1]
    logprobs = rows.log_softmax(-1)
    for row, logprob, token, score in zip(rows, logprobs, tokens, scores, strict=True):
        assert score.chosen.token_id == token
        best = row.topk(3)
        assert [candidate.token_id for candidate in score.best] == best.indices.tolist()
        # The tree's forward sums in another order than the plain one: fp32 rounding of logits of size 1.
        assert score.chosen.logprob == pytest.approx(logprob[token].item(), abs=1e-4)
        assert [candidate.logit for candidate in score.best] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_asking_for_scores_changes_no_token(tiny) -> None:
    ids = tiny.chat_ids("hello")
    plain = tiny.generate(ids, max_new_tokens=20, verify=EXACT)
    scored = tiny.stream(ids, max_new_tokens=20, verify=EXACT, top_logprobs=0)
    assert scored.result.token_ids == plain.token_ids


def test_pieces_come_cycle_by_cycle_and_carry_every_token(tiny) -> None:
    stream = tiny.stream(tiny.chat_ids("hello"), max_new_tokens=20, verify=VerifyConfig(theta=0.6))
    cycles = list(stream.cycles())
    result = stream.result
    # Besides cycles: the token that prefill gives, and maybe a last one that needs no draft.
    assert len(cycles) - result.cycles in (1, 2)
    pieces = [piece for cycle in cycles for piece in cycle]
    assert tuple(token for piece in pieces for token in piece.tokens) == result.token_ids
    assert "".join(piece.text for piece in pieces) == result.text
    assert all(piece.scores == () for piece in pieces)


def test_a_length_that_nobody_names_is_the_services_and_the_contexts(tiny) -> None:
    service = ChatService(tiny, verify=EXACT, default_max_new_tokens=6)
    try:
        assert service.chat([{"role": "user", "content": "hi"}], ChatOptions()).wait().new_tokens == 6
        ids = [65] * (service.max_context - 3)
        assert service.submit(ids, ChatOptions()).wait().new_tokens == 3
        with pytest.raises(ContextLengthError):
            service.submit([65] * service.max_context, ChatOptions())
    finally:
        service.close()


def test_a_service_refuses_what_its_limits_forbid(service) -> None:
    ids = service.text_ids("hello")
    for options in (
        ChatOptions(verify=VerifyConfig(rule="typical")),
        ChatOptions(draft=DraftConfig(total_token=8, depth=3, top_k=17)),  # the head ranks 16 tokens
    ):
        with pytest.raises(ConfigError, match="allowed here"):
            service.submit(ids, options)
    with pytest.raises(ConfigError, match="allowed here"):
        ChatService(service.model, verify=VerifyConfig(rule="typical"))


def test_the_text_of_a_token_alone(service) -> None:
    (token,) = service.text_ids("a")
    assert service.token_text(token) == "a"
    (first, _) = service.text_ids("é")
    assert service.token_text(first) == "\ufffd"


def test_responses_that_share_forwards_say_what_they_say_alone(tiny, monkeypatch) -> None:
    forwards = 0
    forward_tree = tiny.target.forward_tree

    def counted(*arguments):
        nonlocal forwards
        forwards += 1
        return forward_tree(*arguments)

    monkeypatch.setattr(tiny.target, "forward_tree", counted)
    options = [
        ChatOptions(max_new_tokens=24, verify=EXACT),
        ChatOptions(max_new_tokens=24, verify=VerifyConfig(theta=0.5), sampling=SamplingConfig(temperature=1, seed=4)),
        ChatOptions(max_new_tokens=24, verify=EXACT, draft=DraftConfig.chain(2)),  # another tree: decoded beside them
        ChatOptions(max_new_tokens=24, verify=EXACT, stop=("e",)),
    ]
    ids = [tiny.chat_ids(text) for text in ("hello", "good day", "hi", "so")]
    texts, counts = [], []
    for share in (False, True):
        forwards = 0
        service = ChatService(tiny, max_active=3, share_forwards=share)
        try:
            responses = [service.submit(*job) for job in zip(ids, options, strict=True)]
            service.submit(ids[0], options[0]).cancel()
            texts.append([response.wait().token_ids for response in responses])
        finally:
            service.close()
        counts.append(forwards)
    assert texts[0] == texts[1]
    assert counts[1] < counts[0]
