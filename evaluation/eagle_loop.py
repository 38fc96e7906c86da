"""EAGLE's decoding loop as a baseline for the engine around the forward passes (EAGLE_SPEC sections 3, 4.4 and 8.2).

Re-expressed from its description. What makes it slower is there on purpose: the tree, its mask and its paths are built
by Python loops over nodes, logits are gathered once per path, the head's keys and values grow by concatenation, whole
answers become lists for the stop test, and a tree is drafted that nobody verifies. Target, head and cache are the
engine's own, so that two runs differ in nothing but the loop. Greedy and lossless; one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from eagle_mars import DraftConfig, EaModel, GenerationResult
from eagle_mars.draft.proposer import KeyValue, Proposer
from eagle_mars.result import Provenance
from eagle_mars.tree import DraftTree


@torch.inference_mode()
def decode(
    ea: EaModel, draft: DraftConfig, prompt: Sequence[int], limit: int, on_prefill: Callable[[], None] = lambda: None
) -> GenerationResult:
    """The target's greedy answer. on_prefill: called before the first tree is drafted."""
    started = perf_counter()
    target, head = ea.target, ea.ea_layer
    ids = torch.tensor([list(prompt)], device=target.device)
    cache = target.new_cache(1, len(prompt) + limit + 2 * draft.total_token)
    out = target.prefill(ids, cache)
    drafter = _Drafter(head, draft)
    on_prefill()
    prefilled = perf_counter()
    root = out.logits[:, -1].argmax(-1, keepdim=True)
    ids = torch.cat((ids, root), dim=1)
    tree, paths = drafter.tree(out.features, ids[:, head.first_row :], root)
    accepted: list[int] = []
    while True:
        out = target.forward_tree(tree, cache)
        path = _walk(tree, paths, out.logits)
        cache.commit([path])
        accepted.append(len(path) - 1)
        root = out.logits[:, path[-1]].argmax(-1, keepdim=True)
        fresh = torch.cat((tree.tokens[:, path[1:]], root), dim=1)
        ids = torch.cat((ids, fresh), dim=1)
        features = None if out.features is None else out.features[:, path]
        tree, paths = drafter.tree(features, fresh, root)
        if any(stop in ids[0, len(prompt) :].tolist() for stop in ea.stop_ids):
            break
        if ids.shape[1] - len(prompt) >= limit:
            break
    return _result(ea, prompt, ids[0, len(prompt) :].tolist()[:limit], accepted, started, prefilled)


class _Drafter:
    """Head state of one response. Rows are the head's, one per token that it has been fed."""

    def __init__(self, head: Proposer, config: DraftConfig) -> None:
        self.head = head
        self.config = config
        self.stable: list[KeyValue] = head.allocate(1, 0)

    def tree(self, features: Tensor | None, tokens: Tensor, root: Tensor) -> tuple[DraftTree, list[list[int]]]:
        """Feed the accepted rows, grow a tree under `root` [1, 1]; the tree and its paths, padded with -1."""
        rows = self.stable[0][0].shape[2]
        fed = tokens.shape[1]
        self.stable = _longer(self.stable, fed)
        positions = torch.arange(rows, rows + fed, device=root.device).unsqueeze(0)
        mask = None
        if rows:
            seen = torch.ones(fed, rows + fed, dtype=torch.bool, device=root.device)
            mask = seen.tril(rows).view(1, 1, fed, -1)
        x = self.head.fuse(torch.empty(1, fed, 0) if features is None else features)
        output = self.head(x, tokens, positions, mask, self.stable, rows)[:, -1:]
        tree, paths = _assemble(*self._grow(output, rows + fed), root.cpu(), self.config)
        return tree.to(root.device), paths

    def _grow(self, output: Tensor, rows: int) -> tuple[list[float], list[int], list[int]]:
        """Score, token and parent (its number, -1 for the root) of every candidate."""
        k, kv, device = self.config.top_k, self.stable, output.device
        best = self.head.logits(output).float().log_softmax(-1).topk(k, dim=-1)
        tokens, beam_scores = self.head.to_target(best.indices)[0, 0], best.values[0, 0]
        all_scores, all_tokens, parents = beam_scores.tolist(), tokens.tolist(), [-1] * k
        beam = list(range(k))
        own = torch.eye(k, dtype=torch.bool, device=device)
        x, seen, stable = output.expand(-1, k, -1), own, torch.ones(k, rows, dtype=torch.bool, device=device)
        for step in range(self.config.depth):
            kv = _longer(kv, k)
            mask = torch.cat((stable, seen), dim=1).view(1, 1, k, -1)
            positions = torch.full((1, k), rows + step, device=device)
            output = self.head(x, tokens.unsqueeze(0), positions, mask, kv, rows + step * k)
            best = self.head.logits(output).float().log_softmax(-1).topk(k, dim=-1)
            scores = (beam_scores.unsqueeze(1) + best.values[0]).flatten()
            children = self.head.to_target(best.indices)[0].flatten()
            first = len(all_scores)
            all_scores += scores.tolist()
            all_tokens += children.tolist()
            parents += [beam[number // k] for number in range(k * k)]
            chosen = scores.topk(k)
            slots = chosen.indices // k
            beam = [first + number for number in chosen.indices.tolist()]
            tokens, beam_scores, x = children[chosen.indices], chosen.values, output[:, slots]
            seen = torch.cat((seen[slots], own), dim=1)
        return all_scores, all_tokens, parents


def _longer(cache: list[KeyValue], rows: int) -> list[KeyValue]:
    return [
        (torch.cat((keys, keys[:, :, :0].new_empty(*keys.shape[:2], rows, keys.shape[3])), dim=2),
         torch.cat((values, values[:, :, :0].new_empty(*values.shape[:2], rows, values.shape[3])), dim=2))
        for keys, values in cache
    ]  # fmt: skip


def _assemble(
    scores: list[float], tokens: list[int], parents: list[int], root: Tensor, config: DraftConfig
) -> tuple[DraftTree, list[list[int]]]:
    """The best candidates as a tree, node by node."""
    best = torch.tensor(scores).sort(descending=True, stable=True).indices[: config.total_token - 1]
    chosen = sorted(best.tolist())
    nodes = len(chosen) + 1
    own_parents = [-1] + [0 if parents[flat] < 0 else chosen.index(parents[flat]) + 1 for flat in chosen]
    ancestors = torch.eye(nodes, dtype=torch.bool)
    depth = [0] * nodes
    for node in range(1, nodes):
        ancestors[node] |= ancestors[own_parents[node]]
        depth[node] = depth[own_parents[node]] + 1
    paths = []
    for leaf in (node for node in range(nodes) if node not in own_parents):
        path = [leaf]
        while own_parents[path[-1]] >= 0:
            path.append(own_parents[path[-1]])
        paths.append(path[::-1] + [-1] * (config.levels + 1 - len(path)))
    tree = DraftTree(
        tokens=torch.cat((root, torch.tensor([[tokens[flat] for flat in chosen]])), dim=1),
        parents=torch.tensor([own_parents]),
        depth=torch.tensor([depth]),
        ancestors=ancestors.unsqueeze(0),
        draft_logprob=torch.zeros(1, nodes),
        max_depth=config.levels,
    )
    return tree, paths


def _walk(tree: DraftTree, paths: list[list[int]], logits: Tensor) -> list[int]:
    """The longest path whose every draft is the target's choice; logits are gathered per path."""
    table = torch.tensor(paths, device=logits.device)
    choices = logits[0, table].argmax(-1)
    drafts = tree.tokens[0, table]
    right = (drafts[:, 1:] == choices[:, :-1]) & (table[:, 1:] >= 0)
    lengths = right.int().cumprod(1).sum(1)
    length = int(lengths.max().item())
    return paths[int(lengths.argmax().item())][: length + 1]


def _result(
    ea: EaModel, prompt: Sequence[int], tokens: list[int], accepted: list[int], started: float, prefilled: float
) -> GenerationResult:
    stop = next((index for index, token in enumerate(tokens) if token in ea.stop_ids), None)
    kept = tokens if stop is None else tokens[: stop + 1]
    kinds: list[Provenance] = ["target"]
    for length in accepted:
        kinds.extend(["exact"] * length)
        kinds.append("target")
    text = ea.tokenizer.decode(kept, skip_special_tokens=True)
    return GenerationResult(
        prompt_tokens=len(prompt),
        token_ids=tuple(kept),
        provenance=tuple(kinds[: len(kept)]),
        text=text,
        pieces=((text, "target"),),
        finish_reason="length" if stop is None else "stop",
        accepted_lengths=tuple(accepted),
        regret=0.0,
        low_margin=0,
        rescued=0,
        nonpositive_top=0,
        prefill_seconds=prefilled - started,
        decode_seconds=perf_counter() - prefilled,
        rule="eagle-loop",
    )
