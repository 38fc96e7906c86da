"""Acceptance of a head on held-out greedy answers, by depth and by kind of prompt: the table of its card.

python scripts/evaluate_head.py --target DIR --checkpoint runs/head/checkpoint.pt --held-out runs/held-out \\
    --questions evaluation/data/heldout_chat.jsonl

The recorded answers are replayed; the target doesn't run.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from eagle_mars.config import DraftConfig
from eagle_mars.training.dataset import ShardDataset
from eagle_mars.training.evaluate import chain_acceptance, tree_tau
from eagle_mars.training.initialise import resumed_point


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="directory or hub id of the target")
    parser.add_argument("--checkpoint", type=Path, required=True, help="checkpoint.pt of a training run")
    parser.add_argument("--held-out", type=Path, required=True, help="directory of shards, answers to --questions")
    parser.add_argument("--questions", type=Path, required=True, help="question.jsonl with a category per line")
    parser.add_argument("--tree", nargs=3, type=int, action="append", default=[], metavar=("NODES", "DEPTH", "TOP_K"))
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    start = resumed_point(model, torch.load(args.checkpoint, map_location="cpu", weights_only=True))
    dataset = ShardDataset(args.held_out)
    kinds: dict[str, set[int]] = defaultdict(set)
    for index, line in enumerate(args.questions.read_text("utf-8").splitlines()):
        kinds[json.loads(line)["category"]].add(index)
    print("| prompts | number | tokens | tau, chain of 5 | accepted at draft 1 … 5 | text in vocabulary |")
    print("|---|---|---|---|---|---|")
    for kind, indices in {"all": set().union(*kinds.values()), **kinds}.items():
        part = dataset.answering(indices)
        result = chain_acceptance(start.head, start.scales, part)
        accepted = " ".join(f"{share:.3f}"[1:] for share in result.conditional)
        tokens = sum(entry.length for entry in part.entries)
        print(f"| {kind} | {len(indices)} | {tokens} | {result.tau:.3f} | {accepted} | {result.coverage:.3f} |")
    for nodes, depth, top_k in args.tree:
        tau = tree_tau(start.head, start.scales, dataset, DraftConfig(total_token=nodes, depth=depth, top_k=top_k))
        print(f"\ntree of {nodes} nodes, depth {depth}, top_k {top_k}: tau {tau:.3f}", flush=True)


if __name__ == "__main__":
    main()
