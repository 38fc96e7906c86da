"""A language model as the drafter: lossless with any of them, and perfect when it is the target itself."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_mars import DraftConfig, EaModel, SamplingConfig, VerifyConfig
from eagle_mars.config import Branch
from eagle_mars.draft.draft_model import DraftModel, holds_language_model
from eagle_mars.draft.drafter import Drafter
from eagle_mars.engine import Engine
from eagle_mars.errors import CheckpointError, UnsupportedTargetError
from eagle_mars.target import TargetModel
from tests.test_engine import EXACT, SMALL, random_prompt, random_tree, run, sampled_law_pvalue, tokens_of
from tests.tiny import tiny_model
from tests.tiny_pair import save_tokenizer

LOW = {**SMALL, "num_hidden_layers": 2}  # without features a target needs no depth
SMALLER = {"num_hidden_layers": 2, "hidden_size": 16}


def engine_with_a_copy(family: str = "Llama") -> Engine:
    """The draft model is the target with noise on its weights: often right, never the same."""
    model, drafter = tiny_model(family, **LOW), tiny_model(family, **LOW)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    return Engine(TargetModel(model, None), DraftModel(drafter, 16))


def engine_with_another(**overrides) -> Engine:
    """The draft model is of another family and another size."""
    drafter = tiny_model("Qwen2", seed=9, **{**SMALL, **SMALLER, **overrides})
    return Engine(TargetModel(tiny_model("Llama", **LOW), None), DraftModel(drafter, 16))


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma"])
def test_exact_greedy_equals_generate(family: str) -> None:
    engine = engine_with_a_copy(family)
    generator = random.Random(family)
    accepted = 0
    for length in (1, 2, 600, *(generator.randrange(1, 60) for _ in range(5))):
        prompt, new = random_prompt(generator, length), generator.randrange(1, 40)
        shape = DraftConfig.chain(5) if length % 2 else random_tree(generator)
        steps = run(engine, prompt, max_new_tokens=new, draft=shape, verify=EXACT)
        expected = engine.target.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=new)
        assert tokens_of(steps) == expected[0, length:].tolist()
        accepted += sum(step.accepted or 0 for step in steps)
    assert accepted > 20  # otherwise nothing but single tokens was tested


def test_sampled_exact_has_the_targets_distribution() -> None:
    # Fixed seeds, so this can't flicker; see test_engine for the bound.
    assert (
        sampled_law_pvalue(engine_with_a_copy(), [3, 7, 5, 4], DraftConfig(total_token=6, depth=1, top_k=2), draws=400)
        > 1e-3
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_target_that_drafts_for_itself_accepts_everything(attention: str) -> None:
    model = tiny_model("Llama", **LOW)
    model.set_attn_implementation(attention)
    engine = Engine(TargetModel(model, None), DraftModel(model, 16))
    steps = run(engine, [3, 9, 4, 7], max_new_tokens=31, draft=DraftConfig.chain(4), verify=EXACT)
    assert [step.accepted for step in steps] == [None, *[4] * 6]  # 1 + 6 x 5 tokens


def test_what_is_fed_in_pieces_equals_what_is_fed_at_once() -> None:
    """Commit and rollback: draft rows leave no trace in the rows of the next cycle."""
    proposer = engine_with_a_copy().head
    assert proposer is not None
    tokens = torch.randint(3, 16, (1, 90), generator=torch.Generator().manual_seed(2))
    config = DraftConfig(total_token=12, depth=3, top_k=3)
    whole = Drafter(proposer, config)
    whole.extend(None, tokens)
    pieces = Drafter(proposer, config)
    for piece in tokens.split(7, dim=1):
        pieces.extend(None, piece)
        pieces.grow(piece[:, -1])
    one, other = whole.grow(tokens[:, -1]), pieces.grow(tokens[:, -1])
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.parents, other.parents)
    # fp32 products over another number of rows may round differently.
    torch.testing.assert_close(one.draft_logprob, other.draft_logprob, atol=1e-4, rtol=1e-4)


def test_the_context_can_be_filled_beyond_the_draft_models() -> None:
    engine = engine_with_another(max_position_embeddings=24)
    prompt = random_prompt(random.Random(3), 20)
    steps = run(engine, prompt, max_new_tokens=30, draft=DraftConfig(total_token=10, depth=3, top_k=3), verify=EXACT)
    expected = engine.target.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=30)
    assert tokens_of(steps) == expected[0, 20:].tolist()


@pytest.mark.parametrize("width", [12, 20])
def test_padded_vocabularies_may_differ(width: int) -> None:
    """Ids beyond the smaller vocabulary are padding: never drafted, and harmless when the target emits one."""
    engine = engine_with_another(vocab_size=width)
    assert engine.head is not None
    assert engine.head.draft_vocab_size == min(width, 16)
    prompt = random_prompt(random.Random(4), 10)
    steps = run(engine, prompt, max_new_tokens=30, draft=DraftConfig(total_token=10, depth=3, top_k=3), verify=EXACT)
    expected = engine.target.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=30)
    assert tokens_of(steps) == expected[0, 10:].tolist()


@pytest.mark.parametrize("branch", ["exact-first", "longest"])
def test_rules_relax_its_drafts_too(branch: Branch) -> None:
    engine = engine_with_a_copy()
    relaxed = 0
    for seed in range(6):
        sampling = SamplingConfig(temperature=float(seed % 2), seed=seed)
        steps = run(
            engine,
            random_prompt(random.Random(seed), 9),
            max_new_tokens=24,
            draft=DraftConfig(total_token=12, depth=3, top_k=4),
            verify=VerifyConfig(theta=0.5, branch=branch),
            sampling=sampling,
        )
        relaxed += [kind for step in steps for kind in step.provenance].count("relaxed")
    assert relaxed


def test_an_unfit_draft_model_is_refused() -> None:
    with pytest.raises(UnsupportedTargetError, match="sliding window of 16"):
        DraftModel(tiny_model("Mistral", sliding_window=16), 96)


# --- from_pretrained ---


@pytest.fixture
def draft_directory(tmp_path: Path) -> Path:
    vocab = save_tokenizer(tmp_path / "draft")
    tiny_model("Llama", seed=4, vocab_size=vocab, **SMALLER).save_pretrained(tmp_path / "draft")
    return tmp_path / "draft"


def test_it_is_found_by_its_tensors(tiny_pair, draft_directory: Path, caplog) -> None:
    target, head = tiny_pair
    model = EaModel.from_pretrained(target, str(draft_directory), total_token=6, depth=4, top_k=1)
    assert isinstance(model.ea_layer, DraftModel)
    assert not caplog.records  # use_eagle3, a default, says nothing about a draft model
    baseline = model.generate("hello", max_new_tokens=24, method="autoregressive")
    assert model.generate("hello", max_new_tokens=24, verify=EXACT).token_ids == baseline.token_ids
    itself = EaModel.from_pretrained(target, target, total_token=6, depth=4, top_k=1)
    assert itself.generate("hello", max_new_tokens=25, verify=EXACT).accepted_lengths == (5,) * 4
    assert not holds_language_model(Path(head))


def test_shards_and_heads_with_a_prefix_are_told_apart(draft_directory: Path, tiny_pair, tmp_path: Path) -> None:
    tensors = load_file(Path(tiny_pair[1]) / "model.safetensors")
    prefixed = tmp_path / "prefixed"
    prefixed.mkdir()
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, prefixed / "model.safetensors")
    (prefixed / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    assert not holds_language_model(prefixed)
    tiny_model("Llama", **SMALLER).save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    assert holds_language_model(tmp_path / "shards")


def test_another_tokenizer_is_refused_in_one_sentence(tiny_pair, draft_directory: Path) -> None:
    file = draft_directory / "tokenizer.json"
    raw = json.loads(file.read_text())
    raw["model"]["vocab"]["A"], raw["model"]["vocab"]["B"] = raw["model"]["vocab"]["B"], raw["model"]["vocab"]["A"]
    file.write_text(json.dumps(raw))
    with pytest.raises(
        CheckpointError, match=r"another vocabulary than the target .*use a model of the same tokenizer"
    ):
        EaModel.from_pretrained(tiny_pair[0], str(draft_directory))


def test_a_damaged_draft_model_is_named(tiny_pair, draft_directory: Path) -> None:
    tensors = load_file(draft_directory / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, draft_directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"the draft model at .* is incomplete"):
        EaModel.from_pretrained(tiny_pair[0], str(draft_directory))
