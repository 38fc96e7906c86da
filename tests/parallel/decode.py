"""Decode with a tiny pair in every process of torchrun: `-m tests.parallel.decode TARGET HEAD OUT`.

Process r writes OUT.r: texts by name, and the errors that broken runs ended with.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from eagle_mars import DraftConfig, EaModel, SamplingConfig, VerifyConfig
from eagle_mars.engine import Engine, Request
from eagle_mars.errors import RanksError
from eagle_mars.loading import tensor_parallel_options
from eagle_mars.model import Method
from eagle_mars.verify import Verdict, verify
from evaluation import run
from tests.evaluation.running import arguments

EXACT, MARS = VerifyConfig(rule="exact"), VerifyConfig(theta=0.7)
WARM = SamplingConfig(temperature=0.9, seed=3)
PROMPTS = ["ab", "a prompt of several chunks"]
NEW = 12
METHODS: tuple[Method, Method] = ("speculative", "autoregressive")
ARMS: dict[str, dict[str, Any]] = {
    "exact": {"verify": EXACT},
    "mars": {"verify": MARS},
    "sampled": {"verify": EXACT, "sampling": WARM},
    "sampled mars": {"verify": MARS, "sampling": WARM},
    "alone": {"method": "autoregressive"},
}


def load(target: str, head: str, **options: Any) -> EaModel:
    return EaModel.from_pretrained(target, head, 12, 3, 4, dtype=torch.float32, prefill_chunk=16, **options)


def texts(ea: EaModel) -> dict[str, list[list[int]]]:
    """Ids of the answers to all prompts, by the name of what they were decoded with."""
    found = {
        name: [list(ea.generate(prompt, max_new_tokens=NEW, **options).token_ids) for prompt in PROMPTS]
        for name, options in ARMS.items()
    }
    together = ea.generate_many(PROMPTS, batch_size=2, max_new_tokens=NEW, verify=EXACT)
    return {**found, "together": [list(result.token_ids) for result in together]}


def main(target: str, head: str, out: str) -> None:
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ea = load(target, head, **tensor_parallel_options(size))
    report: dict[str, Any] = {"texts": texts(ea), "kv_heads": ea.target.kv_heads}
    torch.manual_seed(100 + rank)  # no seed given: process 0's, which the others can't know by themselves
    report["unseeded"] = ea.generate("ab", max_new_tokens=NEW, sampling=SamplingConfig(temperature=0.9)).token_ids
    report["errors"] = {
        "prompt": _error(lambda: ea.generate("ab"[rank], max_new_tokens=4)),
        "options": _error(lambda: ea.generate("ab", max_new_tokens=4 + rank)),
        "method": _error(lambda: ea.generate("ab", max_new_tokens=4, verify=EXACT, method=METHODS[rank])),
        "tree": _error(lambda: _draft_differently(ea, rank)),
        "fault": _error(lambda: _fail_differently(ea, rank)),
        "verdict": _error(lambda: _decode_differently(ea, rank)),
    }
    report["after"] = ea.generate(PROMPTS[0], max_new_tokens=NEW, verify=EXACT).token_ids
    Path(f"{out}.{rank}").write_text(json.dumps(report))
    question = Path(f"{out}.question.{rank}")
    question.write_text(json.dumps({"question_id": 1, "category": "writing", "turns": ["ab", "c"]}))
    flags = ("--tensor-parallel", str(size), "--method", "exact")
    evaluation = arguments((target, head), question, Path(f"{out}.jsonl"), *flags)
    run.app(evaluation, standalone_mode=False)  # ends with the processes' group


def _decode_differently(ea: EaModel, rank: int) -> None:
    """A process whose third verdict gives another token than the others', as a defect of its hardware could."""
    verdicts = 0

    def verifier(*arguments: Any, **options: Any) -> Verdict:
        nonlocal verdicts
        verdicts += 1
        verdict = verify(*arguments, **options)
        return replace(verdict, next_token=verdict.next_token ^ 1) if rank == 1 and verdicts == 3 else verdict

    request = Request(60, DraftConfig.chain(1), EXACT)
    ids = torch.tensor([ea.text_ids("ab")])
    for _ in Engine(ea.target, ea.ea_layer, verifier).speculate(ids, request):
        assert verdicts <= 3, "two processes went on with different tokens"


def _draft_differently(ea: EaModel, rank: int) -> None:
    """A process whose head drafts another token, which its own target never gets to verify."""
    original = ea.target.require_same

    def require_same(what: str, *facts: Any) -> None:
        if what == "what they drafted" and rank == 1:
            facts = (facts[0] ^ 1, *facts[1:])
        original(what, *facts)

    with patch.object(ea.target, "require_same", require_same):
        ea.generate("ab", max_new_tokens=8, verify=EXACT)


def _fail_differently(ea: EaModel, rank: int) -> None:
    """A process whose logits alone are unusable: the others mustn't wait for it."""

    def verifier(tree: Any, logits: torch.Tensor, *arguments: Any, **options: Any) -> Verdict:
        return verify(tree, logits * torch.nan if rank == 1 else logits, *arguments, **options)

    request = Request(60, DraftConfig.chain(1), EXACT)
    list(Engine(ea.target, ea.ea_layer, verifier).speculate(torch.tensor([ea.text_ids("ab")]), request))


def _error(decode: Any) -> str:
    try:
        decode()
    except RanksError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
