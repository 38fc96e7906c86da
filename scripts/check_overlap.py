"""Prove that no evaluation question is in the data of a head, and write the report.

python scripts/check_overlap.py --target DIR --data runs/data --questions evaluation/data/*.jsonl --out overlap.md

Exit status 1 if something is found.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from transformers import AutoTokenizer

from eagle_mars.training.dataset import ShardDataset
from eagle_mars.training.overlap import ANSWER_WORDS, QUESTION_WORDS, Finding, check

sys.path.insert(0, str(Path(__file__).parents[1]))  # `evaluation` lies in the repository and is not installed

from evaluation.provenance import provenance, write_atomically


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="directory or hub id of the target: its tokenizer")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="directories of shards")
    parser.add_argument("--questions", type=Path, nargs="+", required=True, help="question.jsonl files")
    parser.add_argument("--out", type=Path, required=True, help="report in markdown")
    args = parser.parse_args()
    dataset = ShardDataset(*args.data)
    findings = check(dataset, AutoTokenizer.from_pretrained(args.target), args.questions)
    write_atomically(args.out, report(dataset, args.questions, findings))
    for finding in findings:
        print(f"{finding.file}: {finding.run!r} in {finding.text[:200]!r}")
    return bool(findings)


def report(dataset: ShardDataset, files: list[Path], findings: list[Finding]) -> str:
    """What was searched for what, and the number of findings per question file."""
    counts = Counter((finding.file, finding.is_answer) for finding in findings)
    facts = provenance()
    n_tokens = sum(entry.length for entry in dataset.entries)
    lines = [
        "# Overlap of the head's data with evaluation questions",
        "",
        f"{len(dataset.entries)} sequences, {n_tokens} tokens in {len(dataset.paths)} shards, searched for runs of "
        f"{QUESTION_WORDS} words (user turns; a shorter question as a whole) and {ANSWER_WORDS} words (answers) of any "
        "turn of a question.",
        "",
        "| question file | questions | user turns that overlap | answers that overlap |",
        "|---|---|---|---|",
    ]
    for file in files:
        n_questions = len(file.read_text("utf-8").splitlines())
        name = "/".join(file.parts[-2:])
        lines.append(f"| {name} | {n_questions} | {counts[file, False]} | {counts[file, True]} |")
    command = f"`{facts['command']}`, commit {facts['commit'][:7]}, {facts['date']}"
    return "\n".join([*lines, "", f"Made by {command}.", ""])


if __name__ == "__main__":
    sys.exit(main())
