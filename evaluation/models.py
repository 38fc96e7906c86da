"""Which models are measured, and how they are loaded: `configs/models/*.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle_mars import DraftConfig, EaModel
from eagle_mars.chat.templates import chat_template
from eagle_mars.embedded import embedded_head_path, embedded_target_path
from eagle_mars.errors import ConfigError

CONFIGS = Path(__file__).parents[1] / "configs" / "models"
EMBEDDED = "embedded"
EMBEDDED_TARGET = "embedded-target"  # as a head: the target drafts for itself


class ModelConfig(BaseModel):
    """A target with its head, and how it is talked to.

    target, head: hub id, local directory, or `embedded`. The head may be a whole language model that shares the
    target's tokenizer; `embedded-target` makes the embedded target draft for itself. head_source: where the head's id
    comes from; head None means that no id is known, so that `--ea-model-path` has to name one. dtype: `auto` is the
    checkpoint's.
    template: a name or file that `eagle_mars.chat.templates` knows; None is the tokenizer's own.
    system: the system message. thinking: what the template's `enable_thinking` is set to; None leaves it alone.
    tree: shape of the draft tree. cpu_pack: on a CPU, lay out the weights for small batches (`eagle_mars.cpu`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    head: str | None
    head_source: str = ""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    template: str | None = None
    system: str | None = None
    thinking: bool | None = None
    tree: DraftConfig = Field(default_factory=DraftConfig)
    cpu_pack: bool = False

    @property
    def target_path(self) -> str:
        return str(embedded_target_path()) if self.target == EMBEDDED else self.target

    @property
    def head_path(self) -> str:
        """Raises ConfigError if no head is known."""
        if self.head is None:
            raise ConfigError(f"no draft head is known for {self.target}; name one with --ea-model-path.")
        if self.head == EMBEDDED_TARGET:
            return str(embedded_target_path())
        return str(embedded_head_path()) if self.head == EMBEDDED else self.head


def read_model_config(name: str) -> ModelConfig:
    """The model of that name in `configs/models`, or in the YAML file of that path.

    Raises ConfigError if there is none, or it isn't right.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else CONFIGS / f"{name}.yaml"
    try:
        values = yaml.safe_load(path.read_text("utf-8"))
    except FileNotFoundError:
        known = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.yaml")))
        raise ConfigError(f"there is no model config {name!r}; use {known}, or the path of a YAML file.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"can't read the model config {path}: {str(error).splitlines()[0]}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} is no model config; it has to map names to values, such as target and head.")
    return check_model_config(str(path), values)


def check_model_config(source: str, values: Mapping[str, Any]) -> ModelConfig:
    """A checked config. source: how an error names it. Raises ConfigError."""
    try:
        return ModelConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{source}: {where + ': ' if where else ''}{reason}.") from error


def load_pair(config: ModelConfig, device_map: str | dict[str, str] | None = "cpu", **kwargs: Any) -> EaModel:
    """Target and head. device_map, kwargs: for the Hugging Face loader."""
    return EaModel.from_pretrained(
        config.target_path,
        config.head_path,
        **config.tree.model_dump(),
        dtype=config.dtype,
        device_map=device_map,
        cpu_pack=config.cpu_pack and device_map == "cpu",
        **kwargs,
    )


class Conversations:
    """Messages → prompt ids under a config's template, system message and thinking switch."""

    def __init__(self, ea: EaModel, config: ModelConfig) -> None:
        self._ea = ea
        self._system = [{"role": "system", "content": config.system}] if config.system else []
        self._template = chat_template(config.template)
        if config.thinking is not None:
            own = self._template or ea.tokenizer.chat_template or ""
            self._template = f"{{%- set enable_thinking = {str(config.thinking).lower()} %}}{own}"

    def ids(self, messages: list[dict[str, str]]) -> torch.Tensor:
        """Ids [1, L] of the conversation, ready for the assistant's turn. Raises ConfigError if it can't be shown."""
        return torch.tensor([self._ea.chat_ids([*self._system, *messages], chat_template=self._template)])
