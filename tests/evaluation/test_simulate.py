from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from eagle_mars import EaModel, VerifyConfig
from eagle_mars.config import DraftConfig
from eagle_mars.engine import Request
from eagle_mars.tree import DraftTree
from evaluation.bench_simulate import Arm
from evaluation.nodes import decode
from evaluation.scaling import tables
from evaluation.simulate import Acceptance, Clock, pool, sizes

ROOT = Path(__file__).parents[2]
EXACT = VerifyConfig(rule="exact")


def script():
    spec = importlib.util.spec_from_file_location("simulate_script", ROOT / "scripts" / "simulate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_draft_needs_the_nodes_that_score_better() -> None:
    #       0 ── 1 (-.1) ── 3 (-.5)        by score: 1, 2, 4, 3
    #         └─ 2 (-.3) ── 4 (-.2)
    tree = DraftTree.from_parents(
        torch.tensor([[9, 1, 2, 3, 4]]),
        torch.tensor([[-1, 0, 0, 1, 2]]),
        torch.tensor([[0.0, -0.1, -0.3, -0.5, -0.2]]),
        max_depth=2,
    )
    assert sizes(tree, [1, 3]) == [{0: 2, 1: 2}, {1: 5}]
    assert sizes(tree, [2, 4]) == [{0: 3, 1: 3}, {1: 4}]


@pytest.mark.parametrize(("nodes", "depth"), [(2, 0), (4, 1), (6, 2), (9, 2), (13, 3)])
def test_one_log_of_the_pool_tells_what_a_tree_of_it_accepts_from_the_same_roots(
    nodes: int, depth: int, tiny_pair: tuple[str, str]
) -> None:
    ea = EaModel.from_pretrained(*tiny_pair)
    ids = torch.tensor([ea.text_ids("ab")])
    log, smaller, tree = Acceptance(), [], DraftConfig(total_token=nodes, depth=depth, top_k=3)

    def both(drafted: DraftTree, logits: torch.Tensor, *arguments, **options):
        verdict = log(drafted, logits, *arguments, **options)
        if drafted.nodes > 1:
            kept = _part(drafted, tree)
            cut = DraftTree.from_parents(drafted.tokens[:, kept], _renumbered(drafted, kept), max_depth=tree.levels)
            smaller.append(int(log.inner(cut, logits[:, kept], *arguments, **options).n_accepted))
        return verdict

    decode(ea, ids, Request(40, pool(3, 3), EXACT), both)
    assert log.tau(tree) == pytest.approx(1 + sum(smaller) / len(smaller))
    assert max(smaller) > 0


def _part(drafted: DraftTree, tree: DraftConfig) -> list[int]:
    """Nodes of the pool that growth would have kept, by its own order: score, then flat number."""
    scores = (drafted.ancestors[0].double() @ drafted.draft_logprob[0].double()).tolist()
    shallow = [n for n in range(drafted.nodes) if int(drafted.depth[0, n]) <= tree.levels]
    return sorted(sorted(shallow, key=lambda n: (-scores[n], n))[: tree.total_token])


def _renumbered(drafted: DraftTree, kept: list[int]) -> torch.Tensor:
    place = {node: at for at, node in enumerate(kept)}
    return torch.tensor([[place.get(int(drafted.parents[0, node]), -1) for node in kept]])


def test_a_cycle_is_drafting_and_a_forward() -> None:
    clock = Clock(alone=1.0, forward={1: 1.0, 9: 1.8}, first=0.1, expansion=0.05)
    draft = DraftConfig(total_token=5, depth=2, top_k=2)
    assert clock.cycle(draft) == pytest.approx(0.1 + 2 * 0.05 + 1.4)
    assert clock.speedup(draft, 3.2) == pytest.approx(2.0)


def test_the_page_shows_what_the_script_computes() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text("utf-8")
    assert all(part in page for part in tables().strip().split("\n\n"))


def test_the_check_compares_every_configuration(tiny_pair: tuple[str, str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ab\ncd\n")
    options = ["--model", tiny_pair[0], "--head", tiny_pair[1], "--prompts", str(prompts), "--every", "1"]
    options += ["--max-new-tokens", "16", "--no-cpu-pack", "--threads", "1", "--out", str(tmp_path)]
    done = CliRunner().invoke(script().app, ["check", "exact:4,1,2", "mars:chain-2", *options])
    assert done.exit_code == 0, done.output
    table = (tmp_path / "simulate.md").read_text()
    assert "| exact:4,1,2 |" in table
    assert "| mars:chain-2 |" in table


def test_a_configuration_names_rule_and_tree() -> None:
    assert Arm.parse("mars:8,3,4").draft == DraftConfig(total_token=8, depth=3, top_k=4)
    with pytest.raises(ValueError, match="typical:8,3,4"):
        Arm.parse("typical:8,3,4")
