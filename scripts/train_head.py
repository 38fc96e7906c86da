"""Train an EAGLE-3 head on shards of generate_data.py and export it. One process per core:

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 scripts/train_head.py \\
        --target DIR --data runs/data --work-dir runs/head --out my-head --steps 1000

Run the same command again to continue after a kill; every option of TrainOptions is a flag.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

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


def main() -> None:
    args, options = parse()
    torch.set_num_threads(args.threads)
    torch.manual_seed(options.seed)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if args.device.startswith("cuda") else "gloo")
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    dataset = ShardDataset(args.data)
    held_out = ShardDataset(args.held_out) if args.held_out else None
    checkpoint = args.work_dir / "checkpoint.pt"
    if checkpoint.exists():
        # The weights follow in Trainer.resume; what they mean must be known to build the head.
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        scales, vocabulary = state["scales"], state["vocabulary"]
        head = initialise.new_head(model, vocabulary, scales)
    else:
        features, hidden = initialise.sample_states(dataset)
        lm_head = model.get_output_embeddings()
        vocabulary = initialise.draft_vocabulary(
            dataset.drawn_tokens(), hidden, lm_head, model.config.vocab_size, args.draft_vocab
        )
        if args.start_from:
            state = torch.load(args.start_from, map_location="cpu", weights_only=True)
            scales = state["scales"]
            head = initialise.new_head(model, vocabulary, scales)
            initialise.adopt(head, state["head"], vocabulary, state["vocabulary"])
        else:
            scales = initialise.feature_scales(features)
            head = initialise.new_head(model, vocabulary, scales)
    head.to(args.device)
    head.bind(model.get_input_embeddings().requires_grad_(False).to(args.device), model.get_output_embeddings())
    trainer = Trainer(
        head,
        scales.to(args.device),
        vocabulary,
        model.get_output_embeddings(),
        dataset,
        options,
        args.work_dir,
        held_out,
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
