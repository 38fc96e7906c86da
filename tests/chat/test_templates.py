from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from eagle_mars.chat.templates import BUILT_IN, chat_template, normalise, prompt_ids
from eagle_mars.errors import ConfigError

TURNS = [
    {"role": "user", "content": "U1"},
    {"role": "assistant", "content": "A1"},
    {"role": "user", "content": "U2"},
]
SYSTEM = {"role": "system", "content": "SYS"}


def rendered(model, messages, template: str | None) -> str:
    return model.tokenizer.decode(prompt_ids(model, messages, chat_template(template)))


def test_the_tokenizers_own_template_is_the_default(tiny) -> None:
    assert rendered(tiny, [SYSTEM, *TURNS], None) == (
        "<|system|>SYS<|end|><|user|>U1<|end|><|assistant|>A1<|end|><|user|>U2<|end|><|assistant|>"
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vicuna", "SYS USER: U1 ASSISTANT: A1</s>USER: U2 ASSISTANT:"),
        ("llama-2", "[INST] <<SYS>>\nSYS\n<</SYS>>\n\nU1 [/INST] A1 </s>[INST] U2 [/INST]"),
        (
            "chatml",
            "<|im_start|>system\nSYS<|im_end|>\n<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\nA1<|im_end|>\n"
            "<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("raw", "SYS\nU1\nA1\nU2"),
    ],
)
def test_built_in_templates(tiny, name: str, expected: str) -> None:
    assert rendered(tiny, [SYSTEM, *TURNS], name) == expected


@pytest.mark.skipif(importlib.util.find_spec("fastchat") is None, reason="FastChat isn't installed")
@pytest.mark.parametrize(("ours", "theirs"), [("vicuna", "vicuna_v1.1"), ("llama-2", "llama-2")])
def test_they_are_what_fastchat_sends(tiny, ours: str, theirs: str) -> None:
    from fastchat.conversation import get_conv_template

    conversation = get_conv_template(theirs)
    for index, message in enumerate(TURNS):
        conversation.append_message(conversation.roles[index % 2], message["content"])
    conversation.append_message(conversation.roles[1], None)
    expected = conversation.get_prompt().replace("<s>", "")  # a literal bos_token, which this tokenizer doesn't have
    assert rendered(tiny, TURNS, ours) == expected


@pytest.mark.parametrize("name", [None, *BUILT_IN])
def test_a_last_assistant_message_is_continued(tiny, name: str | None) -> None:
    unfinished = [*TURNS, {"role": "assistant", "content": "half an ans"}]
    assert rendered(tiny, unfinished, name).endswith("half an ans")
    new_turn = [*TURNS, {"role": "assistant", "content": ""}]
    assert rendered(tiny, new_turn, name) == rendered(tiny, TURNS, name)


def test_messages_become_plain_role_and_content(tiny) -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    messages = [{"role": "developer", "content": "SYS"}, {"role": "user", "content": parts, "name": "x"}]
    assert normalise(messages) == [SYSTEM, {"role": "user", "content": "hello"}]
    assert normalise([{"role": "assistant", "content": None}]) == [{"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "messages is empty"),
        ([{"role": "assistant", "content": ""}], "nothing to answer"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url' aren't supported"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "has no text"),
    ],
)
def test_what_is_no_conversation_is_refused_in_a_sentence(tiny, messages, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        prompt_ids(tiny, messages)


def test_a_template_may_refuse_messages(tiny) -> None:
    with pytest.raises(ConfigError, match="one system message, the first"):
        prompt_ids(tiny, [*TURNS, SYSTEM], chat_template("vicuna"))


def test_a_template_from_a_file(tiny, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert rendered(tiny, TURNS, str(file)) == "[U1][A1][U2]"
    file.write_text("{% for %}")
    with pytest.raises(ConfigError, match="refuses"):
        prompt_ids(tiny, TURNS, chat_template(str(file)))
    with pytest.raises(ConfigError, match="use vicuna, llama-2, chatml, raw, or the path"):
        chat_template("no-such-template")
