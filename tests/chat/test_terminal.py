"""The terminal with scripted input: commands, errors that don't end the chat, colours."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from eagle_mars import VerifyConfig
from eagle_mars.chat.session import ChatOptions
from eagle_mars.chat.terminal import Terminal


def talk(service, *lines: str, colour: bool = False, system: str | None = None) -> str:
    """What the terminal shows when these lines are typed."""
    typed = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    shown = io.StringIO()
    console = Console(file=shown, width=200, force_terminal=colour, color_system="standard" if colour else None)
    Terminal(service, ChatOptions(max_new_tokens=12), console, read, system).run()
    return shown.getvalue()


def answer(tiny, *texts: str, **verify) -> str:
    """The model's own answer after these turns, user first."""
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]
    options = VerifyConfig(**verify or {"rule": "exact"})
    return tiny.generate(tiny.chat_ids(messages), max_new_tokens=12, verify=options).text


def test_turns_follow_each_other(service, tiny) -> None:
    first = answer(tiny, "hello")
    second = answer(tiny, "hello", first, "and?")
    shown = talk(service, "hello", "", "and?", "!!stats")
    assert first in shown
    assert second in shown
    assert "exact · 12 tokens" in shown
    assert "cut at the token limit" in shown
    assert "2 answers · 24 tokens" in shown
    assert shown.startswith("rule exact. Lossless")


def test_several_lines_are_one_message(service, tiny) -> None:
    expected = answer(tiny, "one\ntwo")
    assert expected in talk(service, '"""', "one", "two", '"""')
    assert expected in talk(service, "one\\", "two")


def test_remove_regenerate_and_reset(service, tiny) -> None:
    first = answer(tiny, "hello")
    again = talk(service, "hello", "!!regen")
    assert again.count(first) == 2
    for forget in ("!!remove", "!!reset"):
        assert talk(service, "hello", forget, "hello").count(first) == 2


def test_save_and_load(service, tiny, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    first = answer(tiny, "hello")
    talk(service, "hello", f"!!save {file}", system="SYS")
    roles = [message["role"] for message in json.loads(file.read_text())["messages"]]
    assert roles == ["system", "user", "assistant"]
    talk(service, "hello", f"!!save {file}")
    shown = talk(service, f"!!load {file}", "and?")
    assert "2 messages" in shown
    assert answer(tiny, "hello", first, "and?") in shown


def test_the_rule_changes_between_turns(service, tiny) -> None:
    relaxed = tiny.generate(tiny.chat_ids("hello"), max_new_tokens=12, verify=VerifyConfig(theta=0.6))
    assert relaxed.relaxed
    shown = talk(
        service, "!!rule mars", "!!theta 0.6", "hello", "!!remove", "!!theta off", "hello", "!!temperature 0.5"
    )
    assert relaxed.text in shown
    assert f"{relaxed.relaxed} relaxed, the first after {relaxed.exact_prefix_tokens} tokens" in shown
    assert answer(tiny, "hello") in shown
    assert "z2/z1 > 0.6" in shown
    assert "temperature is 0.5" in shown


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("!!nope", "!!nope is no command"),
        ("!!theta x", "!!theta needs a number"),
        ("!!theta 7", "VerifyConfig.theta=7.0 is not usable"),
        ("!!rule strict", "there is no rule 'strict'"),
        ("!!rule typical", "rule='typical' isn't allowed here"),
        ("!!regen", "there is no answer yet"),
        ("!!save", "name a file"),
        ("!!load /nowhere/chat.json", "can't read /nowhere/chat.json"),
        ("!!save /nowhere/chat.json", "can't write /nowhere/chat.json"),
        ("a" * 2000, "the prompt has 20"),
        ("caf\udce9", "the text holds bytes that are no UTF-8"),
    ],
)
def test_a_mistake_is_told_and_the_chat_goes_on(service, tiny, line: str, sentence: str) -> None:
    shown = talk(service, line, "hello")
    assert f"error: {sentence}" in shown
    assert answer(tiny, "hello") in shown


def test_a_line_that_cannot_be_decoded_is_asked_for_again(service, tiny) -> None:
    """`input` raises this in a UTF-8 locale; in the C locale it gives the bytes as half surrogates."""
    typed = iter([b"caf\xe9", b"hello"])

    def read(prompt: str) -> str:
        for line in typed:
            return line.decode()
        raise EOFError

    console = Console(file=io.StringIO(), width=200)
    Terminal(service, ChatOptions(max_new_tokens=12), console, read).run()
    assert "no UTF-8; write it again" in console.file.getvalue()
    assert answer(tiny, "hello") in console.file.getvalue()


def test_a_wrong_command_forgets_no_question(service, tiny, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    messages = [{"role": "user", "content": "hello"}]
    file.write_text(json.dumps({"messages": messages}))
    talk(service, f"!!load {file}", "!!nope", f"!!save {file}")
    assert json.loads(file.read_text())["messages"] == messages


def test_a_file_that_is_no_chat_changes_nothing(service, tiny, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    for content in ("{", '{"messages": [{"role": "cat", "content": ""}]}'):
        file.write_text(content)
        assert "is no saved chat" in talk(service, f"!!load {file}")


def test_relaxed_tokens_are_coloured_until_told_otherwise(service) -> None:
    yellow = "\x1b[1;30;43m"
    lines = ["!!theta 0.6", "hello", "!!remove"]
    assert yellow in talk(service, *lines, colour=True)
    assert yellow not in talk(service, "!!color", "!!color", *lines, colour=True)


def test_help_lists_every_command(service) -> None:
    shown = talk(service, "!!help", "!!exit", "never read")
    for name in ("exit", "reset", "remove", "regen", "save", "load", "theta", "rule", "stats"):
        assert f"!!{name}" in shown


def test_an_interrupted_answer_keeps_what_was_said(service, monkeypatch) -> None:
    from eagle_mars.chat.response import Response

    whole = Response.__iter__

    def interrupted(self):
        for number, pieces in enumerate(whole(self)):
            if number == 1:
                raise KeyboardInterrupt
            yield pieces

    with monkeypatch.context() as patch:
        patch.setattr(Response, "__iter__", interrupted)
        assert "stopped." in talk(service, "hello")
    assert "error" not in talk(service, "hello")
