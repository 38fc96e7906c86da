"""What is installed, what it runs on, and what is supported: the facts behind `eagle-mars info`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_args

import torch

from eagle_mars import __version__
from eagle_mars.config import Branch, Margin
from eagle_mars.embedded import (
    INSTALL_COMMAND,
    TARGET_NAME,
    cache_home,
    embedded_available,
    embedded_head_path,
    is_converted,
)
from eagle_mars.verify.rules import REGISTRY

_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "triton", "fschat")


def collect() -> dict[str, Any]:
    """Facts as plain values, ready for JSON."""
    return {
        "eagle_mars": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu ({cpu_model()})",
        "threads": torch.get_num_threads(),
        "embedded_target": _embedded_target(),
        "embedded_head": str(embedded_head_path()) if embedded_head_path().is_dir() else "missing",
        "targets": "causal LMs of transformers with full attention (sdpa or eager): Llama, Qwen2, Qwen3, Mistral, "
        "Mixtral, Qwen3-MoE, Gemma",
        "heads": "EAGLE-1, EAGLE-2 and EAGLE-3 checkpoints",
        "rules": list(REGISTRY),
        "margins": list(get_args(Margin)),
        "branches": list(get_args(Branch)),
    }


def _embedded_target() -> str:
    converted = cache_home() / TARGET_NAME
    if is_converted(converted):
        return str(converted)
    return "installed, converted on first use" if embedded_available() else f"not installed; {INSTALL_COMMAND}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_model() -> str:
    """The processor's name, as Linux tells it; else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()
