from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from eagle_mars.config import DraftConfig, SamplingConfig, VerifyConfig
from eagle_mars.draft.drafter import Drafter
from eagle_mars.engine import Engine, Request, Speculation
from eagle_mars.errors import LogitsError
from eagle_mars.result import Step
from eagle_mars.target import TargetModel
from tests.tiny import FAMILIES, tiny_head, tiny_model

EXACT = VerifyConfig(rule="exact")
SMALL = {"vocab_size": 16, "max_position_embeddings": 1024}


def engine_of(family: str = "Llama", eagle: int = 3, **overrides) -> Engine:
    model = tiny_model(family, **{**SMALL, **overrides})
    head = tiny_head(model, eagle)
    return Engine(TargetModel(model, head.config.capture_layers), head)


def run(engine: Engine, prompt: list[int], **options) -> list[Step]:
    return list(engine.speculate(torch.tensor([prompt]), Request(**options)))


def tokens_of(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def random_prompt(generator: random.Random, length: int, vocab: int = 16) -> list[int]:
    return [generator.randrange(3, vocab) for _ in range(length)]


def random_tree(generator: random.Random) -> DraftConfig:
    depth, top_k = generator.randrange(0, 6), generator.choice([1, 2, 4, 6])
    reachable = top_k + depth * top_k**2
    return DraftConfig(total_token=1 + generator.randrange(1, min(reachable, 40) + 1), depth=depth, top_k=top_k)


@pytest.mark.parametrize("eagle", [3, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_exact_greedy_equals_generate(family: str, eagle: int) -> None:
    """22 draws of (tree, prompt length 1..700, max_new_tokens) for each of 14 pairs: 308 in all."""
    engine = engine_of(family, eagle)
    generator = random.Random(f"{family}{eagle}")
    accepted = 0
    for draw in range(22):
        length = [1, 2, 700][draw] if draw < 3 else generator.randrange(1, 701)
        prompt, new = random_prompt(generator, length), generator.randrange(1, 40)
        steps = run(engine, prompt, max_new_tokens=new, draft=random_tree(generator), verify=EXACT)
        expected = engine.target.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=new)
        assert tokens_of(steps) == expected[0, length:].tolist(), (draw, length, new)
        accepted += sum(step.accepted or 0 for step in steps)
    assert accepted > 10  # otherwise nothing but single tokens was tested


@pytest.mark.parametrize("eagle", [3, 1])
def test_a_prompt_fed_in_chunks_gives_the_same_answer_and_keeps_no_features(eagle: int) -> None:
    model = tiny_model("Llama", **SMALL)
    head = tiny_head(model, eagle)
    whole, chunked = (Engine(TargetModel(model, head.config.capture_layers, rows), head) for rows in (4096, 64))
    generator = random.Random(eagle)
    accepted = 0
    for length in (63, 64, 65, 129, 700):
        prompt = random_prompt(generator, length)
        for sampling in (SamplingConfig(), SamplingConfig(temperature=0.8, seed=length)):
            request = Request(24, DraftConfig(total_token=12, depth=3, top_k=4), EXACT, sampling)
            response = Speculation(chunked, torch.tensor([prompt]), request)
            steps = [response.prefill()]
            assert response.features is not None
            assert response.features.shape[1] <= 64
            while steps[-1].finish_reason is None:
                steps.append(response.cycle())
            expected = list(whole.speculate(torch.tensor([prompt]), request))
            # Equal cycles too: the head was fed the same rows. fp32, so only a tie could tell the two apart.
            assert [step.tokens for step in steps] == [step.tokens for step in expected]
            accepted += sum(step.accepted or 0 for step in steps)
    assert accepted > 10


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_count_each_token_once(penalty: str) -> None:
    """The same text with and without a tree: the root is a node, so it must not be in the history as well."""
    engine = engine_of()
    generator = random.Random(penalty)
    sampling = SamplingConfig(**{penalty: 1.7 if penalty == "repetition_penalty" else 0.7})
    changed = 0
    for _ in range(5):
        prompt = random_prompt(generator, 12)
        request = Request(20, DraftConfig(total_token=12, depth=3, top_k=4), EXACT, sampling)
        base = tokens_of(list(engine.autoregress(torch.tensor([prompt]), request)))
        assert tokens_of(list(engine.speculate(torch.tensor([prompt]), request))) == base
        free = run(engine, prompt, max_new_tokens=20, verify=EXACT)
        changed += tokens_of(free) != base
    assert changed  # otherwise the penalty did nothing


def test_sampled_exact_has_the_targets_distribution() -> None:
    engine = engine_of(vocab_size=9)
    # Fixed seeds, so this can't flicker; a biased rule is off by far more (the released strict test: p < 1e-100).
    assert sampled_law_pvalue(engine, [3, 7, 5, 4], DraftConfig(total_token=8, depth=2, top_k=3)) > 1e-3


def sampled_law_pvalue(engine: Engine, prompt: list[int], shape: DraftConfig, draws: int = 700) -> float:
    """Chi-square of sampled triples of tokens under `exact` against the target's own distribution.

    Three, because the first comes from prefill and the last is drawn without a draft.
    """
    sampling = SamplingConfig(temperature=0.8, top_k=3)
    expected = _joint_law(engine, prompt, temperature=0.8, top_k=3, tokens=3)
    seen: Counter[tuple[int, ...]] = Counter()
    for seed in range(draws):
        steps = run(engine, prompt, max_new_tokens=3, draft=shape, verify=EXACT, sampling=sampling.replace(seed=seed))
        seen[tuple(tokens_of(steps))] += 1
    assert set(seen) <= set(expected)
    common = [cell for cell, p in expected.items() if p * draws >= 5]
    observed = [seen[cell] for cell in common]
    wanted = [expected[cell] * draws for cell in common]
    observed.append(draws - sum(observed))
    wanted.append(draws - sum(wanted))
    return float(chisquare(observed, wanted).pvalue)


def _joint_law(engine: Engine, prompt: list[int], temperature: float, top_k: int, tokens: int) -> dict:
    law = {(): 1.0}
    for _ in range(tokens):
        prefixes = list(law)
        with torch.no_grad():
            logits = engine.target.model(torch.tensor([[*prompt, *prefix] for prefix in prefixes])).logits[:, -1]
        kept = logits.topk(top_k).values[:, -1:]
        probabilities = (logits / temperature).masked_fill(logits < kept, -torch.inf).softmax(-1)
        law = {
            (*prefix, token): law[prefix] * p
            for prefix, row in zip(prefixes, probabilities.tolist(), strict=True)
            for token, p in enumerate(row)
            if p > 0
        }
    return law


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_theta_none_is_exact_bit_for_bit(temperature: float) -> None:
    engine = engine_of()
    generator = random.Random(5)
    for seed in range(5):
        prompt = random_prompt(generator, 12)
        common = {"max_new_tokens": 30, "draft": DraftConfig(total_token=12, depth=3, top_k=4)}
        sampling = SamplingConfig(temperature=temperature, seed=seed)
        exact = run(engine, prompt, verify=EXACT, sampling=sampling, **common)
        off = run(engine, prompt, verify=VerifyConfig(theta=None), sampling=sampling, **common)
        assert [(s.tokens, s.provenance, s.accepted) for s in exact] == [
            (s.tokens, s.provenance, s.accepted) for s in off
        ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_until_the_first_relaxed_token_mars_is_exact(temperature: float) -> None:
    engine = engine_of()
    generator = random.Random(6)
    untouched = relaxed = 0
    for seed in range(10):
        prompt = random_prompt(generator, 9)
        common = {"max_new_tokens": 24, "draft": DraftConfig(total_token=12, depth=3, top_k=4)}
        sampling = SamplingConfig(temperature=temperature, seed=seed)
        exact = tokens_of(run(engine, prompt, verify=EXACT, sampling=sampling, **common))
        steps = run(engine, prompt, verify=VerifyConfig(theta=0.9), sampling=sampling, **common)
        kinds = [kind for step in steps for kind in step.provenance]
        if "relaxed" in kinds:
            relaxed += 1
            # Greedy tokens before it are the same; sampled ones too as long as the cycles agree, which they do.
            first = kinds.index("relaxed")
            assert tokens_of(steps)[:first] == exact[:first]
        else:
            untouched += 1
            assert tokens_of(steps) == exact
    assert untouched
    assert relaxed


def test_responses_on_one_engine_may_interleave() -> None:
    engine = engine_of()
    generator = random.Random(7)
    prompts = [random_prompt(generator, length) for length in (5, 40)]
    request = Request(max_new_tokens=25, draft=DraftConfig(total_token=10, depth=3, top_k=3), verify=EXACT)
    alone = [tokens_of(list(engine.speculate(torch.tensor([p]), request))) for p in prompts]
    streams = [engine.speculate(torch.tensor([p]), request) for p in prompts]
    together: list[list[int]] = [[], []]
    running = {0, 1}
    while running:
        for index in sorted(running):
            step = next(streams[index], None)
            if step is None:
                running.discard(index)
            else:
                together[index] += step.tokens
    assert together == alone


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 20])
def test_never_more_than_max_new_tokens_and_no_draft_for_the_last_one(limit: int, monkeypatch) -> None:
    engine = engine_of()
    trees = []
    grow = Drafter.grow
    monkeypatch.setattr(Drafter, "grow", lambda self, root: trees.append(1) or grow(self, root))
    steps = run(
        engine, [3, 4, 5], max_new_tokens=limit, draft=DraftConfig(total_token=10, depth=3, top_k=3), verify=EXACT
    )
    assert len(tokens_of(steps)) == limit
    assert steps[-1].finish_reason == "length"
    assert all(step.finish_reason is None for step in steps[:-1])
    assert len(trees) <= len(steps) - 1
    if limit == 1:
        assert not trees


def test_ends_with_the_first_stop_id() -> None:
    engine = engine_of()
    options = {"max_new_tokens": 60, "draft": DraftConfig(total_token=12, depth=4, top_k=4), "verify": EXACT}
    free = tokens_of(run(engine, [3, 9, 4], **options))
    for stop in dict.fromkeys(free):
        steps = run(engine, [3, 9, 4], stop_ids=frozenset({stop, 99}), **options)
        assert tokens_of(steps) == free[: free.index(stop) + 1]
        assert steps[-1].finish_reason == "stop"


def test_a_stop_id_in_the_prompt_ends_nothing() -> None:
    engine = engine_of()
    options = {"max_new_tokens": 20, "draft": DraftConfig(total_token=12, depth=4, top_k=4), "verify": EXACT}
    free = tokens_of(run(engine, [3, 9, 4], **options))
    unused = next(token for token in range(3, 16) if token not in free)
    prompt = [3, unused, 4]
    plain = engine.target.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)[0, 3:].tolist()
    until = plain[: plain.index(unused) + 1] if unused in plain else plain
    assert tokens_of(run(engine, prompt, stop_ids=frozenset({unused}), **options)) == until


@pytest.mark.parametrize("prompt_length", [1, 30, 39, 46, 47])
def test_the_context_can_be_filled_to_its_last_position(prompt_length: int) -> None:
    """The tree then reaches beyond the context, also when it is larger than what is left of it."""
    engine = engine_of(max_position_embeddings=48)
    prompt = random_prompt(random.Random(prompt_length), prompt_length)
    left = 48 - prompt_length
    steps = run(engine, prompt, max_new_tokens=left, draft=DraftConfig(total_token=20, depth=5, top_k=4), verify=EXACT)
    expected = engine.target.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=left)
    assert tokens_of(steps) == expected[0, prompt_length:].tolist()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eagle", [3, 1])
def test_half_precision_decodes(dtype: torch.dtype, attention: str, eagle: int) -> None:
    """Texts may part from the target's own at near-ties there; types, budget and counts may not."""
    model = tiny_model("Llama", **SMALL).to(dtype)
    model.set_attn_implementation(attention)
    head = tiny_head(model, eagle).to(dtype)
    engine = Engine(TargetModel(model, head.config.capture_layers), head)
    for temperature in (0.0, 1.0):
        sampling = SamplingConfig(temperature=temperature, seed=1)
        steps = run(
            engine, [3, 9, 4], max_new_tokens=12, draft=DraftConfig(total_token=10, depth=3, top_k=3), sampling=sampling
        )
        assert len(tokens_of(steps)) == 12
        assert all(0 <= token < 16 for token in tokens_of(steps))


def test_the_baseline_counts_like_the_rest() -> None:
    engine = engine_of()
    request = Request(max_new_tokens=20, verify=EXACT)
    steps = list(engine.autoregress(torch.tensor([[3, 4, 5]]), request))
    assert tokens_of(steps) == tokens_of(run(engine, [3, 4, 5], max_new_tokens=20, verify=EXACT))
    assert len(steps) == 20
    assert all(step.accepted is None for step in steps)


def test_sampled_baseline_follows_the_seed() -> None:
    engine = engine_of()

    def sample(seed: int | None) -> list[int]:
        request = Request(max_new_tokens=20, sampling=SamplingConfig(temperature=1.0, seed=seed))
        return tokens_of(list(engine.autoregress(torch.tensor([[3, 4, 5]]), request)))

    assert sample(1) == sample(1) != sample(2)
    torch.manual_seed(3)
    first = sample(None)
    torch.manual_seed(3)
    assert sample(None) == first


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("when", [1, 2])
def test_unusable_logits_are_refused(bad: float, when: int, monkeypatch) -> None:
    """when 1: in prefill; 2: in the first tree."""
    engine = engine_of()
    head, calls = engine.target.model.lm_head, []

    def spoil(module, args, output: Tensor) -> Tensor:
        calls.append(1)
        return torch.full_like(output, bad) if len(calls) == when else output

    handle = head.register_forward_hook(spoil)
    try:
        with pytest.raises(LogitsError, match="float32"):
            run(engine, [3, 4, 5], max_new_tokens=8, draft=DraftConfig.chain(3))
    finally:
        handle.remove()


@pytest.fixture
def host_reads(monkeypatch) -> Iterator[list[str]]:
    """Every tensor → Python conversion, by name."""
    reads: list[str] = []
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__"):
        original = getattr(Tensor, name)

        def counted(self, *args, _name=name, _original=original, **kwargs):
            reads.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(Tensor, name, counted)
    return reads


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_device_read_per_cycle(temperature: float, host_reads: list[str]) -> None:
    engine = engine_of()
    sampling = SamplingConfig(temperature=temperature, seed=1)
    request = Request(max_new_tokens=40, draft=DraftConfig(total_token=12, depth=3, top_k=4), sampling=sampling)
    stream = engine.speculate(torch.tensor([[3, 4, 5]]), request)
    next(stream)
    next(stream)  # the first cycle feeds the prompt to the head
    for _ in range(3):
        host_reads.clear()
        next(stream)
        assert host_reads == ["tolist"]
