from __future__ import annotations

import pytest

from eagle_mars.text import Detokenizer, StopStrings


class ByteTokenizer:
    """One id a byte; ids above 255 are special."""

    def decode(self, ids, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語 and 🦅🚀", "e\u0301"])
def test_text_never_shrinks_and_partial_characters_wait(text: str) -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    shown = ""
    for byte in text.encode():
        shown += detokenizer.push(byte)
        assert text.startswith(shown)
        assert "\ufffd" not in shown
    assert shown + detokenizer.flush() == text


def test_special_tokens_have_no_text_and_break_nothing() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    shown = "".join(detokenizer.push(i) for i in [104, 300, 105, 301, 302, 33])
    assert shown == "hi!"


def test_a_character_that_stays_partial_is_shown_at_the_end() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    assert detokenizer.push("é".encode()[0]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_leading_spaces_survive_a_sentencepiece_like_tokenizer() -> None:
    class Words:
        vocabulary = ("▁Hello", "▁big", "▁world", "!")

        def decode(self, ids, **options) -> str:
            return "".join(self.vocabulary[i] for i in ids).replace("▁", " ").removeprefix(" ")

    detokenizer = Detokenizer(Words())
    assert "".join(detokenizer.push(i) for i in [0, 1, 2, 3]) == "Hello big world!"


@pytest.mark.parametrize("cut", range(1, 8))
def test_stop_string_is_found_across_any_split(cut: int) -> None:
    text, stops = "one STOP two", ["STOP", "###"]
    watcher = StopStrings(stops)
    shown = ""
    for start in range(0, len(text), cut):
        shown += watcher.push(text[start : start + cut])
        if watcher.hit:
            break
    assert watcher.hit
    assert shown == "one "


def test_what_only_looked_like_a_stop_string_is_not_lost() -> None:
    watcher = StopStrings(["STOP"])
    assert watcher.push("ST") == ""
    assert watcher.push("AND") == "STAND"
    assert watcher.push(" S") == " "
    assert watcher.flush() == "S"
    assert not watcher.hit


def test_the_earliest_stop_string_wins() -> None:
    watcher = StopStrings(["bb", "a"])
    assert watcher.push("xabb") == "x"
