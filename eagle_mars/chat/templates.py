"""Messages → prompt ids: the tokenizer's own chat template, or one of four built-in ones, or a Jinja file.

Special tokens written inside a message are parsed as such, as everywhere with `apply_chat_template`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_mars.errors import ConfigError

if TYPE_CHECKING:
    from eagle_mars.model import EaModel

Message = dict[str, str]

# Formats of checkpoints whose tokenizer has no template. `bos_token` is empty for tokenizers that have none.
BUILT_IN = {
    "vicuna": (
        "{% set system = 'A chat between a curious user and an artificial intelligence assistant. The assistant gives "
        "helpful, detailed, and polite answers to the user\\'s questions.' %}"
        "{% if messages[0].role == 'system' %}"
        "{% set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}"
        "{{ bos_token }}{{ system + ' ' }}"
        "{% for m in messages %}"
        "{% if m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}"
        "{% elif m.role == 'assistant' %}{{ 'ASSISTANT: ' + m.content + '</s>' }}"
        "{% else %}{{ raise_exception('the vicuna template has one system message, the first, and no ' + m.role) }}"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    ),
    "llama-2": (
        "{% set system = '' %}"
        "{% if messages[0].role == 'system' %}"
        "{% set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}"
        "{% set messages = messages[1:] %}{% endif %}"
        "{% for m in messages %}"
        "{% if m.role == 'user' %}"
        "{{ bos_token }}{{ '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}"
        "{% elif m.role == 'assistant' %}{{ ' ' + m.content + ' </s>' }}"
        "{% else %}{{ raise_exception('the llama-2 template has one system message, the first, and no ' + m.role) }}"
        "{% endif %}{% endfor %}"
    ),
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "raw": "{{ bos_token }}{{ messages | map(attribute='content') | join('\\n') }}",
}


def chat_template(name: str | None) -> str | None:
    """The Jinja text that `--chat-template` names: a built-in template or a file; None is the tokenizer's own.

    Raises ConfigError if it is neither.
    """
    if name is None or name in BUILT_IN:
        return name and BUILT_IN[name]
    try:
        return Path(name).expanduser().read_text("utf-8")
    except FileNotFoundError:
        known = ", ".join(BUILT_IN)
        raise ConfigError(f"there is no chat template {name!r}; use {known}, or the path of a Jinja file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read the chat template {name}: {error}.") from error


def normalise(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """OpenAI's messages as the role/content pairs that templates know.

    Text parts are joined, `developer` is `system`, null content is empty. Raises ConfigError for parts that aren't text
    and for an empty conversation.
    """
    if not messages:
        raise ConfigError("messages is empty; give at least one message.")
    return [{"role": _role(message["role"]), "content": _text(message.get("content"))} for message in messages]


def prompt_ids(model: EaModel, messages: Sequence[Mapping[str, Any]], template: str | None = None) -> list[int]:
    """Ids that the response continues: a new assistant turn, or the last message if it is the assistant's.

    template: Jinja text, see `chat_template`; None is the tokenizer's own. Raises ConfigError.
    """
    conversation = normalise(messages)
    if conversation[-1] == {"role": "assistant", "content": ""}:  # nothing to continue: the same as a new turn
        conversation.pop()
    if not conversation:
        raise ConfigError("the conversation holds nothing to answer; give a user message.")
    unfinished = conversation[-1]["role"] == "assistant"
    return model.chat_ids(conversation, chat_template=template, continue_final_message=unfinished)


def _role(role: str) -> str:
    return "system" if role == "developer" else role


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    kinds = {part["type"] for part in content} - {"text"}
    if kinds:
        raise ConfigError(f"message parts of type {sorted(kinds)[0]!r} aren't supported; send text parts only.")
    texts = [part.get("text") for part in content]
    if None in texts:
        raise ConfigError("a text part has no text; add it.")
    return "".join(texts)
