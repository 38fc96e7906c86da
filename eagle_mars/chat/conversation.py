"""The messages of one chat: asked, answered, taken back, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from eagle_mars.chat.templates import Message
from eagle_mars.errors import ConfigError


class _SavedMessage(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: str


class _Saved(BaseModel):
    model_config = ConfigDict(extra="forbid")

    messages: list[_SavedMessage]


class Conversation:
    """Turns of user and assistant after an optional system message."""

    def __init__(self, system: str | None = None) -> None:
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self._turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        return [*self._system, *self._turns]

    def ask(self, text: str) -> None:
        self._turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        self._turns.append({"role": "assistant", "content": text})

    def take_back_question(self) -> None:
        """Forget a question that got no answer."""
        if self._turns and self._turns[-1]["role"] == "user":
            self._turns.pop()

    def take_back_answer(self) -> None:
        """Forget the last answer, so that its question can be answered anew. Raises ConfigError if there is none."""
        if not self._turns or self._turns[-1]["role"] != "assistant":
            raise ConfigError("there is no answer yet; ask something first.")
        self._turns.pop()

    def take_back_turn(self) -> None:
        """Forget the last question and its answer. Raises ConfigError if there is none."""
        self.take_back_answer()
        self.take_back_question()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._turns.clear()

    def save(self, path: Path) -> None:
        """Write the messages as JSON. Raises ConfigError if that is impossible."""
        saved = _Saved(messages=[_SavedMessage.model_validate(message) for message in self.messages])
        try:
            path.write_text(saved.model_dump_json(indent=2) + "\n", "utf-8")
        except OSError as error:
            raise ConfigError(f"can't write {path}: {error.strerror}.") from error

    def load(self, path: Path) -> None:
        """Go on with saved messages. Raises ConfigError, and changes nothing, if the file isn't readable."""
        try:
            saved = _Saved.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"can't read {path}: {error.strerror}.") from error
        except ValidationError as error:
            raise ConfigError(f"{path} is no saved chat: {error.errors()[0]['msg']}.") from error
        messages = [message.model_dump() for message in saved.messages]
        first = 1 if messages and messages[0]["role"] == "system" else 0
        self._system, self._turns = messages[:first], messages[first:]
