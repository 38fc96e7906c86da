"""Posteriors recorded from the released EAGLE and MARS code (tests/golden/posterior), with its own coins.

`exact` has to repeat EAGLE, `mars-released` the released MARS, path by path; the token after the path is compared
through the distribution that the released code would draw it from.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from eagle_mars.config import SamplingConfig, VerifyConfig
from eagle_mars.sampling import Coins
from eagle_mars.tree import DraftTree
from eagle_mars.verify import HostVerdict, unpack, verify

GOLDEN = Path(__file__).parents[1] / "golden" / "posterior"
SAMPLINGS = {
    "t1": {"temperature": 1.0},
    "t1p90": {"temperature": 1.0, "top_p": 0.9},
    "t1k20": {"temperature": 1.0, "top_k": 20},
    "t07": {"temperature": 0.7},
    "t07p90k20": {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
}
DRAWS = (torch.arange(9, dtype=torch.float64) + 0.5) / 9


def golden_tree(tensors: dict[str, Tensor], name: str) -> DraftTree:
    tokens = tensors[f"{name}.draft_tokens"].view(1, -1)
    parents = torch.full_like(tokens, -1)
    for path in tensors[f"{name}.retrieve_indices"].tolist():
        for parent, node in pairwise(path):
            if node >= 0:
                parents[0, node] = parent
    logprob = torch.zeros(tokens.shape)
    for path, probs in zip(
        tensors[f"{name}.retrieve_indices"].tolist(), tensors[f"{name}.retrieve_probs"].tolist(), strict=True
    ):
        for node, prob in zip(path, probs, strict=True):
            if node > 0:
                logprob[0, node] = torch.tensor(prob).log()
    return DraftTree.from_parents(tokens, parents, logprob)


def released_order(logits: Tensor, args: dict[str, Any]) -> tuple[Tensor, SamplingConfig]:
    """The released code truncates by top-p before top-k; only where both are set does that differ from our order."""
    if not (args.get("top_p") and args.get("top_k")):
        return logits, SamplingConfig(**args)
    ids = torch.zeros(len(logits), 1, dtype=torch.long)
    warped = TopPLogitsWarper(args["top_p"])(ids, logits / args["temperature"])
    return TopKLogitsWarper(args["top_k"])(ids, warped), SamplingConfig(temperature=1)


def config_of(variant: str) -> VerifyConfig:
    if variant == "eagle":
        return VerifyConfig(rule="exact")
    if variant == "mars-noprobs-off":
        return VerifyConfig(rule="mars-released", released_ratio=False, released_q="one")
    if variant == "mars-off":
        return VerifyConfig(rule="mars-released", released_ratio=False)
    return VerifyConfig(rule="mars-released", theta=float(variant.removeprefix("mars-")))


def coins_in_order(tree: DraftTree, path: list[int], relaxed: list[bool], uniforms: list[float]) -> Tensor:
    """Give each recorded coin to the node that used it: siblings in order at each node not decided by the ratio."""
    coins = torch.full(tree.tokens.shape, 0.5, dtype=torch.float64)
    left = iter(uniforms)
    for node, following, by_ratio in zip(path, [*path[1:], None], relaxed, strict=True):
        children = [] if by_ratio else [i for i, p in enumerate(tree.parents[0].tolist()) if p == node]
        for child in children:
            coins[0, child] = next(left)
            if child == following:
                break
    assert next(left, None) is None, "the recorded walk used more coins than the recorded path explains"
    return coins


def ratio_flags(run: dict[str, Any], steps: int) -> list[bool]:
    """Which nodes of the path the released code decided by the ratio, from the ratios that it logged."""
    if run["collector"] is None or not run["variant"].startswith("mars-0"):
        return [False] * steps
    flags = [ratio > float(run["variant"].removeprefix("mars-")) for ratio in run["collector"]["logit_ratios"]]
    return flags + [False] * (steps - len(flags))


def replay(
    tree: DraftTree, logits: Tensor, run: dict[str, Any], path: list[int], args: dict[str, Any]
) -> list[HostVerdict]:
    """The recorded decision once per entry of `DRAWS`, with the recorded coins."""
    logits, sampling = released_order(logits, args)
    coins = coins_in_order(tree, path, ratio_flags(run, len(path)), run["uniforms"])
    many = len(DRAWS)
    batch = DraftTree.from_parents(
        tree.tokens.expand(many, -1), tree.parents.expand(many, -1), tree.draft_logprob.expand(many, -1)
    )
    verdict = verify(
        batch,
        logits.expand(many, -1, -1),
        config_of(run["variant"]),
        Coins(coins.expand(many, -1), DRAWS),
        sampling=sampling,
    )
    return unpack(verdict.pack(batch), batch.max_depth)


def assert_drawn_from(verdicts: list[HostVerdict], sample_p: Tensor) -> None:
    cumulative = sample_p.double().cumsum(0)
    for draw, verdict in zip(DRAWS * cumulative[-1], verdicts, strict=True):
        if (cumulative - draw).abs().min() > 1e-5:  # the recorded p is float32: nearer coins may fall either way
            assert verdict.next_token == int((cumulative <= draw).sum())


def load(kind: str) -> tuple[dict[str, Tensor], Any]:
    return load_file(GOLDEN / f"{kind}.safetensors"), json.loads((GOLDEN / f"{kind}.json").read_text())


@pytest.mark.parametrize("kind", ["recorded", "handcrafted"])
def test_greedy(kind: str) -> None:
    tensors, manifest = load(kind)
    for case in manifest if kind == "recorded" else manifest["cases"]:
        name = f"case{case['case']}" if kind == "recorded" else case["name"]
        tree = golden_tree(tensors, name)
        path = tensors[f"{name}.retrieve_indices"][case["greedy"]["best"]][: case["greedy"]["acc"] + 1].tolist()
        for rule in ("exact", "mars-released", "typical"):
            verdict = verify(tree, tensors[f"{name}.tree_logits"].unsqueeze(0), VerifyConfig(rule=rule))
            [host] = unpack(verdict.pack(tree), tree.max_depth)
            assert host.path == path, name
            assert host.next_token == int(tensors[f"{name}.greedy.sample_p"].argmax())


def test_recorded_posteriors() -> None:
    tensors, cases = load("recorded")
    for case in cases:
        name = f"case{case['case']}"
        tree, rows = golden_tree(tensors, name), tensors[f"{name}.retrieve_indices"]
        for run in case["runs"]:
            path = rows[run["best"]][: run["acc"] + 1].tolist()
            verdicts = replay(tree, tensors[f"{name}.tree_logits"], run, path, SAMPLINGS[run["sampling"]])
            assert [v.path for v in verdicts] == [path] * len(DRAWS), run["key"]
            assert_drawn_from(verdicts, tensors[run["sample_p_key"]])


def test_handcrafted_posteriors() -> None:
    """All but the runs where even the recorder's threshold of 1e30 relaxed, which no VerifyConfig can ask for: where
    truncation leaves one token with a negative logit, the released ratio is -inf / -x = inf.
    """
    tensors, manifest = load("handcrafted")
    for case in manifest["cases"]:
        name = case["name"]
        tree, rows = golden_tree(tensors, name), tensors[f"{name}.retrieve_indices"]
        logits = tensors[f"{name}.tree_logits"].clone()
        if name == "exact_tie_top2":
            logits[2, 2] -= 1e-6  # of three tied tokens, torch.topk took ids 1 and 4 there: no order to repeat
        for run in case["runs"]:
            if run["variant"] == "mars-off" and float("inf") in run["collector"]["logit_ratios"]:
                continue
            path = rows[run["best"]][: run["acc"] + 1].tolist()
            verdicts = replay(tree, logits, run, path, manifest["processors"][run["proc"]])
            assert [v.path for v in verdicts] == [path] * len(DRAWS), (name, run["proc"], run["variant"])
            assert_drawn_from(verdicts, torch.tensor(run["sample_p"]))
