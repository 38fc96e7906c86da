"""Loading heads: layouts of other trainers, numbers read off the shapes, and every way in which files can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from eagle_mars.config import DraftConfig
from eagle_mars.draft import files
from eagle_mars.draft.checkpoint import load_head
from eagle_mars.draft.drafter import Drafter
from eagle_mars.draft.eagle1 import Eagle1Head
from eagle_mars.draft.eagle3 import Eagle3Head
from eagle_mars.draft.head import Head
from eagle_mars.errors import CheckpointError
from eagle_mars.tree import DraftTree
from tests.draft.heads import golden_head, golden_target

HIDDEN, VOCAB, LAYERS = 64, 512, 8  # of the recorded llama target


class Checkpoint:
    """A recorded head on disk that a test may spoil, and the target it is loaded for."""

    def __init__(self, golden: Path, directory: Path, name: str = "llama-e3-d128") -> None:
        self.directory = directory / "head"
        shutil.copytree(golden / "heads" / name, self.directory)
        self.config, self.embedding, self.lm_head = golden_target(golden, "llama")
        self.raw = json.loads((self.directory / "config.json").read_text())
        weights = self.directory / "model.safetensors"
        self.tensors: dict[str, Tensor] = (
            load_file(weights)
            if weights.exists()
            else torch.load(self.directory / "pytorch_model.bin", weights_only=True)
        )
        for file in ("model.safetensors", "pytorch_model.bin"):
            (self.directory / file).unlink(missing_ok=True)

    def write(self, **changes: Any) -> None:
        (self.directory / "config.json").write_text(json.dumps({**self.raw, **changes}))
        save_file({k: v.clone() for k, v in self.tensors.items()}, self.directory / "model.safetensors")

    def load(self, dtype: torch.dtype = torch.float32, **target: int) -> Head:
        sizes = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": LAYERS, **target}
        return load_head(
            self.directory, SimpleNamespace(**sizes), embed_tokens=self.embedding, lm_head=self.lm_head, dtype=dtype
        )

    def message(self, **target: int) -> str:
        with pytest.raises(CheckpointError) as caught:
            self.load(**target)
        return str(caught.value)


@pytest.fixture
def eagle3(golden: Path, tmp_path: Path) -> Checkpoint:
    return Checkpoint(golden, tmp_path)


@pytest.fixture
def eagle1(golden: Path, tmp_path: Path) -> Checkpoint:
    return Checkpoint(golden, tmp_path, "llama-e1")


def tree_of(head: Head) -> DraftTree:
    generator = torch.Generator().manual_seed(3)
    drafter = Drafter(head, DraftConfig(total_token=16, depth=3, top_k=5))
    tokens = torch.randint(0, VOCAB, (1, 9), generator=generator)
    drafter.extend(torch.randn(1, 9, head.config.feature_size, generator=generator), tokens)
    return drafter.grow(tokens[:, -1])


def assert_same_head(one: Head, other: Head) -> None:
    one_tree, other_tree = tree_of(one), tree_of(other)
    assert torch.equal(one_tree.tokens, other_tree.tokens)
    assert torch.equal(one_tree.draft_logprob, other_tree.draft_logprob)


@pytest.mark.parametrize(
    ("target", "name", "family", "fc_bias"),
    [
        ("llama", "llama-e3-d128", Eagle3Head, False),
        ("llama", "llama-e3-full", Eagle3Head, False),
        ("llama31", "llama31-e3-d128", Eagle3Head, False),
        ("qwen3", "qwen3-e3-d128", Eagle3Head, False),
        ("llama", "llama-e1", Eagle1Head, True),
        ("qwen2", "qwen2-e1", Eagle1Head, False),
    ],
)
def test_family_and_numbers_come_from_the_files(
    golden: Path, target: str, name: str, family: type[Head], fc_bias: bool
) -> None:
    head = golden_head(golden, target, name)
    config = head.config
    assert type(head) is family
    assert config.fc_bias == fc_bias
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size) == (4, 2, 16, 128)
    assert config.draft_vocab_size == (128 if "d128" in name else VOCAB)
    assert config.capture_layers == ((2, 4, 5) if family is Eagle3Head else ())
    # llama31's config.json has no rope_theta: 10000, though its target uses 500000.
    assert config.rope_theta == (1e6 if "qwen" in name else 1e4)
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in head.parameters())


def specforge(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def prefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}" if name not in ("d2t", "t2d") else name: tensor for name, tensor in tensors.items()}


def without_t2d(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != "t2d"}


def with_frequencies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "midlayer.self_attn.rotary_emb.inv_freq": torch.ones(8)}


@pytest.mark.parametrize(
    "variant",
    [specforge, prefixed, without_t2d, with_frequencies, lambda tensors: prefixed(specforge(tensors))],
    ids=["specforge", "prefixed", "without-t2d", "with-frequencies", "both"],
)
def test_layouts_of_other_trainers(
    golden: Path, eagle3: Checkpoint, variant: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    eagle3.tensors = variant(eagle3.tensors)
    eagle3.write()
    head = eagle3.load()
    assert_same_head(head, golden_head(golden, "llama", "llama-e3-d128"))
    assert isinstance(head, Eagle3Head)
    assert int(head.t2d.sum()) == 128


def test_prefixed_eagle1(golden: Path, eagle1: Checkpoint) -> None:
    eagle1.tensors = prefixed(eagle1.tensors)
    eagle1.write()
    assert_same_head(eagle1.load(), golden_head(golden, "llama", "llama-e1"))


def test_a_second_layer_of_eagle1_has_a_norm_in_front(eagle1: Checkpoint) -> None:
    second = {k.replace("layers.0", "layers.1"): v for k, v in eagle1.tensors.items() if k.startswith("layers.0")}
    eagle1.tensors |= second
    eagle1.write()
    assert "missing layers.1.input_layernorm.weight [64]" in eagle1.message()
    eagle1.tensors["layers.1.input_layernorm.weight"] = torch.full((HIDDEN,), 0.5)
    eagle1.write()
    head = eagle1.load()
    assert (head.num_layers, len(head.allocate(1, 8))) == (2, 2)
    assert tree_of(head).nodes == 16


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "before-torch-1.6"])
def test_bin_files(golden: Path, eagle3: Checkpoint, legacy: bool) -> None:
    torch.save(eagle3.tensors, eagle3.directory / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    assert_same_head(eagle3.load(), golden_head(golden, "llama", "llama-e3-d128"))


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_sharded_files(golden: Path, eagle3: Checkpoint, suffix: str) -> None:
    names = sorted(eagle3.tensors)
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"{stem}-{number:05}-of-00002.{suffix}"
        save = save_file if suffix == "safetensors" else torch.save
        save({name: eagle3.tensors[name] for name in part}, eagle3.directory / file)
        weight_map |= dict.fromkeys(part, file)
    (eagle3.directory / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same_head(eagle3.load(), golden_head(golden, "llama", "llama-e3-d128"))


def test_safetensors_are_preferred(golden: Path, eagle3: Checkpoint) -> None:
    eagle3.write()
    (eagle3.directory / "pytorch_model.bin").write_bytes(b"never read")
    assert_same_head(eagle3.load(), golden_head(golden, "llama", "llama-e3-d128"))


def test_attention_biases_are_inferred(eagle1: Checkpoint) -> None:
    for name in ("q", "k", "v"):
        weight = eagle1.tensors[f"layers.0.self_attn.{name}_proj.weight"]
        eagle1.tensors[f"layers.0.self_attn.{name}_proj.bias"] = torch.randn(weight.shape[0])
    eagle1.write()
    head = eagle1.load()
    assert head.config.qkv_bias
    assert "layers.0.self_attn.q_proj.bias" in head.state_dict()


def test_head_dim_is_what_the_projections_have(eagle3: Checkpoint) -> None:
    """Heads of Qwen3-4B kind: more attention width than hidden size, and a head_dim that says so (EAGLE issue 223)."""
    for name, rows in (("q", 128), ("k", 64), ("v", 64)):
        eagle3.tensors[f"midlayer.self_attn.{name}_proj.weight"] = torch.randn(rows, 2 * HIDDEN) / 10
    eagle3.tensors["midlayer.self_attn.o_proj.weight"] = torch.randn(HIDDEN, 128) / 10
    eagle3.write(head_dim=32)
    config = eagle3.load().config
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 32)


def test_missing_draft_vocab_size_is_inferred(eagle3: Checkpoint) -> None:
    del eagle3.raw["draft_vocab_size"]
    eagle3.write()
    assert eagle3.load().config.draft_vocab_size == 128


def test_mapping_of_a_full_vocabulary_is_dropped(golden: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint(golden, tmp_path, "llama-e3-full")
    checkpoint.tensors |= {"d2t": torch.ones(VOCAB, dtype=torch.long), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    checkpoint.write()
    assert_same_head(checkpoint.load(), golden_head(golden, "llama", "llama-e3-full"))


def test_embedding_is_the_targets_unless_the_checkpoint_brings_one(eagle3: Checkpoint) -> None:
    eagle3.write()
    head = eagle3.load()
    tokens = torch.arange(VOCAB).unsqueeze(0)
    assert head.embed_tokens is None
    assert "embed_tokens.weight" not in head.state_dict()
    assert torch.equal(head.embed(tokens)[0], eagle3.embedding.weight)

    own = torch.randn(VOCAB, HIDDEN)
    eagle3.tensors["embed_tokens.weight"] = own
    eagle3.write()
    assert torch.equal(eagle3.load().embed(tokens)[0], own)


def test_head_of_another_width_with_its_own_embedding(golden: Path, eagle3: Checkpoint) -> None:
    """`target_hidden_size`: fc takes the target's width, everything else the head's."""
    eagle3.tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    eagle3.tensors["fc.weight"] = torch.randn(HIDDEN, 3 * 96) / 10
    eagle3.write(target_hidden_size=96)
    head = eagle3.load(hidden_size=96)
    assert (head.config.hidden_size, head.config.feature_size) == (HIDDEN, 288)
    assert tree_of(head).nodes == 16


def test_dtype_is_the_callers_and_the_mapping_stays_int64(eagle3: Checkpoint) -> None:
    eagle3.write()
    head = eagle3.load(torch.bfloat16)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}
    assert isinstance(head, Eagle3Head)
    assert (head.d2t.dtype, head.t2d.dtype) == (torch.int64, torch.bool)


@pytest.mark.parametrize(
    ("changes", "layers", "expected"),
    [
        ({}, 32, (2, 16, 29)),
        ({}, 7, (2, 3, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, 32, (2, 16, 29)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, 32, (2, 16, 29)),
        ({"eagle_aux_hidden_state_layer_ids": [5, 1, 3]}, 6, (1, 3, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, 4, (0, 1, 3)),
    ],
)
def test_feature_layers(eagle3: Checkpoint, changes: dict, layers: int, expected: tuple[int, ...]) -> None:
    eagle3.write(**changes)
    assert eagle3.load(num_hidden_layers=layers).config.capture_layers == expected


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_theta": 123.0}, 123.0, None),
        ({"rope_theta": None}, 10000.0, None),
        ({"rope_parameters": {"rope_theta": 77.0, "rope_type": "default"}}, 77.0, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 10000.0, {"type": "linear", "factor": 2.0}),
        (
            {"rope_parameters": {"rope_theta": 5.0, "rope_type": "dynamic", "factor": 3.0}},
            5.0,
            {"type": "dynamic", "factor": 3.0},
        ),
    ],
)
def test_rope_options(eagle3: Checkpoint, changes: dict, theta: float, scaling: dict | None) -> None:
    eagle3.write(**changes)
    config = eagle3.load().config
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


def test_wrong_hidden_size_is_told_with_both_numbers(eagle3: Checkpoint) -> None:
    eagle3.write()
    message = eagle3.message(hidden_size=128)
    assert "expects features 3x64=192 wide, the target gives 3x128=384" in message
    assert "hidden size is 64, the target's is 128" in message


def test_wrong_hidden_size_of_eagle1(eagle1: Checkpoint) -> None:
    eagle1.write()
    assert "hidden size is 64, the target's is 128" in eagle1.message(hidden_size=128)


@pytest.mark.parametrize("fixture", ["eagle1", "eagle3"])
def test_wrong_vocabulary_is_told_with_both_numbers(fixture: str, request: pytest.FixtureRequest) -> None:
    checkpoint: Checkpoint = request.getfixturevalue(fixture)
    checkpoint.write()
    assert "vocabulary has 512 tokens, the target's has 300" in checkpoint.message(vocab_size=300)


@pytest.mark.parametrize(
    ("changes", "layers", "numbers"),
    [
        ({}, 6, r"only N=6 layers (2, 3, 3)"),
        ({}, 4, r"only N=4 layers (2, 2, 1)"),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]},
            8,
            "[2, 16, 29], distinct and below the target's layer count of 8",
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 3]}}, 8, "layers [2, 2, 4], distinct"),
    ],
)
def test_wrong_layer_count_is_told_with_both_numbers(
    eagle3: Checkpoint, changes: dict, layers: int, numbers: str
) -> None:
    eagle3.write(**changes)
    assert numbers in eagle3.message(num_hidden_layers=layers)


def test_one_error_lists_every_tensor_that_is_wrong(eagle3: Checkpoint) -> None:
    del eagle3.tensors["norm.weight"], eagle3.tensors["midlayer.hidden_norm.weight"]
    eagle3.tensors["midlayer.self_attn.q_norm.weight"] = torch.ones(16)
    eagle3.tensors["extra"] = torch.ones(2, 3)
    eagle3.tensors["midlayer.mlp.down_proj.weight"] = torch.ones(64, 100)
    eagle3.tensors["midlayer.input_layernorm.weight"] = torch.ones(7)
    eagle3.write()
    message = eagle3.message()
    assert "missing midlayer.hidden_norm.weight [64], norm.weight [64]" in message
    assert "unexpected extra [2, 3], midlayer.self_attn.q_norm.weight [16]" in message
    assert "midlayer.mlp.down_proj.weight is [64, 100] instead of [64, 128]" in message
    assert "midlayer.input_layernorm.weight is [7] instead of [64]" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["fc.weight", "lm_head.weight", "midlayer.self_attn.q_proj.weight", "d2t"])
def test_a_missing_tensor_is_named_even_if_the_shape_comes_from_it(eagle3: Checkpoint, name: str) -> None:
    expected = list(eagle3.tensors.pop(name).shape)
    eagle3.write()
    assert f"missing {name} {expected}" in eagle3.message()


def test_a_target_model_is_no_head(golden: Path, eagle3: Checkpoint) -> None:
    eagle3.directory = golden / "models" / "llama"
    assert "unexpected" in eagle3.message()


def spoil_duplicate(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def spoil_range(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"][-1] = VOCAB


def spoil_membership(tensors: dict[str, Tensor]) -> None:
    tensors["t2d"] = ~tensors["t2d"]


def spoil_dtype(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"].int()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (spoil_duplicate, "several draft tokens to one target token"),
        (spoil_range, "to 639, outside the vocabulary of 512"),
        (spoil_membership, "t2d and d2t disagree"),
        (spoil_dtype, "d2t must be int64 and t2d bool, not torch.int32"),
    ],
)
def test_a_bad_vocabulary_mapping_is_refused(
    eagle3: Checkpoint, spoil: Callable[[dict[str, Tensor]], None], reason: str
) -> None:
    spoil(eagle3.tensors)
    eagle3.write()
    assert reason in eagle3.message()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_attention_heads": 3}, "q_proj with 64 rows and k_proj with 32 rows don't make 3 attention heads"),
        ({"num_key_value_heads": 4}, "4 attention heads and 4 key/value heads"),
        ({"hidden_act": "relu7"}, 'hidden_act "relu7"'),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, 'rope_scaling of type "longrope"'),
        ({"rope_scaling": {"type": "linear"}}, "in config.json is incomplete: factor."),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"norm_before_residual": True}, "norm_before_residual"),
    ],
)
def test_a_config_that_cannot_be_right_is_refused(eagle3: Checkpoint, changes: dict, reason: str) -> None:
    eagle3.write(**changes)
    assert reason in eagle3.message()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def cut_to_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


@pytest.mark.parametrize("damage", [truncate, cut_to_header, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_damaged_file_is_named(eagle3: Checkpoint, file: str, damage: Callable[[Path], None]) -> None:
    if file == "pytorch_model.bin":
        torch.save(eagle3.tensors, eagle3.directory / file)
    else:
        eagle3.write()
    damage(eagle3.directory / file)
    message = eagle3.message()
    assert f"{file} can't be read" in message
    assert "\n" not in message


def test_a_bin_file_cannot_run_code(eagle3: Checkpoint) -> None:
    torch.save({"fc.weight": nn.Linear(2, 2)}, eagle3.directory / "pytorch_model.bin")
    assert "pytorch_model.bin can't be read" in eagle3.message()


def test_a_bin_file_must_be_a_state_dict(eagle3: Checkpoint) -> None:
    torch.save([torch.ones(2)], eagle3.directory / "pytorch_model.bin")
    assert "must hold a dictionary of tensors" in eagle3.message()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{not json", "is not readable JSON"),
        ("[1]", "must hold a JSON object, not a list"),
        (None, "has no config.json"),
    ],
)
def test_a_bad_config_file_is_named(eagle3: Checkpoint, content: str | None, reason: str) -> None:
    eagle3.write()
    path = eagle3.directory / "config.json"
    path.unlink() if content is None else path.write_text(content)
    assert reason in eagle3.message()


def test_missing_weights_are_named(eagle3: Checkpoint) -> None:
    assert "holds no weights; expected model.safetensors or pytorch_model.bin" in eagle3.message()


def test_a_missing_shard_is_named(eagle3: Checkpoint) -> None:
    index = {"weight_map": {"fc.weight": "model-00001-of-00002.safetensors"}}
    (eagle3.directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors can't be read" in eagle3.message()


def test_paths_that_lead_nowhere(eagle3: Checkpoint) -> None:
    eagle3.write()
    eagle3.directory = eagle3.directory / "config.json"
    assert "is a file; give the directory" in eagle3.message()
    eagle3.directory = Path("/no/such/directory")
    assert "There is no directory /no/such/directory" in eagle3.message()


def test_a_hub_head_is_fetched_safetensors_first(eagle3: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot(repository: str, allow_patterns: list[str]) -> str:
        asked.append((repository, allow_patterns))
        return str(eagle3.directory)

    monkeypatch.setattr(files, "snapshot_download", snapshot)
    eagle3.write()
    assert files.find_checkpoint("owner/name") == eagle3.directory
    assert asked == [("owner/name", ["config.json", "*.index.json", "*.safetensors"])]


def test_a_hub_head_without_network_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(repository: str, allow_patterns: list[str]) -> str:
        raise LocalEntryNotFoundError("cannot reach the hub\nand a second line")

    monkeypatch.setattr(files, "snapshot_download", offline)
    with pytest.raises(CheckpointError) as caught:
        files.find_checkpoint("owner/name")
    message = str(caught.value)
    assert "owner/name is no local directory and could not be fetched" in message
    assert "cannot reach the hub" in message
    assert "\n" not in message
