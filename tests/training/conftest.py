"""A toy target with a chat template, and shards that it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from eagle_mars.training.generate import Generator, generate_shards
from eagle_mars.training.prompts import Question, Request
from tests.tiny import VOCAB, tiny_model

EOS = 1
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}<e>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"


class ToyRequests:
    """Every third question is given; temperatures alternate; every other request asks twice."""

    def __getitem__(self, index: int) -> Request:
        first = Question(f"abc{index}", is_open=False) if index % 3 == 0 else Question("de" * (index % 2))
        second = [Question("f", is_open=index % 4 > 0)] * (index % 2)
        return Request((first, *second), (0.0, 0.7, 1.0)[index % 3], 6 + index % 5)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; "<s>" and "<e>" are special, "<e>" ends a turn."""
    characters = [chr(c) for c in range(33, 33 + VOCAB - 3)]
    vocab = {token: i for i, token in enumerate(["<u>", "<e>", "<s>", *characters])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<u>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<e>", bos_token="<s>", unk_token="<u>", chat_template=TEMPLATE
    )


def toy_target() -> PreTrainedModel:
    model = tiny_model("Llama")
    model.generation_config.eos_token_id = EOS
    return model


@pytest.fixture
def target() -> PreTrainedModel:
    return toy_target()


@pytest.fixture
def make_generator(target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast):
    """Generators over the same target, as a fresh process would make them."""
    return lambda: Generator(target, tokenizer, ToyRequests(), n_rows=4, max_length=128)


@pytest.fixture(scope="session")
def shards(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of six toy sequences; tests only read them."""
    directory = tmp_path_factory.mktemp("shards")
    generator = Generator(toy_target(), tokenizer, ToyRequests(), n_rows=4, max_length=128)
    for _ in generate_shards(generator, directory, n_shards=3, per_shard=6):
        pass
    return directory
