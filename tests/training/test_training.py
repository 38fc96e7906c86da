"""Training-time test, trainer, export: on toy models, in seconds."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.nn import functional as F

from eagle_mars.config import DraftConfig
from eagle_mars.draft.checkpoint import load_head
from eagle_mars.draft.eagle3 import Eagle3Head
from eagle_mars.errors import ConfigError
from eagle_mars.training import initialise
from eagle_mars.training.dataset import ShardDataset
from eagle_mars.training.evaluate import chain_acceptance, tree_tau
from eagle_mars.training.export import export_head
from eagle_mars.training.loss import soft_cross_entropy
from eagle_mars.training.shards import Source
from eagle_mars.training.trainer import Trainer, TrainingTimeTest, TrainOptions
from eagle_mars.training.unroll import unroll

OPTIONS = TrainOptions(steps=12, single_steps=4, unroll=3, tokens_per_batch=64, warm_up=2, save_every=4, eval_every=100)


@pytest.fixture
def dataset(shards: Path) -> ShardDataset:
    return ShardDataset(shards)


@pytest.fixture
def make_head(target, dataset):
    """(head, scales, vocabulary) as train_head.py makes them."""

    def make() -> tuple[Eagle3Head, torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        start = initialise.starting_point(target, dataset, 48)
        return start.head, start.scales, start.vocabulary

    return make


@pytest.fixture
def make_trainer(target, dataset, make_head, tmp_path):
    def make(name: str, options: TrainOptions = OPTIONS) -> Trainer:
        start = initialise.StartingPoint(*make_head())
        return Trainer(start, target.lm_head, dataset, options, tmp_path / name, Accelerator(cpu=True), dataset)

    return make


def draft_chain(head: Eagle3Head, features, tokens, t: int, n_steps: int) -> list[torch.Tensor]:
    """Outputs of the inference chain after true rows 0 … t, fed with the true next tokens (EAGLE_SPEC 1.5)."""
    cache = head.allocate(1, t + 1 + n_steps)
    x = head(head.fuse(features[None, : t + 1]), tokens[None, : t + 1], torch.arange(t + 1)[None], None, cache, 0)[
        :, -1:
    ]
    outputs = [x[0, 0]]
    for at in range(t + 1, min(t + n_steps, len(tokens))):
        visible = torch.ones(1, 1, 1, at + 1, dtype=torch.bool)
        x = head(x, tokens[None, at : at + 1], torch.tensor([[at]]), visible, cache, at)
        outputs.append(x[0, 0])
    return outputs


@torch.no_grad()
def test_unrolled_steps_are_the_inference_chain(dataset, make_head):
    head, scales, _ = make_head()
    batch = dataset.batch(dataset.entries[:3]).scaled(scales)
    steps = list(unroll(head, batch, 4))
    compared = start = 0
    for length in batch.lengths:
        features, tokens = batch.features[start : start + length], batch.next_token[start : start + length]
        for q, row in enumerate(steps[0].rows.tolist()):
            if start <= row < start + length:
                for step, expected in zip(steps, draft_chain(head, features, tokens, row - start, 4), strict=False):
                    # fp32, two orders of summation over at most 128 keys.
                    torch.testing.assert_close(step.output[q], expected, atol=1e-4, rtol=1e-4)
                    compared += 1
        start += length
    assert compared > 50


def test_a_step_predicts_the_token_after_its_own(dataset, make_head):
    head, scales, _ = make_head()
    entry = dataset.entries[0]
    batch = dataset.batch([entry]).scaled(scales)
    tokens, source = dataset.tokens(entry)
    for step in unroll(head, batch, 3):
        for row, valid, token in zip(step.rows.tolist(), step.valid.tolist(), step.token.tolist(), strict=True):
            at = row + 2 + step.number
            assert valid == (at < len(tokens) and int(source[at]) != Source.PROMPT)
            if valid:
                assert token == int(tokens[at])
                # The state that yields the teacher's distribution of this token is one position before it.
                state = batch.hidden[step.teacher[step.rows.tolist().index(row)]]
                assert torch.equal(state, batch.hidden[at - 1])


def test_soft_cross_entropy_is_torchs_own_with_its_gradient():
    logits = torch.randn(5, 7, dtype=torch.double, requires_grad=True)
    probabilities = torch.randn(5, 7, dtype=torch.double).softmax(-1)
    weights = torch.rand(5, dtype=torch.double)
    expected = F.cross_entropy(logits, probabilities, reduction="none")
    (gradient,) = torch.autograd.grad((expected * weights).sum(), logits)
    loss = soft_cross_entropy(logits, probabilities)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad((loss * weights).sum(), logits)[0], gradient)


def test_the_vocabulary_prefers_what_is_drawn_and_what_could_be():
    lm_head = torch.nn.Linear(4, 10, bias=False)
    lm_head.weight.data.zero_()
    lm_head.weight.data[7] = 5.0
    tokens = torch.tensor([2, 2, 2, 9, 9, 4])
    vocabulary = initialise.draft_vocabulary(tokens, torch.ones(3, 4), lm_head, 10, 4)
    assert vocabulary.tolist() == [2, 4, 7, 9]


def test_a_killed_training_continues_where_it_stopped(make_trainer):
    whole = make_trainer("whole")
    losses = [record["loss"][0] for record in whole.train()]
    first = make_trainer("killed")
    running = first.train()
    for _ in range(10):  # the last checkpoint is of step 8
        next(running)
    running.close()
    second = make_trainer("killed")
    assert second.resume()
    assert second.step == 8
    assert [record["loss"][0] for record in second.train()] == pytest.approx(losses[8:], rel=1e-5)
    for a, b in zip(whole.head.parameters(), second.head.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_training_lowers_the_loss_and_reports(make_trainer, tmp_path):
    trainer = make_trainer("run", OPTIONS.model_copy(update={"steps": 60, "single_steps": 10, "lr": 3e-3}))
    records = list(trainer.train())
    assert records[0]["k"] == 1
    assert records[-1]["k"] == 3
    first, last = (sum(r["loss"][0] for r in part) / 10 for part in (records[:10], records[-10:]))
    assert last < first - 0.1  # nats; the toy target itself leaves about 3.7 of 4.0
    written = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in written] == list(range(1, 61))
    assert 1 <= written[-1]["held_out"]["tau"] <= 6


@torch.no_grad()
def test_chain_acceptance_counts_what_a_draft_loop_counts(dataset, make_head):
    head, scales, _ = make_head()
    # As in evaluation: the question is given, the answer runs to the end.
    dataset.entries = [e for e in dataset.entries if Source.QUESTION not in dataset.tokens(e)[1]]
    cycles = tokens = 0
    for entry in dataset.entries:
        batch = dataset.batch([entry]).scaled(scales)
        first = int(next(iter(unroll(head, batch, 1))).rows[0])
        drawn = (batch.source != Source.PROMPT).tolist()
        at = first
        while at + 3 < len(drawn) and all(drawn[at + 1 : at + 4]):
            accepted = 0
            for s, output in enumerate(draft_chain(head, batch.features, batch.next_token, at, 3)):
                draft = head.to_target(head.logits(output).argmax(-1))
                if int(draft) != int(batch.next_token[at + 1 + s]):
                    break
                accepted += 1
            cycles, tokens, at = cycles + 1, tokens + accepted + 1, at + accepted + 1
    acceptance = chain_acceptance(head, scales, dataset, depth=3)
    assert (acceptance.cycles, acceptance.tau) == (cycles, pytest.approx(tokens / cycles))
    chain = DraftConfig(total_token=4, depth=2, top_k=1)
    assert tree_tau(head, scales, dataset, chain) == pytest.approx(acceptance.tau)
    assert tree_tau(head, scales, dataset, DraftConfig(total_token=20, depth=2, top_k=6)) > acceptance.tau


@torch.no_grad()
def test_the_export_takes_unscaled_features(dataset, make_head, tmp_path):
    head, scales, vocabulary = make_head()
    path = export_head(head, scales, tmp_path / "head", dtype=torch.float32)
    state = load_file(path)
    assert "embed_tokens.weight" not in state
    assert torch.equal(torch.arange(48) + state["d2t"], vocabulary)
    assert torch.equal(state["t2d"].nonzero().squeeze(-1), vocabulary)
    exported = Eagle3Head(head.config)
    exported.load_state_dict(state)
    batch = dataset.batch(dataset.entries[:1])
    torch.testing.assert_close(exported.fuse(batch.features), head.fuse(batch.scaled(scales).features))


@torch.no_grad()
def test_the_export_is_a_checkpoint_that_the_drafter_loads(dataset, make_head, target, tmp_path):
    head, scales, _ = make_head()
    export_head(head, scales, tmp_path / "head", dtype=torch.float32)
    loaded = load_head(
        tmp_path / "head",
        target.config,
        embed_tokens=target.get_input_embeddings(),
        lm_head=target.lm_head,
        dtype=torch.float32,
    )
    assert loaded.config == head.config
    batch = dataset.batch(dataset.entries[:2])
    loaded_steps, steps = unroll(loaded, batch, 2), unroll(head, batch.scaled(scales), 2)
    for a, b in zip(loaded_steps, steps, strict=True):
        torch.testing.assert_close(loaded.logits(a.output), head.logits(b.output), atol=1e-4, rtol=1e-4)


def test_an_earlier_heads_weights_move_to_another_vocabulary(make_head, target):
    head, scales, vocabulary = make_head()
    torch.nn.init.normal_(head.lm_head.weight)
    other = torch.cat([vocabulary[::2], torch.tensor([i for i in range(96) if i not in vocabulary][:10])]).sort().values
    adopted = initialise.new_head(target, other, scales)
    initialise.adopt(adopted, head.state_dict(), other, vocabulary)
    for row, token in enumerate(other.tolist()):
        known = (vocabulary == token).nonzero()
        expected = head.lm_head.weight[known[0, 0]] if len(known) else target.lm_head.weight[token]
        assert torch.equal(adopted.lm_head.weight[row], expected)
    assert torch.equal(adopted.fc.weight, head.fc.weight)
    assert torch.equal(torch.arange(len(other)) + adopted.d2t, other)


@torch.no_grad()
def test_an_exported_head_becomes_a_checkpoint_again(make_head):
    """In another scale of the features: what counts is that the head then gives the same."""
    head, scales, vocabulary = make_head()
    other = scales * torch.tensor([2.0, 0.5, 3.0])
    exported = copy.deepcopy(head)  # takes features as they are
    exported.fc.weight /= scales.repeat_interleave(head.config.hidden_size)
    checkpoint = initialise.as_checkpoint(exported, other)
    assert torch.equal(checkpoint["vocabulary"], vocabulary)
    features = torch.randn(3, 3 * head.config.hidden_size)
    by = other.repeat_interleave(head.config.hidden_size)
    torch.testing.assert_close((features / by) @ checkpoint["head"]["fc.weight"].T, exported.fc(features))  # fp32


@torch.no_grad()
def test_more_kv_heads_than_the_targets_start_as_copies(dataset, target):
    _, scales, vocabulary = vars(initialise.starting_point(target, dataset, 48)).values()
    batch = dataset.batch(dataset.entries[:2]).scaled(scales)
    outputs = []
    for num_kv_heads in (None, 4):
        head = initialise.new_head(target, vocabulary, scales, noise=0.0, num_kv_heads=num_kv_heads)
        head.bind(target.get_input_embeddings(), target.lm_head)
        outputs.append([step.output for step in unroll(head, batch, 3)])
    assert head.midlayer.self_attn.k_proj.weight.shape[0] == 4 * head.config.head_dim
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)  # fp32 in another order


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_the_hidden_term_is_the_distance_to_the_targets_state(dataset, target, precision):
    start = initialise.starting_point(target, dataset, 96)  # the whole vocabulary: no row is left out
    batch = dataset.batch(dataset.entries[:3]).scaled(start.scales)
    losses = []
    for weight in (0.0, 0.5):
        options = OPTIONS.model_copy(update={"hidden_weight": weight, "question_weight": 1.0, "sampled_weight": 1.0})
        module = TrainingTimeTest(start.head, start.vocabulary, target.lm_head, options)
        with torch.autocast("cpu", precision, enabled=precision is torch.bfloat16):
            losses.append(module(batch, 1)[0])
    (step,) = unroll(start.head, batch, 1)
    valid = step.valid.nonzero().squeeze(-1)
    hidden = batch.hidden[step.teacher[valid]]
    distance = (start.head.norm(step.output[valid]) - hidden).square().mean() / hidden.square().mean()
    # bf16 keeps 8 bits, and the two losses of about 4 nats are subtracted.
    torch.testing.assert_close((losses[1] - losses[0]).item(), 0.5 * distance.item(), rtol=0.05, atol=1e-5)


def test_no_shards_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"no shard in .*generate_data\.py"):
        ShardDataset(tmp_path)
