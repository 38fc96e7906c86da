"""Packed batches from shards: whole sequences of different lengths behind one another, never padded."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from eagle_mars.errors import ConfigError
from eagle_mars.training.ngrams import Deduplicator
from eagle_mars.training.shards import Source


@dataclass(frozen=True)
class Batch:
    """R rows of one or more sequences. Row t of a sequence pairs feature f_t with token s_{t+1} (EAGLE_SPEC 1.5)."""

    features: Tensor  # [R, 3H]
    hidden: Tensor  # [R, H] the target's final hidden state at t
    next_token: Tensor  # [R] s_{t+1}
    source: Tensor  # [R] where s_{t+1} came from, a Source
    position: Tensor  # [R] t
    left: Tensor  # [R] rows of the same sequence after this one
    lengths: list[int]  # rows per sequence; they sum to R

    def to(self, device: torch.device) -> Batch:
        tensors: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **tensors)

    def scaled(self, scales: Tensor) -> Batch:
        """Each tap divided by its scale [3]: what a head in training takes."""
        return replace(self, features=self.features / scales.repeat_interleave(self.hidden.shape[-1]))


@dataclass(frozen=True)
class Entry:
    """Where a sequence lies in its shard, and the number of the request that it answers."""

    index: int
    shard: int
    token_start: int
    state_start: int
    length: int  # tokens


class ShardDataset:
    """All sequences of directories of shards, near-duplicates left out, read by memory map.

    Raises ConfigError if a directory has no shard.
    """

    def __init__(self, *directories: Path) -> None:
        self.paths: list[Path] = []
        for directory in directories:
            paths = sorted(directory.glob("shard-*.safetensors"))
            if not paths:
                raise ConfigError(f"There is no shard in {directory}; make some with scripts/generate_data.py.")
            self.paths += paths
        self._files = [safe_open(path, framework="pt") for path in self.paths]
        self.entries: list[Entry] = []
        self.n_duplicates = 0
        deduplicator = Deduplicator()
        for number, file in enumerate(self._files):
            tokens, source = file.get_tensor("tokens"), file.get_tensor("source")
            start = 0
            lengths, indices = file.get_tensor("lengths").tolist(), file.get_tensor("indices").tolist()
            for n, (length, index) in enumerate(zip(lengths, indices, strict=True)):
                rows = slice(start, start + length)
                answer = source[rows] >= Source.SAMPLED
                if deduplicator.is_new(tokens[rows][~answer].tolist(), tokens[rows][answer].tolist()):
                    self.entries.append(Entry(index, number, start, start - n, length))
                else:
                    self.n_duplicates += 1
                start += length

    def answering(self, indices: set[int]) -> ShardDataset:
        """The same shards, restricted to the answers to requests ``indices``."""
        part = copy.copy(self)
        part.entries = [entry for entry in self.entries if entry.index in indices]
        return part

    def tokens(self, entry: Entry) -> tuple[Tensor, Tensor]:
        """Token ids and sources [L] of one sequence."""
        rows = slice(entry.token_start, entry.token_start + entry.length)
        file = self._files[entry.shard]
        return file.get_slice("tokens")[rows], file.get_slice("source")[rows]

    def drawn_tokens(self) -> Tensor:
        """Every token that the target drew itself, all sequences behind one another: [N] int64."""
        parts = []
        for entry in self.entries:
            tokens, source = self.tokens(entry)
            parts.append(tokens[source != Source.PROMPT])
        return torch.cat(parts).long()

    def batch(self, entries: list[Entry]) -> Batch:
        """The rows of ``entries`` in their order; states as fp32."""
        features, hidden, following, sources, positions, left = [], [], [], [], [], []
        for entry in entries:
            tokens, source = self.tokens(entry)
            n = entry.length - 1
            states = slice(entry.state_start, entry.state_start + n)
            features.append(self._files[entry.shard].get_slice("features")[states])
            hidden.append(self._files[entry.shard].get_slice("hidden")[states])
            following.append(tokens[1:])
            sources.append(source[1:])
            positions.append(torch.arange(n))
            left.append(torch.arange(n - 1, -1, -1))
        return Batch(
            torch.cat(features).float(),
            torch.cat(hidden).float(),
            torch.cat(following).long(),
            torch.cat(sources),
            torch.cat(positions),
            torch.cat(left),
            [entry.length - 1 for entry in entries],
        )

    def epoch(self, number: int, tokens_per_batch: int, seed: int) -> list[list[Entry]]:
        """All sequences once, shuffled, packed into batches of at most ``tokens_per_batch`` rows (one at least)."""
        order = self.entries.copy()
        random.Random(f"{seed}/epoch/{number}").shuffle(order)
        batches: list[list[Entry]] = [[]]
        filled = 0
        for entry in order:
            if batches[-1] and filled + entry.length > tokens_per_batch:
                batches.append([])
                filled = 0
            batches[-1].append(entry)
            filled += entry.length
        return batches

    def forever(self, tokens_per_batch: int, seed: int, *, rank: int, world: int, skip: int) -> Iterator[Batch]:
        """Batches rank, rank + world, … of epoch after epoch; the first ``skip`` of them are passed over unread."""
        number = 0
        while True:
            batches = self.epoch(number, tokens_per_batch, seed)
            # Every rank gets the same count, or one would wait for gradients that never come.
            mine = batches[rank : len(batches) - len(batches) % world : world] or batches
            for entries in mine[skip:]:
                yield self.batch(entries)
            skip = max(0, skip - len(mine))
            number += 1
