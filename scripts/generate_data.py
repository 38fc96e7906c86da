"""Let a target write the text that its draft head is trained on; run one process per core with --worker.

python scripts/generate_data.py --target DIR --out runs/data --shards 120 --worker 0 --workers 2
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle_mars.training.generate import Generator, generate_shards
from eagle_mars.training.prompts import GreedyQuestions, Requests, TrainingRequests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="directory or hub id of the target")
    parser.add_argument("--out", type=Path, required=True, help="directory of the shards; finished ones are kept")
    parser.add_argument("--shards", type=int, default=120, help="shards, those of all workers together")
    parser.add_argument("--per-shard", type=int, default=64, help="sequences per shard")
    parser.add_argument("--worker", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rows", type=int, default=112, help="sequences decoded at once")
    parser.add_argument("--max-length", type=int, default=512, help="tokens of a sequence with its prompt")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of this process")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto", help="of the target; bfloat16 pays on CPUs with AMX and on GPUs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--questions", type=Path, help="question.jsonl to answer greedily instead, in one shard")
    parser.add_argument("--answer-tokens", type=int, default=256, help="longest answer to a question of that file")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype).to(args.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    requests: Requests = TrainingRequests(args.seed)
    n_shards, per_shard = args.shards, args.per_shard
    if args.questions:
        questions = GreedyQuestions(args.questions, args.answer_tokens)
        requests, n_shards, per_shard = questions, 1, len(questions)
    generator = Generator(model, tokenizer, requests, seed=args.seed, n_rows=args.rows, max_length=args.max_length)
    progress = generate_shards(
        generator, args.out, n_shards=n_shards, worker=args.worker, n_workers=args.workers, per_shard=per_shard
    )
    began = time.monotonic()
    with tqdm(unit=" sequences", mininterval=5) as bar:
        for state in progress:
            bar.total = state.of
            rate = state.tokens / (time.monotonic() - began)
            bar.set_postfix_str(f"{state.tokens} tokens, {rate:.0f}/s", refresh=False)
            bar.update()
            if state.written is not None:
                bar.write(f"{state.written.name} | {state.tokens} tokens, {rate:.0f}/s")


if __name__ == "__main__":
    main()
