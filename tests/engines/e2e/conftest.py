"""Engines run in processes of their own; their answers are kept in runs/engines for the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_mars.embedded import embedded_head_path, embedded_target_path

ROOT = Path(__file__).parents[3]
QUESTIONS = (
    "Give me three tips for learning to play the guitar.",
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper.",
)
OPTIONS = {
    "strict": {"mars_theta": 1.0},
    "default": {},
    "theta 0.8": {"mars_theta": 0.8},
    "gap 0.5": {"mars_gap": 0.5},
    "one per step": {"mars_theta": 0.5, "mars_max_relaxed": 1},
}
DEFAULT_THETA = 0.9
MAX_TOKENS = 48


def environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**inherited, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", **more}


def run_engine(name: str, job: dict, interpreted: bool = False, **env: str) -> dict:
    """The results of one engine process; `interpreted` is model runner V2, in Triton's interpreter."""
    folder = ROOT / "runs" / "engines"
    folder.mkdir(parents=True, exist_ok=True)
    job_file, out_file, log_file = (folder / f"{name}.{suffix}" for suffix in ("job.json", "json", "log"))
    job_file.write_text(json.dumps(job), "utf-8")
    module = ["tests.engines.e2e.generate", str(job_file), str(out_file)]
    command = [sys.executable, "-m", *(["tests.engines.e2e.interpreted"] if interpreted else []), *module]
    with log_file.open("w") as log:
        done = subprocess.run(command, cwd=ROOT, env=environment(**env), stdout=log, stderr=log, check=False)
    assert done.returncode == 0, log_file.read_text("utf-8")[-3000:]
    return json.loads(out_file.read_text("utf-8"))


def pair_engine(**more: object) -> dict:
    """Arguments of `vllm.LLM` for the embedded pair, a chain of four drafts."""
    speculation = {"method": "eagle3", "model": str(embedded_head_path()), "num_speculative_tokens": 4}
    return {
        "model": str(embedded_target_path()),
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 9,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 200 << 20,
        "speculative_config": speculation,
        **more,
    }


def cases(prompts: list[list[int]], names: list[str]) -> dict[str, list[dict]]:
    """One case per name of OPTIONS, and their first three together, prompt by prompt, as `mixed`."""
    single = {name: [{"prompt": prompt, "options": OPTIONS[name]} for prompt in prompts] for name in names}
    mixed = [{"prompt": prompt, "options": OPTIONS[name]} for prompt in prompts for name in names[:3]]
    return {**single, "mixed": mixed}


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_target_path())
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False) for turn in asked]


@pytest.fixture(scope="session")
def plain(prompts: list[list[int]]) -> dict:
    """The engine without MARS."""
    requests = {"plain": [{"prompt": prompt, "options": {}} for prompt in prompts]}
    return run_engine("v1-plain", {"engine": pair_engine(), "max_tokens": MAX_TOKENS, "cases": requests})["plain"]


@pytest.fixture(scope="session")
def relaxing() -> Callable[[str, dict, int, bool], dict]:
    """Runs the embedded pair with MARS on."""

    def run(name: str, requests: dict, max_tokens: int, interpreted: bool) -> dict:
        engine = pair_engine(additional_config={"eagle_mars": {"theta": DEFAULT_THETA}})
        return run_engine(name, {"engine": engine, "max_tokens": max_tokens, "cases": requests}, interpreted)

    return run


@pytest.fixture(scope="session")
def v1(prompts: list[list[int]], relaxing: Callable[..., dict]) -> dict:
    return relaxing("v1", cases(prompts, list(OPTIONS)), MAX_TOKENS, interpreted=False)


@pytest.fixture(scope="session")
def v2(prompts: list[list[int]], relaxing: Callable[..., dict]) -> dict:
    return relaxing("v2", cases(prompts, list(OPTIONS)[:3]), MAX_TOKENS // 2, interpreted=True)
