"""Two tensor-parallel ranks decide alike: same tokens as one, strict and relaxed. And what vLLM itself is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engines.e2e.conftest import ROOT, environment, pair_engine, run_engine
from tests.tiny_pair import save_tokenizer

THETAS = (1.0, 0.9, 0.6)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that two ranks can share; vLLM's attention on a CPU wants heads of 64."""
    path = tmp_path_factory.mktemp("tiny")
    vocabulary = save_tokenizer(path)
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=vocabulary, num_key_value_heads=2, head_dim=64, **shape)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def by_ranks(tiny: Path) -> dict[int, dict]:
    torch.manual_seed(1)
    prompts = [torch.randint(20, 90, (12,)).tolist() * 2 for _ in range(4)]
    cases = {str(theta): [{"prompt": p, "options": {"mars_theta": theta}} for p in prompts] for theta in THETAS}
    results = {}
    for ranks in (1, 2):
        engine = {
            "model": str(tiny),
            "dtype": "float32",
            "max_model_len": 256,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 100 << 20,
            "tensor_parallel_size": ranks,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
            "additional_config": {"eagle_mars": {}},
        }
        job = {"engine": engine, "max_tokens": 40, "cases": cases}
        results[ranks] = run_engine(f"tp{ranks}", job, VLLM_CPU_OMP_THREADS_BIND="nobind")
    return results


@pytest.mark.parametrize("theta", [str(theta) for theta in THETAS])
def test_two_ranks_emit_what_one_emits(by_ranks: dict[int, dict], theta: str) -> None:
    one, two = by_ranks[1][theta], by_ranks[2][theta]
    assert two["tokens"] == one["tokens"]
    assert (two["steps"], two["accepted"]) == (one["steps"], one["accepted"])


def test_thetas_differ_on_the_tiny_pair(by_ranks: dict[int, dict]) -> None:
    assert by_ranks[1]["0.6"]["tokens"] != by_ranks[1]["1.0"]["tokens"]
    assert by_ranks[1]["0.6"]["relaxed"] > by_ranks[1]["1.0"]["relaxed"] == 0


def test_vllm_refuses_to_start_with_what_mars_refuses() -> None:
    engine = pair_engine()
    speculation = {**engine["speculative_config"], "rejection_sample_method": "block"}
    attempts = [
        {**engine, "additional_config": {"eagle_mars": {"theta": 1.5}}},
        {**engine, "additional_config": {"eagle_mars": {}}, "speculative_config": speculation},
    ]
    code = (
        "import vllm\n"
        f"for arguments in {attempts!r}:\n"
        "    try:\n"
        "        vllm.LLM(**arguments)\n"
        "    except ValueError as error:\n"
        "        print('REFUSED', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True, check=True
    )
    refusals = [line for line in done.stdout.splitlines() if line.startswith("REFUSED")]
    assert len(refusals) == 2, done.stdout[-2000:]
    assert "theta=1.5 is not usable" in refusals[0]
    assert "'standard', not 'block'" in refusals[1]
