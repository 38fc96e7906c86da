"""Generation: the states that are stored are the target's own, and a killed run continues to the same shards."""

from __future__ import annotations

import pytest
import torch

from eagle_mars.draft.infer import capture_layers
from eagle_mars.errors import ConfigError
from eagle_mars.training import rows
from eagle_mars.training.generate import Generator, generate_shards
from eagle_mars.training.prompts import Question, Request
from eagle_mars.training.shards import Source, read_shard
from tests.training.conftest import EOS, ToyRequests


def shards_of(directory):
    return {path.name: list(read_shard(path)) for path in sorted(directory.glob("*.safetensors"))}


def assert_same_shards(found, expected):
    assert found.keys() == expected.keys()
    for name, sequences in expected.items():
        for a, b in zip(found[name], sequences, strict=True):
            assert a.index == b.index
            assert torch.equal(a.tokens, b.tokens)
            assert torch.equal(a.source, b.source)
            # Other rows share the batch after a restart, so matmuls round differently; stored as bf16 (2^-8).
            torch.testing.assert_close(a.features, b.features, rtol=2**-7, atol=1e-2)


def test_states_and_greedy_text_are_the_targets_own(make_generator, target):
    sequences = [s for _, s in make_generator().run(iter(range(8))) if s is not None]
    target.set_attn_implementation("sdpa")
    assert {int(s.source.max()) for s in sequences} == {Source.SAMPLED, Source.GREEDY}
    for sequence in sequences:
        with torch.inference_mode():
            out = target(sequence.tokens[None].long(), output_hidden_states=True)
        taps = [out.hidden_states[i][0, :-1] for i in capture_layers({}, 8)]
        # bf16 keeps 8 bits of mantissa.
        torch.testing.assert_close(sequence.features.float(), torch.cat(taps, -1), rtol=2**-7, atol=1e-3)
        torch.testing.assert_close(sequence.hidden.float(), out.hidden_states[-1][0, :-1], rtol=2**-7, atol=1e-3)
        greedy = sequence.source[1:] == Source.GREEDY
        assert torch.equal(out.logits[0, :-1].argmax(-1)[greedy], sequence.tokens[1:].long()[greedy])


def test_answers_end_at_the_stop_token_or_the_limit(make_generator):
    for index, sequence in make_generator().run(iter(range(0, 24, 2))):  # one question each
        if sequence is not None:
            answer = sequence.tokens[sequence.source >= Source.SAMPLED].tolist()
            assert EOS not in answer[:-1]
            assert answer[-1] == EOS or len(answer) == ToyRequests()[index].max_answer_tokens


def test_a_killed_run_continues_to_the_same_shards(make_generator, shards, tmp_path):
    resumed = tmp_path / "resumed"
    killed = generate_shards(make_generator(), resumed, n_shards=3, per_shard=6)
    while next(killed).written is None:
        pass
    killed.close()
    assert len(list(resumed.iterdir())) == 1
    for _ in generate_shards(make_generator(), resumed, n_shards=3, per_shard=6):
        pass
    assert_same_shards(shards_of(resumed), shards_of(shards))


def test_two_workers_make_the_shards_of_one(make_generator, shards, tmp_path):
    for worker in range(2):
        for _ in generate_shards(
            make_generator(), tmp_path / "two", n_shards=3, per_shard=6, worker=worker, n_workers=2
        ):
            pass
    assert_same_shards(shards_of(tmp_path / "two"), shards_of(shards))


def test_a_failed_write_leaves_no_shard(make_generator, tmp_path, monkeypatch):
    def fail(tensors, path):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("eagle_mars.training.shards.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        list(generate_shards(make_generator(), tmp_path, n_shards=1, per_shard=2))
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_question_on_a_held_out_topic_is_dropped(make_generator, monkeypatch):
    monkeypatch.setattr(rows, "mentions_held_out_topic", lambda question: True)
    written_by_target = [i for i, s in make_generator().run(iter(range(9))) if s is None]
    assert sorted(written_by_target) == [1, 2, 4, 5, 7, 8]


def test_too_short_a_length_is_refused(target, tokenizer):
    with pytest.raises(ConfigError, match="max_length 40"):
        Generator(target, tokenizer, ToyRequests(), max_length=40)


def test_a_prompt_that_does_not_fit_is_refused(target, tokenizer):
    class Long:
        def __getitem__(self, index: int) -> Request:
            return Request((Question("a" * 200, is_open=False),), 0.0, 8)

    with pytest.raises(ConfigError, match=r"Prompt 0 has 20\d tokens"):
        next(Generator(target, tokenizer, Long(), max_length=128).run(iter([0])))
