from __future__ import annotations

import random

import pytest
import torch

from eagle_mars import EaModel
from eagle_mars.batch import Batch, TargetBatch
from eagle_mars.cache import TreeCache
from eagle_mars.config import DraftConfig, SamplingConfig, VerifyConfig
from eagle_mars.draft.batch_drafter import BatchDrafter
from eagle_mars.draft.draft_model import DraftModel
from eagle_mars.engine import Engine, Request
from eagle_mars.errors import ConfigError, LogitsError
from eagle_mars.result import Step
from eagle_mars.speculative_batch import SpeculativeBatch
from eagle_mars.target import TargetModel
from tests.test_engine import EXACT, engine_of, random_prompt, random_tree
from tests.tiny import tiny_model

TREE = DraftConfig(total_token=12, depth=3, top_k=4)
SAMPLED = SamplingConfig(temperature=0.8, top_k=5)


def strip(steps: list[Step]) -> list[tuple]:
    """What must not depend on who shares the cycles: everything but the clock (regret is a float sum)."""
    return [(s.tokens, s.provenance, s.accepted, s.finish_reason, s.low_margin, s.rescued) for s in steps]


def alone(engine: Engine, prompt: list[int], request: Request) -> list[Step]:
    return list(engine.speculate(torch.tensor([prompt]), request))


def together(batch: Batch, jobs: list[tuple[list[int], Request]]) -> list[list[Step]]:
    """Decode all jobs in a batch that may be smaller than their number: the next joins where one has left."""
    steps: list[list[Step]] = [[] for _ in jobs]
    numbers, waiting = {}, list(enumerate(jobs))
    while waiting or batch.responses:
        while waiting and batch.free:
            number, (prompt, request) = waiting.pop(0)
            response, first = batch.join(torch.tensor([prompt]), request)
            numbers[id(response)] = number
            steps[number].append(first)
        for response, step in batch.cycle():
            assert isinstance(step, Step)
            steps[numbers[id(response)]].append(step)
    return steps


@pytest.mark.parametrize("eagle", [3, 1])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma"])
def test_every_response_is_what_it_is_alone(family: str, eagle: int) -> None:
    engine = engine_of(family, eagle)
    generator = random.Random(f"batch{family}{eagle}")
    accepted = 0
    for _ in range(2):
        tree = random_tree(generator)
        jobs = [
            (random_prompt(generator, generator.randrange(1, 300)), Request(generator.randrange(1, 30), tree, verify))
            for verify in (EXACT, VerifyConfig(theta=0.5), EXACT, VerifyConfig(theta=0.8), EXACT)
        ]
        for job, steps in zip(jobs, together(SpeculativeBatch(engine, tree, places=3), jobs), strict=True):
            assert strip(steps) == strip(alone(engine, *job))
            accepted += sum(step.accepted or 0 for step in steps)
    assert accepted > 10  # otherwise nothing but single tokens was tested


def test_each_response_has_its_own_options_and_coins() -> None:
    """No coin of these seeds lies within float rounding of a threshold, so texts are equal at T > 0 too."""
    engine = engine_of()
    prompt = [3, 7, 5, 4]
    penalised = SamplingConfig(repetition_penalty=1.3, frequency_penalty=0.4)
    requests = [
        Request(24, TREE, EXACT, SAMPLED.replace(seed=1)),
        Request(24, TREE, VerifyConfig(margin="logit-gap", gap=50), SAMPLED.replace(seed=1)),
        Request(24, TREE, EXACT, SamplingConfig(temperature=1.5, seed=2)),
        Request(24, TREE, EXACT),
        Request(24, TREE, EXACT, penalised),
        Request(24, TREE, VerifyConfig(theta=0.5, max_regret=0.5), penalised.replace(temperature=1.0, seed=5)),
        Request(24, TREE, EXACT, stop_ids=frozenset(range(3, 10))),
    ]
    jobs = [(prompt[: 1 + number % 4], request) for number, request in enumerate(requests)]
    texts = together(SpeculativeBatch(engine, TREE, places=7), jobs)
    for job, steps in zip(jobs, texts, strict=True):
        assert strip(steps) == strip(alone(engine, *job))
    assert len({str(strip(steps)) for steps in texts}) == len(texts)  # the options really differ in effect
    assert any("relaxed" in step.provenance for step in texts[1])


def test_a_draft_model_drafts_for_a_batch() -> None:
    target, draft = tiny_model("Llama", vocab_size=16), tiny_model("Qwen2", seed=1, vocab_size=16)
    engine = Engine(TargetModel(target, None), DraftModel(draft, 16))
    generator = random.Random(0)
    jobs = [(random_prompt(generator, n), Request(15, TREE, EXACT)) for n in (2, 9, 30)]
    for job, steps in zip(jobs, together(SpeculativeBatch(engine, TREE, places=3), jobs), strict=True):
        assert strip(steps) == strip(alone(engine, *job))


def test_the_target_alone_decodes_a_batch() -> None:
    """At T = 0 and with the same coins at T > 0, beside other responses and alone; a head isn't needed."""
    engine = Engine(engine_of().target)
    penalised = SamplingConfig(temperature=1.0, repetition_penalty=1.3, seed=4)
    options = [SamplingConfig(), SAMPLED.replace(seed=1), penalised, SamplingConfig(frequency_penalty=0.4), SAMPLED]
    requests = [Request(3 * n + 1, TREE, EXACT, option, top_logprobs=1) for n, option in enumerate(options)]
    requests[-1] = Request(24, TREE, EXACT, SAMPLED.replace(seed=2), stop_ids=frozenset(range(3, 10)), top_logprobs=1)
    jobs = [([3, 7, 5, 4, 9][: n + 1], request) for n, request in enumerate(requests)]
    for (prompt, request), steps in zip(jobs, together(TargetBatch(engine, places=3), jobs), strict=True):
        own = list(engine.autoregress(torch.tensor([prompt]), request))
        assert strip(steps) == strip(own)
        for step, theirs in zip(steps, own, strict=True):  # batched products round otherwise, by some 1e-7
            assert step.scores[0].chosen.token_id == theirs.scores[0].chosen.token_id
            assert step.scores[0].chosen.logprob == pytest.approx(theirs.scores[0].chosen.logprob, abs=1e-4)


def test_the_target_alone_ends_only_the_response_with_bad_logits() -> None:
    engine = engine_of()
    forward_tree = engine.target.forward_tree
    batch = TargetBatch(engine, places=2)
    request = Request(6, TREE, EXACT)
    good, bad = (batch.decode(torch.tensor([prompt]), request) for prompt in ([3, 7], [5, 5, 4]))
    steps = [next(good)]
    next(bad)

    def poisoned(*arguments, **options):
        out = forward_tree(*arguments, **options)
        out.logits[1:] = torch.nan
        return out

    engine.target.forward_tree = poisoned
    with pytest.raises(LogitsError, match="best logit is nan"):
        next(bad)
    engine.target.forward_tree = forward_tree
    assert strip(steps + list(good)) == strip(list(engine.autoregress(torch.tensor([[3, 7]]), request)))


def test_iterators_share_cycles() -> None:
    engine = engine_of()
    prompts = [[3, 7, 5], [4, 4, 9, 8], [12, 3]]
    request = Request(30, TREE, EXACT)
    batch = SpeculativeBatch(engine, TREE, places=3)
    forwards = 0
    forward_tree = engine.target.forward_tree

    def counted(*arguments):
        nonlocal forwards
        forwards += 1
        return forward_tree(*arguments)

    engine.target.forward_tree = counted
    running = [batch.decode(torch.tensor([prompt]), request) for prompt in prompts]
    steps = [[next(iterator)] for iterator in running]
    running[2].close()
    while any(s[-1].finish_reason is None for s in steps[:2]):
        for iterator, s in zip(running[:2], steps[:2], strict=True):
            s += [step for step in [next(iterator, None)] if step is not None]
    shared = forwards
    for prompt, s in zip(prompts[:2], steps[:2], strict=True):
        assert strip(s) == strip(alone(engine, prompt, request))
    assert shared == max(len(s) for s in steps[:2]) - 1  # the first steps are prefill's
    assert batch.free == 3


def test_only_the_response_with_bad_logits_fails() -> None:
    engine = engine_of()
    poisoned: set[int] = set()
    verifier = engine.verifier

    def poison(tree, logits, *arguments, **options):
        for row in poisoned:
            logits = logits.index_fill(0, torch.tensor([row]), torch.nan)
        return verifier(tree, logits, *arguments, **options)

    engine.verifier = poison
    batch = SpeculativeBatch(engine, TREE, places=2)
    request = Request(20, TREE, EXACT)
    good, bad = (batch.decode(torch.tensor([prompt]), request) for prompt in ([3, 7], [5, 5, 4]))
    steps = [next(good)]
    next(bad)
    poisoned.add(1)
    steps.append(next(good))
    poisoned.clear()
    with pytest.raises(LogitsError, match="NaN"):
        next(bad)
    steps += good
    assert strip(steps) == strip(alone(engine, [3, 7], request))


def test_a_response_without_a_number_left_spoils_nobody_in_its_place() -> None:
    """Half precision may overflow in a few hidden states: keys, values and logits of that response are NaN then."""
    engine = engine_of()
    poisoned: set[int] = set()

    def poison(module, arguments, output):
        return output.index_fill(0, torch.tensor(sorted(poisoned)), torch.nan) if poisoned else output

    handle = engine.target.embed_tokens.register_forward_hook(poison)
    batch = SpeculativeBatch(engine, TREE, places=2)
    request = Request(20, TREE, EXACT)
    good, bad = (batch.decode(torch.tensor([prompt]), request) for prompt in ([3] * 20, [5] * 30))
    steps = [next(good)]
    next(bad)
    poisoned.add(1)
    steps.append(next(good))
    poisoned.clear()
    with pytest.raises(LogitsError):
        next(bad)
    newcomer = batch.decode(torch.tensor([[7, 7]]), request)
    later = [next(newcomer)]
    steps += good
    later += newcomer
    handle.remove()
    assert strip(steps) == strip(alone(engine, [3] * 20, request))
    assert strip(later) == strip(alone(engine, [7, 7], request))


def test_a_cycle_that_runs_out_of_memory_costs_one_response_only() -> None:
    engine = engine_of()
    batch = SpeculativeBatch(engine, TREE, places=2)
    request = Request(20, TREE, EXACT)
    lost, kept = (batch.decode(torch.tensor([prompt]), request) for prompt in ([3, 7, 5], [4, 4, 9, 8]))
    next(lost)
    steps = [next(kept), next(kept)]
    next(lost)
    forward_tree = engine.target.forward_tree

    def fail(*arguments):
        raise torch.OutOfMemoryError

    engine.target.forward_tree = fail
    with pytest.raises(torch.OutOfMemoryError):
        next(lost)
    engine.target.forward_tree = forward_tree
    steps.append(next(kept))
    ((response,), (rows,)) = batch.responses, batch._cache.lengths
    assert batch._drafter.lengths == [rows - response.tokens.shape[1]]  # each row was fed once
    steps += kept
    assert strip(steps) == strip(alone(engine, [4, 4, 9, 8], request))


def test_a_response_that_there_is_no_memory_for_leaves_no_trace(monkeypatch) -> None:
    engine = engine_of()
    batch = SpeculativeBatch(engine, TREE, places=3)
    request = Request(20, TREE, EXACT)
    kept = batch.decode(torch.tensor([[4, 4, 9, 8]]), request)
    steps = [next(kept), next(kept)]

    def fail(*arguments):
        raise torch.OutOfMemoryError

    for owner, name in ((TreeCache, "_allocate"), (BatchDrafter, "_reserve")):
        newcomer = batch.decode(torch.tensor([[3] * 300]), request)
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fail)
            with pytest.raises(torch.OutOfMemoryError):
                next(newcomer)
    steps += kept
    assert strip(steps) == strip(alone(engine, [4, 4, 9, 8], request))


def test_a_response_that_is_told_to_leave_disturbs_nobody() -> None:
    engine = engine_of()
    prompts = [[3, 7, 5], [4, 4, 9, 8], [12, 3]]
    request = Request(30, TREE, EXACT)
    batch = SpeculativeBatch(engine, TREE, places=3)
    joined = [batch.join(torch.tensor([prompt]), request) for prompt in prompts]
    kept = {id(joined[1][0]): [joined[1][1]], id(joined[2][0]): [joined[2][1]]}
    for response, step in batch.cycle():
        kept.get(id(response), []).append(step)
    batch.leave(joined[0][0])
    while batch.responses:
        for response, step in batch.cycle():
            kept[id(response)].append(step)
    for steps, prompt in zip(kept.values(), prompts[1:], strict=True):
        assert strip(steps) == strip(alone(engine, prompt, request))
    assert batch.cycle() == []


def test_what_a_batch_cannot_share_is_refused() -> None:
    batch = SpeculativeBatch(engine_of(), TREE, places=2)
    ids = torch.tensor([[3, 4]])
    with pytest.raises(ConfigError, match="one draft tree"):
        batch.join(ids, Request(5, DraftConfig.chain(2)))
    batch.join(ids, Request(5, TREE, special_ids=(1,)))
    with pytest.raises(ConfigError, match="special ids"):
        batch.join(ids, Request(5, TREE, special_ids=(2,)))
    batch.join(ids, Request(5, TREE, special_ids=(1,)))
    with pytest.raises(RuntimeError, match="places are taken"):
        batch.join(ids, Request(5, TREE, special_ids=(1,)))


def test_generate_many_is_generate_for_each(tiny_pair) -> None:
    ea = EaModel.from_pretrained(*tiny_pair, total_token=8, depth=2, top_k=3)
    prompts = ["ab", "cde", "f", "ghij", "ba"]
    rules = [EXACT, VerifyConfig(theta=0.5), EXACT, VerifyConfig(theta=0.5), EXACT]
    sampling = SamplingConfig(temperature=0.9, seed=3)
    many = ea.generate_many(prompts, batch_size=2, max_new_tokens=12, verify=rules, sampling=sampling)
    for index, (prompt, rule, result) in enumerate(zip(prompts, rules, many, strict=True)):
        own = ea.generate(prompt, max_new_tokens=12, verify=rule, sampling=sampling.replace(seed=3 + index))
        assert (result.token_ids, result.text, result.rule) == (own.token_ids, own.text, own.rule)
    stop = many[0].text[:2]
    stopped = ea.generate_many(prompts[:1], max_new_tokens=12, verify=EXACT, sampling=sampling, stop=stop)[0]
    assert (stopped.text, stopped.finish_reason) == ("", "stop")
    assert ea.generate_many([]) == []
    baseline = ea.generate_many(prompts, batch_size=2, max_new_tokens=12, method="autoregressive")
    assert {result.rule for result in baseline} == {"autoregressive"}
    for prompt, result in zip(prompts, baseline, strict=True):
        assert result.token_ids == ea.generate(prompt, max_new_tokens=12, method="autoregressive").token_ids


def test_a_stop_string_and_a_closed_stream_free_their_places(tiny_pair) -> None:
    ea = EaModel.from_pretrained(*tiny_pair, total_token=8, depth=2, top_k=3)
    batch = ea.new_batch(2)
    text = ea.generate("ab", max_new_tokens=12, verify=EXACT).text
    stopped = ea.stream("ab", max_new_tokens=12, verify=EXACT, stop=text[1:3], batch=batch)
    closed = ea.stream("cd", max_new_tokens=12, verify=EXACT, batch=batch)
    next(closed.cycles())
    next(stopped.cycles())
    while not batch.free:
        next(stopped.cycles())  # there is always one: the cycle that finds the stop string frees the place
    assert stopped.result.finish_reason == "stop"
    closed.close()
    assert batch.free == 2


def test_generate_many_refuses_what_cannot_be(tiny_pair) -> None:
    ea = EaModel.from_pretrained(*tiny_pair)
    with pytest.raises(ConfigError, match="one for each"):
        ea.generate_many(["a", "b"], verify=[EXACT])
    with pytest.raises(ConfigError, match="1 or more"):
        ea.generate_many(["a"], batch_size=0)
    with pytest.raises(ConfigError, match="give a list"):
        ea.generate_many("ab")
    with pytest.raises(ConfigError, match="another method"):
        ea.stream("a", method="autoregressive", batch=ea.new_batch(1))
    with pytest.raises(ConfigError, match="leave draft out"):
        ea.generate_many(["a"], draft=TREE, method="autoregressive")
    with pytest.raises(ConfigError, match="another method"):
        ea.stream("a", batch=ea.new_batch(1, method="autoregressive"))
