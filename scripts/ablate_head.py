"""Train heads that differ in one choice for the same CPU time each, and write the table.

OMP_NUM_THREADS=1 python scripts/ablate_head.py --target DIR --data runs/data --held-out runs/held-out \\
    --work-dir runs/ablations --seconds 150 --out docs/results/head-ablations.md

Arms that are done are kept: run the same command again to continue after a kill.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, PreTrainedModel

from eagle_mars.training.dataset import ShardDataset
from eagle_mars.training.evaluate import chain_acceptance
from eagle_mars.training.initialise import starting_point
from eagle_mars.training.trainer import Trainer, TrainOptions

sys.path.insert(0, str(Path(__file__).parents[1]))  # `evaluation` lies in the repository and is not installed

from evaluation.provenance import provenance, write_atomically

BASE: dict[str, Any] = {
    "from_target": True,
    "num_kv_heads": None,
    "draft_vocab_size": 8192,
    "unroll": 3,
    "hidden_weight": 0.0,
}
ARMS: dict[str, dict[str, Any]] = {
    "base": {},
    "random weights": {"from_target": False},
    "9 kv heads": {"num_kv_heads": 9},
    "draft vocabulary 4096": {"draft_vocab_size": 4096},
    "draft vocabulary 16384": {"draft_vocab_size": 16384},
    "K = 1": {"unroll": 1},
    "K = 2": {"unroll": 2},
    "K = 4": {"unroll": 4},
    "hidden state, weight 0.1": {"hidden_weight": 0.1},
    "hidden state, weight 1": {"hidden_weight": 1.0},
}
_CALIBRATION_STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="directory or hub id of the target")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="directories of shards")
    parser.add_argument("--held-out", type=Path, required=True, help="directory of shards for evaluation")
    parser.add_argument("--work-dir", type=Path, required=True, help="directory of the arms' results")
    parser.add_argument("--out", type=Path, required=True, help="table in markdown")
    parser.add_argument("--seconds", type=float, default=150, help="CPU seconds of training per arm")
    parser.add_argument("--tokens-per-batch", type=int, default=640)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    dataset, held_out = ShardDataset(*args.data), ShardDataset(args.held_out)
    rows = {}
    for name in args.arms:
        done = args.work_dir / f"{name.replace(' ', '_')}.json"
        if not done.exists():
            row = run_arm(model, dataset, held_out, BASE | ARMS[name], args)
            write_atomically(done, json.dumps(row) + "\n")
            print(name, row, flush=True)
        rows[name] = json.loads(done.read_text("utf-8"))
    write_atomically(args.out, table(rows, args.seconds, dataset))


def run_arm(
    model: PreTrainedModel, dataset: ShardDataset, held_out: ShardDataset, arm: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """Train one arm for ``args.seconds`` of CPU time and measure it."""
    options = TrainOptions(unroll=arm["unroll"], hidden_weight=arm["hidden_weight"], steps=_CALIBRATION_STEPS)
    options = options.model_copy(update={"single_steps": 0, "tokens_per_batch": args.tokens_per_batch})

    def trainer(options: TrainOptions) -> Trainer:
        torch.manual_seed(options.seed)
        shutil.rmtree(args.work_dir / "run", ignore_errors=True)
        shape = {name: arm[name] for name in ("from_target", "num_kv_heads")}
        start = starting_point(model, dataset, arm["draft_vocab_size"], **shape)
        lm_head = model.get_output_embeddings()
        return Trainer(start, lm_head, dataset, options, args.work_dir / "run", Accelerator(cpu=True))

    # The schedule needs the number of steps, so their cost is measured first; the first step pays for allocations.
    spent = [record["cpu_seconds_per_process"] for record in trainer(options).train()]
    per_step = (spent[-1] - spent[0]) / (len(spent) - 1)
    steps = max(1, round(args.seconds / per_step))
    update = {"steps": steps, "single_steps": 0 if arm["unroll"] == 1 else steps // 5, "warm_up": min(20, steps // 10)}
    arm_trainer = trainer(options.model_copy(update=update))
    last = list(arm_trainer.train())[-1]
    acceptance = chain_acceptance(arm_trainer.head, arm_trainer.scales, held_out)
    return {
        "steps": steps,
        "rows": last["rows"],
        "cpu_seconds": last["cpu_seconds_per_process"],
        "loss": last["loss"],
        "tau": acceptance.tau,
        "conditional": acceptance.conditional,
        "coverage": acceptance.coverage,
    }


def table(rows: dict[str, dict[str, Any]], seconds: float, dataset: ShardDataset) -> str:
    """Markdown with one row per arm."""
    facts = provenance()
    lines = [
        "# Choices of the head, each trained for the same CPU time",
        "",
        f"One seed, {seconds:.0f} CPU-seconds of training per arm (a fifth of the steps with K = 1 before K unrolled "
        f"ones), {len(dataset.entries)} sequences of {sum(e.length for e in dataset.entries)} tokens. Base: weights of "
        "the target's last layer, 3 key/value heads, draft vocabulary 8192, K = 3, no term for the hidden state.",
        "Greedy replay of the held-out chat prompts; accepted: share of drafts at each depth when all before were.",
        "",
        "| arm | steps | rows | CPU-s | tau, chain of 5 | accepted at draft 1 … 5 | text in vocabulary |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        accepted = " ".join(f"{share:.3f}" for share in row["conditional"])
        lines.append(
            f"| {name} | {row['steps']} | {row['rows']} | {row['cpu_seconds']:.0f} | {row['tau']:.3f} | {accepted} "
            f"| {row['coverage']:.3f} |"
        )
    made = f"`{facts['command']}`, commit {facts['commit'][:7]}, {facts['date']}, torch {facts['packages']['torch']}"
    return "\n".join([*lines, "", f"Made by {made}.", ""])


if __name__ == "__main__":
    main()
