"""SGLang 0.5.23's own verification with MARS hooked in, against `eagle_mars.verify`, path by path.

SGLANG_SOURCES=DIR TRITON_INTERPRET=1 python -m pytest tests/engines/e2e/check_sglang.py -s
DIR: the unpacked wheel. Needs msgspec. The rows of the table land in runs/engines/sglang.md.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_mars.config import SamplingConfig, VerifyConfig
from eagle_mars.engines import sglang as plugin
from eagle_mars.engines.request import MarsRequest
from eagle_mars.sampling import Coins
from eagle_mars.tree import DraftTree
from eagle_mars.verify import Verdict, verify
from eagle_mars.verify.plan import plan
from eagle_mars.verify.statistics import Candidates
from tests.engines.e2e import sglang_stand as stand
from tests.engines.links import drafted_case

ROOT = Path(__file__).parents[3]
SOURCES = Path(os.environ["SGLANG_SOURCES"])
VOCAB = 12
PROTECTED = (0, 3)
OPTIONS: list[dict[str, Any]] = [
    {"mars_theta": 1.0},
    {"mars_theta": 0.9},
    {"mars_theta": 0.7},
    {"mars_theta": 0.7, "mars_max_relaxed": 1},
    {"mars_gap": 1.5},
    {},
]
DEFAULT = MarsRequest(theta=0.8)


class Tokenizer:
    all_special_ids = PROTECTED[:1]

    def get_added_vocab(self) -> dict[str, int]:
        return {"<think>": PROTECTED[1]}


@pytest.fixture(scope="module")
def eagle() -> ModuleType:
    module = stand.load(SOURCES)
    stand.install(DEFAULT)
    return module


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    rows = [
        "| SGLang's verifier | trees | drafts accepted: strict | with MARS | relaxed | paths that differ |",
        "|---|---|---|---|---|---|",
    ]
    yield rows
    out = ROOT / "runs" / "engines" / "sglang.md"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(rows) + "\n", "utf-8")


def requests(count: int, greedy: Tensor | None = None) -> list[SimpleNamespace]:
    """Requests as the scheduler sees them: their `SamplingParams` went through SGLang's admission and our hook."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    tokenizer, made = Tokenizer(), []
    for i in range(count):
        params = SamplingParams(
            temperature=0.0 if greedy is None or greedy[i] else 1.0, custom_params=OPTIONS[i % len(OPTIONS)]
        )
        params.verify(VOCAB)
        made.append(
            SimpleNamespace(
                sampling_params=params,
                grammar=None,
                custom_logit_processor=None,
                tokenizer=tokenizer,
                eos_token_ids=None,
                customized_info=None,
            )
        )
    return made


def configs(count: int) -> list[VerifyConfig]:
    """The same options in the core's words, written out again."""
    common = {"protected_ids": PROTECTED}
    each = [
        VerifyConfig(theta=None),
        VerifyConfig(theta=0.9, **common),
        VerifyConfig(theta=0.7, **common),
        VerifyConfig(theta=0.7, max_relaxed_per_cycle=1, **common),
        VerifyConfig(margin="logit-gap", gap=1.5, **common),
        VerifyConfig(theta=0.8, **common),
    ]
    return [each[i % len(each)] for i in range(count)]


def pruned(tree: DraftTree, levels: int) -> DraftTree:
    """What the core is given where the engine's walk ends before the tree does."""
    parents = tree.parents.masked_fill(tree.depth > levels, -1)
    return DraftTree.from_parents(tree.tokens, parents, tree.draft_logprob, max_depth=levels)


def distinct(logits: Tensor) -> Tensor:
    """Without ties: which of two equal tokens top-k or top-p keeps is not ours to say."""
    return logits + torch.rand(logits.shape, generator=torch.Generator().manual_seed(9)) / 16


def differing(mine: tuple[Tensor, Tensor, Tensor], core: Verdict) -> int:
    path, following, relaxed = mine
    same = (path == core.path).all(-1) & (following == core.next_token) & (relaxed == core.relaxed[:, 1:]).all(-1)
    return int((~same).sum())


def row(name: str, mine: tuple[Tensor, Tensor, Tensor], strict: Verdict, wrong: int) -> str:
    path, _, relaxed = mine
    accepted = int((path[:, 1:] >= 0).sum())
    return f"| {name} | {len(path)} | {int(strict.n_accepted.sum())} | {accepted} | {int(relaxed.sum())} | {wrong} |"


@pytest.mark.parametrize(("nodes", "levels"), [(8, 7), (16, 15), (16, 2)])
def test_greedy_trees(eagle: ModuleType, table: list[str], nodes: int, levels: int) -> None:
    count = 300
    tree, logits, _ = drafted_case(count, nodes, VOCAB, seed=nodes + levels)
    mine = stand.verify(eagle, tree, logits, requests(count), levels)
    core = verify(pruned(tree, levels), logits, configs(count))
    strict = verify(pruned(tree, levels), logits, VerifyConfig(rule="exact"))
    table.append(row(f"greedy tree (Triton), {nodes} nodes, {levels} levels", mine, strict, differing(mine, core)))
    assert differing(mine, core) == 0
    assert core.relaxed.sum() > 40


def test_a_strict_batch_is_what_sglang_does_alone(eagle: ModuleType) -> None:
    count = 100
    tree, logits, _ = drafted_case(count, 12, VOCAB, seed=3)
    control = [
        r
        for r in requests(6 * count)
        if r.sampling_params.custom_params == {"__eagle_mars": {"theta": 1.0}, "mars_theta": 1.0}
    ]
    mine = stand.verify(eagle, tree, logits, control[:count], 11)
    assert differing(mine, verify(tree, logits, VerifyConfig(rule="exact"))) == 0
    assert not mine[2].any()


def test_admission_is_sglangs_own(eagle: ModuleType) -> None:
    from sglang.srt.sampling.sampling_params import SamplingParams

    for bad in ({"mars_theta": 7}, {"mars_thetta": 0.9}):
        with pytest.raises(ValueError, match="mars_thet"):
            SamplingParams(custom_params=bad).verify(VOCAB)
    with pytest.raises(ValueError, match="A request with regex is never relaxed"):
        SamplingParams(custom_params={"mars_theta": 0.9}, regex="a+").verify(VOCAB)
    with pytest.raises(ValueError, match="top_p"):
        SamplingParams(top_p=7.0).verify(VOCAB)


def sampling(
    count: int, tree: DraftTree, coins: Coins, q: Tensor | None = None
) -> tuple[stand.Sampled, list[SamplingConfig]]:
    """Rows in turn: T = 1, T = 0.7 with top-k, T = 1.3 with top-p, greedy in a sampled batch."""
    kinds = [
        SamplingConfig(temperature=1.0),
        SamplingConfig(temperature=0.7, top_k=4),
        SamplingConfig(temperature=1.3, top_p=0.8),
        SamplingConfig(temperature=0.0),
    ]
    each = [kinds[i // len(OPTIONS) % len(kinds)] for i in range(count)]
    whole = 1 << 30
    return (
        stand.Sampled(
            temperature=torch.tensor([1.0 if s.greedy else s.temperature for s in each]),
            top_k=torch.tensor([1 if s.greedy else s.top_k or whole for s in each]),
            top_p=torch.tensor([s.top_p for s in each]),
            accept=coins.accept,
            draw=coins.draw.float(),
            q=q,
        ),
        each,
    )


def cores_coins(tree: DraftTree, logits: Tensor, each: list[SamplingConfig], coins: Coins) -> Coins:
    """SGLang's one coin per node as the core's one coin per child, with the same decisions and the same law.

    Children are tried in order in both. Given that the earlier ones, of mass s, were rejected, SGLang's coin c is
    uniform on [s, 1), so u = (c - s) / (1 - s) is uniform on [0, 1), and c < s + p says u < p / (1 - s).
    """
    rows = plan(VerifyConfig(), each, vocab_size=VOCAB, batch=tree.batch)
    c = Candidates(tree, logits, rows, coins.accept)
    before = c.mass_before
    own = (c.of_parent(coins.accept).double() - before) / (1 - before).clamp(min=1e-12)
    return Coins(own.clamp(0, 1 - 2**-24), coins.draw.float().double())


@pytest.mark.parametrize(("nodes", "levels"), [(8, 7), (16, 15), (16, 2)])
def test_sampled_trees(eagle: ModuleType, table: list[str], nodes: int, levels: int) -> None:
    count = 480
    tree, logits, coins = drafted_case(count, nodes, VOCAB, seed=nodes * levels)
    tree, logits = without_repetition(tree), distinct(logits)
    sampled, each = sampling(count, tree, coins)
    greedy = torch.tensor([s.greedy for s in each])
    mine = stand.verify(eagle, tree, logits, requests(count, greedy), levels, sampled)
    tree = pruned(tree, levels)
    own = cores_coins(tree, logits, each, coins)
    core = verify(tree, logits, configs(count), own, sampling=each)
    strict = verify(tree, logits, VerifyConfig(rule="exact"), own, sampling=each)
    name = f"sampled tree (own restatement of the CUDA kernel), {nodes} nodes, {levels} levels"
    table.append(row(name, mine, strict, differing(mine, core)))
    assert differing(mine, core) == 0
    assert core.relaxed.sum() > 40


def without_repetition(tree: DraftTree) -> DraftTree:
    """EAGLE never drafts a token twice among siblings; SGLang would count its probability twice."""
    same = (tree.parents.unsqueeze(2) == tree.parents.unsqueeze(1)) & (
        tree.tokens.unsqueeze(2) == tree.tokens.unsqueeze(1)
    )
    again = (same & torch.ones_like(same[0]).tril(-1)).any(-1)
    lost = (tree.ancestors & again.unsqueeze(1)).any(-1)
    return DraftTree.from_parents(tree.tokens, tree.parents.masked_fill(lost, -1), tree.draft_logprob)


def chain_case(count: int, drafts: int, seed: int) -> tuple[DraftTree, Tensor, Coins]:
    tree, logits, coins = drafted_case(count, drafts + 1, VOCAB, seed)
    best = logits.topk(2).indices[:, :-1]
    tokens = tree.tokens.clone()
    near = torch.rand(count, drafts, generator=torch.Generator().manual_seed(seed)) < 0.7
    tokens[:, 1:] = torch.where(near, best[..., 1], tokens[:, 1:])
    parents = torch.arange(-1, drafts).expand(count, -1).contiguous()
    return DraftTree.from_parents(tokens, parents), distinct(logits), coins


def test_sampled_chains_of_a_greedy_drafter(eagle: ModuleType, table: list[str]) -> None:
    """q is a point mass, so SGLang's test is the core's, coin by coin."""
    count, drafts = 480, 5
    tree, logits, coins = chain_case(count, drafts, seed=6)
    q = torch.zeros(count, drafts, VOCAB).scatter(-1, tree.tokens[:, 1:].unsqueeze(-1), 1.0)
    sampled, each = sampling(count, tree, coins, q)
    greedy = torch.tensor([s.greedy for s in each])
    mine = stand.verify(eagle, tree, logits, requests(count, greedy), drafts, sampled)
    own = cores_coins(tree, logits, each, coins)
    core = verify(tree, logits, configs(count), own, sampling=each)
    strict = verify(tree, logits, VerifyConfig(rule="exact"), own, sampling=each)
    table.append(row("sampled chain (Triton), drafts of a greedy drafter", mine, strict, differing(mine, core)))
    assert differing(mine, core) == 0
    assert core.relaxed.sum() > 40


def test_sampled_chains_of_a_sampling_drafter(eagle: ModuleType, table: list[str]) -> None:
    """With q in the test the core has no rule to compare with: SGLang's test, and `mars`'s relaxation, one by one."""
    count, drafts = 480, 5
    tree, logits, coins = chain_case(count, drafts, seed=7)
    q = torch.rand(count, drafts, VOCAB, generator=torch.Generator().manual_seed(1)).softmax(-1)
    sampled, each = sampling(count, tree, coins, q)
    greedy = torch.tensor([s.greedy for s in each])
    path, _, relaxed = mine = stand.verify(eagle, tree, logits, requests(count, greedy), drafts, sampled)
    rows = plan(configs(count), each, vocab_size=VOCAB)
    c = Candidates(tree, logits, rows, coins.accept)
    greedy_p = c.is_top1.double()
    p = torch.where(greedy.unsqueeze(1), greedy_p, c.p)
    low = c.of_parent(c.low_margin & ~rows.protected.gather(1, c.top.t1) & ~rows.protected.gather(1, c.top.t2))
    loose = (c.is_top1 | c.is_top2) & low & (c.has_mass | greedy.unsqueeze(1))
    strict_total = wrong = 0
    for b in range(count):
        left, expected, flags = int(rows.max_relaxed[b]), [0], []
        while len(expected) <= drafts:
            node = len(expected)
            chance = float(p[b, node]) / float(q[b, node - 1, tree.tokens[b, node]])
            exact = float(coins.accept[b, node - 1]) < chance
            if not exact and not (loose[b, node] and left > 0):
                break
            left -= not exact
            expected.append(node)
            flags.append(not exact)
        strict_total += flags.index(True) if True in flags else len(flags)
        length = len(expected)
        wrong += path[b, :length].tolist() != expected or bool((path[b, length:] >= 0).any())
        wrong += relaxed[b, : length - 1].tolist() != flags
    accepted, told = int((path[:, 1:] >= 0).sum()), int(relaxed.sum())
    table.append(
        f"| sampled chain (Triton), drafts drawn from q | {count} | {strict_total} | {accepted} | {told} | {wrong} |"
    )
    assert wrong == 0
    assert relaxed.sum() > 40
    assert mine[1].max() < VOCAB


# --- names and signatures that the stand replaces


def definition(file: str, *names: str) -> ast.AST:
    node: ast.AST = ast.parse((SOURCES / "sglang" / file).read_text("utf-8"))
    for name in names:
        node = next(n for n in ast.iter_child_nodes(node) if getattr(n, "name", None) == name)
    return node


def parameters(function: ast.AST) -> tuple[str, ...]:
    assert isinstance(function, ast.FunctionDef)
    return tuple(a.arg for a in [*function.args.args, *function.args.kwonlyargs])


def test_the_real_signatures_are_the_known_ones() -> None:
    known = {target.rsplit(".", 1)[1]: names for target, names in plugin.PARAMETERS.items()}
    start = definition("srt/server_args.py", "ServerArgs", "check_server_args")
    assert parameters(start) == known["check_server_args"]
    tree = definition("kernels/ops/speculative/sampling.py", "tree_speculative_sampling_target_only")
    assert parameters(tree) == known["tree_speculative_sampling_target_only"]


def test_the_real_fields_are_there() -> None:
    fields = "".join(path.read_text("utf-8") for path in (SOURCES / "sglang/srt/arg_groups/fields").glob("*.py"))
    for name in (
        "speculative_algorithm", "speculative_accept_threshold_single", "speculative_accept_threshold_acc",
        "speculative_use_block_verification", "enable_watermark", "skip_tokenizer_init", "tokenizer_worker_num",
        "smg_grpc_mode",
    ):  # fmt: skip
        assert f"    {name}: " in fields
    environ = (SOURCES / "sglang/srt/environ.py").read_text("utf-8")
    assert "SGLANG_RUST_SERVER = " in environ
    assert "SGLANG_SIMULATE_ACC_LEN = " in environ
    request = ast.unparse(definition("srt/managers/schedule_batch.py", "Req"))
    for name in ("grammar", "custom_logit_processor", "tokenizer", "eos_token_ids", "customized_info"):
        assert f"self.{name} = " in request or f"self.{name}: " in request
    output = ast.unparse(definition("srt/layers/logits_processor.py", "LogitsProcessorOutput"))
    assert "auxiliary_device_output: " in output
