"""Train an EAGLE-3 head on shards of generate_data.py and export it.

On GPUs, one or many:

    accelerate launch scripts/train_head.py --target DIR --data runs/data --work-dir runs/head --out my-head

On a CPU, one process per core (accelerate's own launcher would want MPI there):

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 scripts/train_head.py --target DIR ...

Run the same command again to continue after a kill; every option of TrainOptions is a flag.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, PreTrainedModel

from eagle_mars.draft.checkpoint import load_head
from eagle_mars.draft.eagle3 import Eagle3Head
from eagle_mars.errors import ConfigError
from eagle_mars.training.curves import draw_curves
from eagle_mars.training.dataset import ShardDataset
from eagle_mars.training.export import export_head
from eagle_mars.training.initialise import StartingPoint, resumed_point, starting_point
from eagle_mars.training.trainer import Trainer, TrainOptions


def parse(arguments: list[str] | None = None) -> tuple[argparse.Namespace, TrainOptions]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="directory or hub id of the target")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="directories of shards")
    parser.add_argument("--held-out", type=Path, help="directory of shards for evaluation")
    parser.add_argument("--work-dir", type=Path, required=True, help="directory of checkpoint, metrics and curves")
    parser.add_argument("--out", type=Path, required=True, help="directory of the exported head")
    parser.add_argument(
        "--start-from", type=Path, help="checkpoint.pt of another run, or directory of an EAGLE-3 head, to start from"
    )
    parser.add_argument("--random", action="store_true", help="start from random weights, not the target's last layer")
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--kv-heads", type=int, help="key/value heads; as many as the target's if not given")
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU where there is a GPU, too")
    for name, field in TrainOptions.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(field.default), default=field.default, help=field.description)
    args = parser.parse_args(arguments)
    return args, TrainOptions(**{name: getattr(args, name) for name in TrainOptions.model_fields})


def load(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(checkpoint, map_location="cpu", weights_only=True)
    return state


def start_of(args: argparse.Namespace, model: PreTrainedModel, dataset: ShardDataset) -> StartingPoint:
    if (args.work_dir / "checkpoint.pt").exists():
        return resumed_point(model, load(args.work_dir / "checkpoint.pt"))
    earlier: dict[str, Any] | Eagle3Head | None = None
    if args.start_from:
        earlier = exported(args.start_from, model) if args.start_from.is_dir() else load(args.start_from)
    kv_heads = earlier.config.num_kv_heads if isinstance(earlier, Eagle3Head) else args.kv_heads
    return starting_point(model, dataset, args.draft_vocab, earlier, from_target=not args.random, num_kv_heads=kv_heads)


def exported(directory: Path, model: PreTrainedModel) -> Eagle3Head:
    modules = {"embed_tokens": model.get_input_embeddings(), "lm_head": model.get_output_embeddings()}
    head = load_head(directory, model.config.get_text_config(), **modules, dtype=torch.float32)
    if not isinstance(head, Eagle3Head):
        raise ConfigError(f"{directory} holds no EAGLE-3 head; start from one, or without --start-from.")
    return head


def main(arguments: list[str] | None = None) -> None:
    args, options = parse(arguments)
    torch.manual_seed(options.seed)
    # Without a GPU accelerate wants to be told, or processes of torchrun would train alone.
    cpu = args.cpu or not torch.accelerator.is_available()
    accelerator = Accelerator(cpu=cpu, mixed_precision=args.mixed_precision)
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    dataset = ShardDataset(*args.data)
    held_out = ShardDataset(args.held_out) if args.held_out else None
    start = start_of(args, model, dataset)
    trainer = Trainer(start, model.get_output_embeddings(), dataset, options, args.work_dir, accelerator, held_out)
    resumed = trainer.resume()
    accelerator.print(
        f"{len(dataset.entries)} sequences, {sum(e.length for e in dataset.entries)} tokens, "
        f"{dataset.n_duplicates} duplicates left out; feature scales {[round(x, 2) for x in start.scales.tolist()]}; "
        f"{'resumed at' if resumed else 'starting at'} step {trainer.step}",
        flush=True,
    )
    for record in trainer.train():
        if record["step"] % 10 == 0 or "held_out" in record:
            accelerator.print(record, flush=True)
    if accelerator.is_main_process:
        export_head(trainer.head, trainer.scales, args.out)
        draw_curves(args.work_dir / "metrics.jsonl", args.work_dir / "curves.png")
    accelerator.end_training()


if __name__ == "__main__":
    main()
