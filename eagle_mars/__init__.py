"""EAGLE draft trees with MARS verification on unmodified Hugging Face models.

Public names are imported on first use, so that `import eagle_mars` stays quick and needs no GPU and no extra.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "DraftConfig": "config",
    "EaModel": "model",
    "EagleMarsError": "errors",
    "GenerationResult": "result",
    "SamplingConfig": "config",
    "VerifyConfig": "config",
    "custom_generate": "hf_generate",
}

__all__ = [
    "DraftConfig",
    "EaModel",
    "EagleMarsError",
    "GenerationResult",
    "SamplingConfig",
    "VerifyConfig",
    "__version__",
    "custom_generate",
]

if TYPE_CHECKING:
    from eagle_mars.config import DraftConfig, SamplingConfig, VerifyConfig
    from eagle_mars.errors import EagleMarsError
    from eagle_mars.hf_generate import custom_generate
    from eagle_mars.model import EaModel
    from eagle_mars.result import GenerationResult


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'eagle_mars' has no attribute {name!r}")
    return getattr(import_module(f"eagle_mars.{_HOME[name]}"), name)
