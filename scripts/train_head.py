"""Train an EAGLE-3 head on shards of generate_data.py and export it. One process per core:

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 scripts/train_head.py \\
        --target DIR --data runs/data --work-dir runs/head --out my-head --steps 1000

Run the same command again to continue after a kill; every option of TrainOptions is a flag.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from pydantic_core import PydanticUndefined
from torch import distributed as dist
from transformers import AutoModelForCausalLM

from eagle_mars.training import initialise
from eagle_mars.training.dataset import ShardDataset
from eagle_mars.training.export import export_head
from eagle_mars.training.trainer import Trainer, TrainOptions


def parse() -> tuple[argparse.Namespace, TrainOptions]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="directory or hub id of the target")
    parser.add_argument("--data", type=Path, required=True, help="directory of shards")
    parser.add_argument("--held-out", type=Path, help="directory of shards for evaluation")
    parser.add_argument("--work-dir", type=Path, required=True, help="directory of the checkpoint and metrics.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="directory of the exported head")
    parser.add_argument("--start-from", type=Path, help="checkpoint.pt of another run whose weights to start from")
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of this process")
    parser.add_argument("--device", default="cpu")
    for name, field in TrainOptions.model_fields.items():
        default = None if field.default is PydanticUndefined else field.default
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=field.description)
    args = parser.parse_args()
    return args, TrainOptions(**{name: getattr(args, name) for name in TrainOptions.model_fields})


def load(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(checkpoint, map_location="cpu", weights_only=True)
    return state


def main() -> None:
    args, options = parse()
    torch.set_num_threads(args.threads)
    torch.manual_seed(options.seed)
    device = torch.device(args.device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    dataset = ShardDataset(args.data)
    held_out = ShardDataset(args.held_out) if args.held_out else None
    checkpoint = args.work_dir / "checkpoint.pt"
    if checkpoint.exists():
        # Trainer.resume brings the weights; the shapes that they need stand beside them.
        state = load(checkpoint)
        head = initialise.new_head(model, state["vocabulary"], state["scales"])
        start = initialise.StartingPoint(head, state["scales"], state["vocabulary"])
    else:
        earlier = load(args.start_from) if args.start_from else None
        start = initialise.starting_point(model, dataset, args.draft_vocab, earlier)
    head = start.head.to(device)
    head.bind(model.get_input_embeddings().requires_grad_(False).to(device), model.get_output_embeddings())
    scales = start.scales.to(device)
    trainer = Trainer(
        head, scales, start.vocabulary, model.get_output_embeddings(), dataset, options, args.work_dir, held_out
    )
    resumed = trainer.resume()
    if trainer.rank == 0:
        print(
            f"{len(dataset.entries)} sequences, {sum(e.length for e in dataset.entries)} tokens, "
            f"{dataset.n_duplicates} duplicates left out; feature scales {[round(x, 2) for x in scales.tolist()]}; "
            f"{'resumed at' if resumed else 'starting at'} step {trainer.step}",
            flush=True,
        )
    for record in trainer.train():
        if trainer.rank == 0 and (record["step"] % 10 == 0 or "held_out" in record):
            print(record, flush=True)
    if trainer.rank == 0:
        export_head(head, scales, args.out)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
