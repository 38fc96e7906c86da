"""What strict verification met at every node that it tested: the two best logits, and whether it rejected the drafts.

`NodeLog` stands in for `verify` in an engine. From its nodes come the paper's logit statistics (its Figs 1 and 4) and
the calibration of a margin (`evaluation.theta_card`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_mars import EaModel, GenerationResult
from eagle_mars.engine import Engine, Request
from eagle_mars.stream import ResponseStream
from eagle_mars.tree import DraftTree
from eagle_mars.verify import Verdict, verify
from evaluation.data.questions import fingerprint
from evaluation.metrics import Cell, interval, ratio
from evaluation.models import Conversations, ModelConfig
from evaluation.plan import Run
from evaluation.provenance import write_atomically
from evaluation.watch import walked

THETA = 0.9


@dataclass(frozen=True)
class LoggedNode:
    """A node of the accepted path with at least one drafted child.

    z1, z2: its two best raw logits. rejected: no child was accepted. runner_up: the second best token was drafted.
    """

    z1: float
    z2: float
    rejected: bool
    runner_up: bool

    @property
    def ratio(self) -> float:
        """z2/z1; 0 where z1 <= 0, which never fires."""
        return self.z2 / self.z1 if self.z1 > 0 else 0.0

    def fires(self, theta: float) -> bool:
        """Low margin under the paper's ratio."""
        return self.z1 > 0 and self.z2 > theta * self.z1


@dataclass
class NodeLog:
    """A verifier that logs the nodes which `inner` tested."""

    inner: Callable[..., Verdict] = verify
    nodes: list[LoggedNode] = field(default_factory=list)

    def __call__(self, tree: DraftTree, logits: Tensor, *arguments: Any, **options: Any) -> Verdict:
        verdict = self.inner(tree, logits, *arguments, **options)
        path = walked(verdict).tolist()
        best = logits[0, path].float().topk(2)
        tested = zip(path, best.values.tolist(), best.indices.tolist(), strict=True)
        for node, (z1, z2), (_, second) in tested:
            children = tree.tokens[0, tree.parents[0] == node].tolist()
            if children:
                self.nodes.append(LoggedNode(z1, z2, node == path[-1], second in children))
        return verdict


def decode(ea: EaModel, prompt: Tensor, request: Request, verifier: Callable[..., Verdict]) -> GenerationResult:
    """The response to prompt ids [1, L] with `verifier` in the place of `verify`. request: without stop ids."""
    steps = Engine(ea.target, ea.ea_layer, verifier=verifier).speculate(prompt, request)
    return ResponseStream(steps, ea.tokenizer, prompt.shape[1], (), request.verify.rule, "").result


def node_cells(logged: Sequence[Sequence[LoggedNode]]) -> dict[str, Cell]:
    """Logit statistics of the nodes of each question, with intervals by question.

    Keys: nodes, low margin (share of tested nodes with z2/z1 > 0.9), rejected at low margin (share of those where
    strict verification rejected every draft), runner-up drafted (share of those rejections), median z1, median gap
    (nats).
    """
    counts = [[float(part(nodes)) for nodes in logged] for part in _COUNTS]
    tested, low, rejected, drafted = counts
    everything = [node for nodes in logged for node in nodes]

    def share(above: Sequence[float], below: Sequence[float]) -> Cell:
        return interval([above, below], ratio) if sum(below) else Cell.empty("no such node was met")

    return {
        "low margin": share(low, tested),
        "rejected at low margin": share(rejected, low),
        "runner-up drafted": share(drafted, rejected),
        "median z1": _median([node.z1 for node in everything]),
        "median gap": _median([node.z1 - node.z2 for node in everything]),
        "nodes": Cell(float(len(everything))),
    }


def log_questions(run: Run, load: Callable[[ModelConfig], EaModel]) -> list[list[LoggedNode]]:
    """The nodes of each question's first turn, decoded strictly; what was logged before is read, not repeated."""
    path = log_file(run)
    done = read_log(path)
    left = [question for question in run.asked if str(question.question_id) not in done]
    if left:
        ea = load(run.settings.model)
        conversations = Conversations(ea, run.settings.model)
        verify_config = run.settings.verify
        assert verify_config is not None  # a table that logs nodes has no `ar` arm
        for question in left:
            log = NodeLog()
            request = Request(
                run.settings.max_new_tokens,
                draft=ea.draft,
                verify=verify_config,
                sampling=run.settings.sampling(question, 0, 0),
                stop_ids=ea.stop_ids,
                special_ids=ea.special_ids,
            )
            decode(ea, conversations.ids([{"role": "user", "content": question.turns[0]}]), request, log)
            done[str(question.question_id)] = log.nodes
            rows = ({"question_id": name, "nodes": [asdict(node) for node in nodes]} for name, nodes in done.items())
            write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
    return [done[str(question.question_id)] for question in run.asked]


def log_file(run: Run) -> Path:
    """Where the nodes of a run lie; other questions have another file."""
    name = f"{run.settings.model_id}-{fingerprint(run.questions)[:8]}.jsonl"
    return run.answer_file.parents[2] / "nodes" / run.settings.bench_name / name


def read_log(path: Path) -> dict[str, list[LoggedNode]]:
    """Question id → nodes; nothing if there is no log yet."""
    if not path.is_file():
        return {}
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return {str(row["question_id"]): [LoggedNode(**node) for node in row["nodes"]] for row in rows}


def _median(values: Sequence[float]) -> Cell:
    return Cell(float(torch.tensor(values).median())) if values else Cell.empty("no node was tested")


_COUNTS: tuple[Callable[[Sequence[LoggedNode]], int], ...] = (
    len,
    lambda nodes: sum(node.fires(THETA) for node in nodes),
    lambda nodes: sum(node.fires(THETA) and node.rejected for node in nodes),
    lambda nodes: sum(node.fires(THETA) and node.rejected and node.runner_up for node in nodes),
)
