"""Answers as HTML: every relaxed token marked, with the two candidates and their margin for its tip."""

from __future__ import annotations

import math
from html import escape

from eagle_mars.chat.client import Answer, ShownToken


def head_html(model: str) -> str:
    """Title, model, and what a mark means."""
    return (
        f'<header class="em-head"><h1>eagle_mars</h1><span>{escape(model)}</span></header>'
        '<p class="em-legend"><mark class="em-relaxed">relaxed</mark> tokens: the target was undecided, and its '
        "runner-up was accepted. Point at one, or tap it, for the two candidates and their margin.</p>"
    )


def answer_html(answer: Answer) -> str:
    """The answer's text. It is one line, since a blank one would end an HTML block inside Markdown."""
    return f'<div class="em-answer">{"".join(map(_token_html, answer.tokens))}</div>'


def text_html(text: str) -> str:
    """Text as it was written, no Markdown and no HTML in it."""
    return f'<div class="em-answer">{_escaped(text)}</div>'


def statistics_html(answer: Answer) -> str:
    """One line of counts, and at the end the rule's guarantee."""
    known = answer.speculation
    count = answer.completion_tokens if answer.completion_tokens is not None else len(answer.tokens)
    parts = [
        f"<b>{count}</b> tokens",
        f"<b>{answer.tokens_per_second:.1f}</b> tokens/s",
        f"τ <b>{answer.tau:.2f}</b>",
        f'<span class="em-count"><b>{answer.relaxed}</b> relaxed</span>',
    ]
    if known is None:
        return _line(parts, "")
    if answer.relaxed:
        parts += [f"first <b>{known['exact_prefix_tokens']}</b> exact", f"regret <b>{known['regret']:.2f}</b> nats"]
    return _line(parts, known["guarantee"])


def error_html(message: str) -> str:
    return f'<div class="em-error" role="alert">{escape(message)}</div>'


def _line(parts: list[str], guarantee: str) -> str:
    promise = f'<div class="em-guarantee">{escape(guarantee)}</div>' if guarantee else ""
    state = "done" if guarantee else "running"
    return f'<div class="em-statistics" data-state="{state}">{" · ".join(parts)}{promise}</div>'


def _token_html(token: ShownToken) -> str:
    if token.provenance != "relaxed":
        return _escaped(token.text)
    word = token.text.lstrip() or token.text  # a marked space would stick to the end of the line above
    before = token.text[: len(token.text) - len(word)]
    shown = word.replace("\n", "⏎\n")
    return (
        f'{_escaped(before)}<mark class="em-relaxed" tabindex="0" data-tip="{_escaped(_tip(token))}">'
        f"{_escaped(shown)}</mark>"
    )


def _tip(token: ShownToken) -> str:
    lines = []
    for candidate in token.best:
        note = "  taken" if candidate.token == token.text else ""
        lines.append(f"{_visible(candidate.token)}  z {candidate.logit:.2f}  p {math.exp(candidate.logprob):.2f}{note}")
    if len(token.best) == 2:
        first, second = token.best
        ratio = f"z2/z1 {second.logit / first.logit:.3f}, " if first.logit > 0 else ""
        lines.append(f"margin: {ratio}z1 - z2 {first.logit - second.logit:.2f} nats")
    return "\n".join(lines)


def _visible(token: str) -> str:
    return '"' + token.replace("\n", "⏎") + '"'


def _escaped(text: str) -> str:
    """Without line ends of any kind: Markdown takes a carriage return for one."""
    return escape(text).replace("\n", "&#10;").replace("\r", "&#13;")
