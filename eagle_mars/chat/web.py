"""The web page: a chat with the rule at hand, and the exact and the relaxed answer side by side."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when gradio is imported

import gradio as gr

from eagle_mars.chat.client import Answer, ServerClient, ServerError
from eagle_mars.chat.web_view import answer_html, error_html, head_html, statistics_html, text_html

ASSETS = Path(__file__).parents[1] / "assets" / "web"

_REDRAW_SECONDS = 0.1

Messages = list[dict[str, str]]
Ask = Callable[..., Iterator[Answer]]  # (messages, rule, theta, temperature, length, **request fields)


def build(client: ServerClient) -> gr.Blocks:
    """The page over a running server. Raises ServerError if there is none."""
    model = client.model()

    def ask(
        messages: Messages, rule: str, theta: float, temperature: float, length: int, **fields: Any
    ) -> Iterator[Answer]:
        chosen = {"rule": rule} if rule == "exact" else {"rule": rule, "theta": theta}
        answers = client.chat(
            messages, model=model, temperature=temperature, max_tokens=int(length), **chosen, **fields
        )
        return _paced(answers)

    rule = gr.Radio(["exact", "mars"], value="mars", label="Rule of the chat", elem_id="em-rule", render=False)
    controls = [
        gr.Slider(0.5, 1, 0.9, step=0.01, label="θ", info="Relax where z2/z1 > θ. 1 is exact.", render=False),
        gr.Slider(0, 1.5, 0, step=0.05, label="Temperature", info="0 takes the best token.", render=False),
        gr.Slider(16, 1024, 256, step=16, label="Tokens at most", elem_id="em-length", render=False),
    ]
    with gr.Blocks(title="eagle_mars", analytics_enabled=False) as page:
        gr.HTML(head_html(model))
        with gr.Row():
            with gr.Column(scale=4, min_width=300), gr.Tabs():
                with gr.Tab("Chat"):
                    _chat_tab(ask, [rule, *controls])
                with gr.Tab("Exact | relaxed"):
                    _pair_tab(ask, controls)
            with gr.Column(scale=1, min_width=260):
                for control in (rule, *controls):
                    control.render()
    return page


def launch(page: gr.Blocks, host: str, port: int) -> None:
    """Serve the page until it is interrupted; never through a public link. Raises OSError if the port is taken."""
    script = (ASSETS / "page.js").read_text("utf-8")
    page.queue(default_concurrency_limit=8).launch(
        server_name=host,
        server_port=port,
        share=False,
        ssr_mode=False,
        footer_links=[],
        quiet=True,  # it would advertise a public link
        theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
        css_paths=[ASSETS / "page.css"],
        head=f"<script>{script}</script>",
    )


def _chat_tab(ask: Ask, controls: list[Any]) -> None:
    messages = gr.State([])
    bubbles = gr.Chatbot(
        show_label=False,
        height="58vh",
        min_height=300,
        buttons=[],
        latex_delimiters=[],
        sanitize_html=False,  # web_view escapes every text; the sanitizer would drop the tips
        placeholder="Ask something. Then choose another rule and ask again.",
        elem_id="em-chat",
    )
    statistics = gr.HTML(elem_id="em-chat-statistics")
    box, send, stop = _prompt_row("em-prompt")
    again = gr.Button("Ask again, with the options as they are now", size="sm", elem_id="em-again")

    def add(text: str, messages: Messages) -> tuple[str, Messages]:
        return "", [*messages, {"role": "user", "content": text}] if text.strip() else messages

    def take_back(messages: Messages) -> Messages:
        return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages

    def answer(messages: Messages, *options: Any) -> Iterator[tuple[Messages, Messages, str]]:
        if not messages or messages[-1]["role"] == "assistant":
            return
        shown = [_bubble(message["role"], text_html(message["content"])) for message in messages]
        yield messages, shown, ""
        try:
            for answer in ask(messages, *options):
                yield (
                    [*messages, {"role": "assistant", "content": answer.text}],
                    [*shown, _bubble("assistant", answer_html(answer))],
                    statistics_html(answer),
                )
        except ServerError as error:
            yield messages, shown, error_html(str(error))

    run = {"fn": answer, "inputs": [messages, *controls], "outputs": [messages, bubbles, statistics]}
    sent = gr.on([send.click, box.submit], add, [box, messages], [box, messages]).then(**run, show_progress="hidden")
    retried = again.click(take_back, messages, messages).then(**run, show_progress="hidden")
    stop.click(None, cancels=[sent, retried])
    bubbles.clear(lambda: ([], ""), outputs=[messages, statistics], cancels=[sent, retried])


def _pair_tab(ask: Ask, controls: list[Any]) -> None:
    box, send, stop = _prompt_row("em-pair-prompt")
    panels: list[gr.HTML] = []
    with gr.Row():
        for name, title in (("exact", "exact"), ("relaxed", "relaxed (mars)")):
            with gr.Column(min_width=280, elem_classes="em-panel"):
                gr.Markdown(f"### {title}")
                panels += [gr.HTML(elem_id=f"em-{name}"), gr.HTML(elem_id=f"em-{name}-statistics")]

    def compare(text: str, *options: Any) -> Iterator[list[str]]:
        """One after the other, since two at once would share the engine and both look slow; with the same coins."""
        if not text.strip():
            return
        shown = [""] * 4
        seed = random.randrange(2**31)
        for at, rule in ((0, "exact"), (2, "mars")):
            try:
                for answer in ask([{"role": "user", "content": text}], rule, *options, seed=seed):
                    shown[at : at + 2] = answer_html(answer), statistics_html(answer)
                    yield list(shown)
            except ServerError as error:
                shown[at + 1] = error_html(str(error))
                yield list(shown)

    started = gr.on([send.click, box.submit], compare, [box, *controls], panels, show_progress="hidden")
    stop.click(None, cancels=[started])


def _paced(answers: Iterator[Answer]) -> Iterator[Answer]:
    """Fewer redraws than cycles: each sends the whole text to the browser again."""
    shown = 0.0
    for answer in answers:
        if answer.speculation is not None or time.monotonic() - shown >= _REDRAW_SECONDS:
            shown = time.monotonic()
            yield answer


def _prompt_row(name: str) -> tuple[gr.Textbox, gr.Button, gr.Button]:
    with gr.Row(elem_classes="em-prompt-row"):
        box = gr.Textbox(
            label="Your message",
            placeholder="Your message",
            show_label=False,
            container=False,
            lines=1,
            max_lines=8,
            scale=6,
            min_width=120,
            elem_id=name,
        )
        send = gr.Button("Send", variant="primary", scale=1, min_width=72, elem_id=f"{name}-send")
        stop = gr.Button("Stop", scale=1, min_width=72, elem_id=f"{name}-stop")
    return box, send, stop


def _bubble(role: str, html: str) -> dict[str, str]:
    return {"role": role, "content": html}
