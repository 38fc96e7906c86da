"""Model configs: each is readable and tells where its head comes from; mistakes are one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastchat.conversation import get_conv_template

from eagle_mars import DraftConfig, EaModel
from eagle_mars.errors import ConfigError
from evaluation.models import CONFIGS, Conversations, ModelConfig, load_pair, read_model_config

NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def test_there_is_a_config_for_every_row_of_the_papers_table() -> None:
    paper = {"vicuna-13b", "llama-3.1-8b", "llama-3.3-70b", "qwen3-8b", "qwen3-32b", "qwen3-235b-a22b"}
    assert {*paper, "smollm2"} <= set(NAMES)
    for name in paper:
        assert read_model_config(name).tree == DraftConfig(total_token=50, depth=6, top_k=10)


@pytest.mark.parametrize("name", NAMES)
def test_every_config_is_read_and_names_the_source_of_its_head(name: str) -> None:
    config = read_model_config(name)
    assert config.head_source
    if config.head is None:
        with pytest.raises(ConfigError, match=r"no draft head is known .* --ea-model-path"):
            _ = config.head_path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("target: a\nhead: b\ndepth: 3\n", "depth: Extra inputs are not permitted"),
        ("head: b\n", "target: Field required"),
        ("target: a\nhead: b\ntree: {total_token: 900, depth: 0, top_k: 2}\n", "tree: total_token=900 is impossible"),
        ("target: [", "can't read the model config"),
        ("", "has to map names to values"),
    ],
)
def test_a_wrong_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_model_config(str(tmp_path / "m.yaml"))
    with pytest.raises(ConfigError, match=r"no model config 'gpt'; use .*smollm2"):
        read_model_config("gpt")


@pytest.fixture(scope="module")
def pair(tiny_pair: tuple[str, str]) -> EaModel:
    tree = DraftConfig(total_token=5, depth=1, top_k=2)
    return load_pair(ModelConfig(target=tiny_pair[0], head=tiny_pair[1], tree=tree))


def shown(pair: EaModel, messages: list[dict[str, str]], **changes) -> str:
    config = ModelConfig(target="t", head="h", **changes)
    return pair.tokenizer.decode(Conversations(pair, config).ids(messages)[0])


DIALOGUE = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "a1"},
    {"role": "user", "content": "q2"},
]


def test_loading_takes_the_tree_of_the_config(pair: EaModel) -> None:
    assert pair.draft == DraftConfig(total_token=5, depth=1, top_k=2)


def test_conversations_follow_the_config(pair: EaModel) -> None:
    assert shown(pair, DIALOGUE) == "<|user|>q1<|end|><|assistant|>a1<|end|><|user|>q2<|end|><|assistant|>"
    assert shown(pair, DIALOGUE[:1], system="S") == "<|system|>S<|end|><|user|>q1<|end|><|assistant|>"


def test_vicuna_is_talked_to_as_fastchat_does(pair: EaModel) -> None:
    theirs = get_conv_template("vicuna_v1.1")
    for role, text in ((0, "q1"), (1, "a1"), (0, "q2"), (1, None)):
        theirs.append_message(theirs.roles[role], text)
    assert shown(pair, DIALOGUE, template="vicuna") == theirs.get_prompt()


@pytest.mark.parametrize(("thinking", "seen"), [(True, "yes"), (False, "no"), (None, "unset")])
def test_the_thinking_switch_reaches_the_template(pair: EaModel, tmp_path: Path, thinking: bool, seen: str) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ 'unset' if enable_thinking is undefined else 'yes' if enable_thinking else 'no' }}")
    assert shown(pair, DIALOGUE, template=str(file), thinking=thinking) == seen
