"""Shards of generated text with the target's states: written whole or not at all, read by memory map."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


class Source(IntEnum):
    """Where a token came from."""

    PROMPT = 0
    QUESTION = 1
    SAMPLED = 2
    GREEDY = 3


@dataclass(frozen=True)
class Sequence:
    """L tokens and, for positions 0 … L-2, what the target computed there (its last token was never fed)."""

    index: int
    tokens: Tensor  # [L] int32
    source: Tensor  # [L] int8, values of Source
    features: Tensor  # [L-1, 3H] inputs of the tapped layers
    hidden: Tensor  # [L-1, H] after the final norm: lm_head of it is the target's distribution of the next token


def shard_path(directory: Path, number: int) -> Path:
    return directory / f"shard-{number:05d}.safetensors"


def write_shard(directory: Path, number: int, sequences: list[Sequence]) -> Path:
    """Write ``sequences`` so that the final name never shows a half-written file."""
    path = shard_path(directory, number)
    ordered = sorted(sequences, key=lambda s: s.index)
    names = ("tokens", "source", "features", "hidden")
    tensors = {name: torch.cat([getattr(s, name) for s in ordered]) for name in names}
    tensors["lengths"] = torch.tensor([len(s.tokens) for s in ordered], dtype=torch.int32)
    tensors["indices"] = torch.tensor([s.index for s in ordered], dtype=torch.int32)
    partial = path.with_suffix(f".partial-{os.getpid()}")
    save_file(tensors, partial)
    partial.replace(path)
    return path


def read_shard(path: Path) -> Iterator[Sequence]:
    """The sequences of one shard, in index order."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    start = 0
    for n, (length, index) in enumerate(zip(tensors["lengths"].tolist(), tensors["indices"].tolist(), strict=True)):
        token_rows = slice(start, start + length)
        state_rows = slice(start - n, start - n + length - 1)
        yield Sequence(
            index,
            tensors["tokens"][token_rows],
            tensors["source"][token_rows],
            tensors["features"][state_rows],
            tensors["hidden"][state_rows],
        )
        start += length
