"""Batched generation with slot refill: the target answers many requests at once and its states are kept."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eagle_mars.errors import ConfigError
from eagle_mars.training.prompts import Requests
from eagle_mars.training.rows import MAX_QUESTION_TOKENS, ChatFrame, Fate, Row
from eagle_mars.training.shards import Sequence, Source, shard_path, write_shard
from eagle_mars.training.slots import Slots, use_slots
from eagle_mars.training.taps import fused, tapped


@dataclass(frozen=True)
class Progress:
    """Where a run of one worker stands after a sequence."""

    sequences: int  # finished by this run so far
    of: int  # all that this run is to finish
    tokens: int  # drawn by this run so far, prompts not counted
    written: Path | None  # the shard that this sequence completed


class Generator:
    """Decodes requests of ``source`` with ``model``; one process, one thread pool, many rows."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        source: Requests,
        *,
        seed: int = 0,
        n_rows: int = 96,
        max_length: int = 512,
    ) -> None:
        self.model, self.tokenizer, self.source = model, tokenizer, source
        self.seed, self.n_rows, self.max_length = seed, n_rows, max_length
        eos = model.generation_config.eos_token_id
        stop = frozenset(eos if isinstance(eos, list) else [eos]) | {tokenizer.eos_token_id}
        self.frame = ChatFrame.of(tokenizer, stop)
        if len(self.frame.prefix) + MAX_QUESTION_TOKENS + len(self.frame.suffix) >= max_length:
            raise ConfigError(f"max_length {max_length} leaves no room for a question; raise it.")
        use_slots(model)

    @torch.inference_mode()
    def run(self, indices: Iterator[int]) -> Iterator[tuple[int, Sequence | None]]:
        """Yield (index, sequence) as they finish, in any order; None for a question that may not be used."""
        slots = Slots(self.model, self.n_rows, self.max_length)
        width = self.model.config.get_text_config().hidden_size
        features = torch.zeros(self.n_rows, self.max_length, 3 * width, dtype=torch.bfloat16)
        hidden = torch.zeros(self.n_rows, self.max_length, width, dtype=torch.bfloat16)
        rows: dict[int, Row] = {}
        with tapped(self.model) as taps:
            n_shared = self._prefill(slots, taps, features, hidden)
            while True:
                for slot in range(self.n_rows):
                    if slot not in rows and (index := next(indices, None)) is not None:
                        rows[slot] = self._open(index)
                        slots.lengths[slot] = n_shared
                if not rows:
                    return
                order = sorted(rows)
                positions = [slots.lengths[slot] for slot in order]
                tokens = [rows[slot].tokens[at] for slot, at in zip(order, positions, strict=True)]
                out = self._forward(slots, order, tokens, positions)
                features[order, positions] = fused(taps)[:, 0].to("cpu", torch.bfloat16)
                hidden[order, positions] = out.to("cpu", torch.bfloat16)
                drawing = [i for i, slot in enumerate(order) if slots.lengths[slot] == len(rows[slot].tokens)]
                chosen = self._draw(out[drawing], [rows[order[i]] for i in drawing]) if drawing else []
                for i, token in zip(drawing, chosen, strict=True):
                    slot = order[i]
                    fate = rows[slot].append(token)
                    if fate is not Fate.GOES_ON:
                        row = rows.pop(slot)
                        n = len(row.tokens) - 1
                        states = features[slot, :n].clone(), hidden[slot, :n].clone()
                        yield row.index, _sequence(row, *states) if fate is Fate.DONE else None

    def _prefill(self, slots: Slots, taps: dict[int, Tensor], features: Tensor, hidden: Tensor) -> int:
        """Feed what all prompts share, except its last token: a row needs the output there to start from."""
        shared = self.frame.prefix[:-1]
        for at, token in enumerate(shared):
            out = self._forward(slots, [0], [token], [at])
            features[:, at], hidden[:, at] = fused(taps)[0, 0].to("cpu"), out[0].to("cpu")
        slots.share_prefix()
        return len(shared)

    def _forward(self, slots: Slots, order: list[int], tokens: list[int], positions: list[int]) -> Tensor:
        """One token per row -> final hidden states [B, H]."""
        slots.select(order)
        device = self.model.device
        out = self.model.get_decoder()(
            input_ids=torch.tensor(tokens, device=device)[:, None],
            position_ids=torch.tensor(positions, device=device)[:, None],
            use_cache=False,
            slots=slots,
        )
        slots.advance()
        return out.last_hidden_state[:, 0]

    def _open(self, index: int) -> Row:
        rng = random.Random(f"{self.seed}/coins/{index}")
        row = Row(index, self.source[index], self.frame, self.tokenizer, rng, self.max_length)
        if len(row.tokens) >= self.max_length:
            raise ConfigError(
                f"Prompt {index} has {len(row.tokens)} tokens and max_length is {self.max_length}; raise max_length."
            )
        return row

    def _draw(self, hidden: Tensor, rows: list[Row]) -> list[int]:
        """One token per row by inverse CDF of the row's own coin, or the argmax at temperature 0."""
        logits = self.model.get_output_embeddings()(hidden).float()
        chosen = logits.argmax(-1)
        warm = [i for i, row in enumerate(rows) if row.temperature > 0]
        if warm:
            temperatures = torch.tensor([rows[i].temperature for i in warm], device=logits.device)
            cdf = (logits[warm] / temperatures[:, None]).softmax(-1).cumsum(-1)
            coins = torch.tensor([rows[i].rng.random() for i in warm], device=logits.device)
            # Scaled by the last entry: rounding may leave the total below the coin.
            picks = torch.searchsorted(cdf, (coins * cdf[:, -1])[:, None]).squeeze(-1)
            chosen[warm] = picks.clamp_max(cdf.shape[-1] - 1)
        return chosen.tolist()


def _sequence(row: Row, features: Tensor, hidden: Tensor) -> Sequence:
    tokens = torch.tensor(row.tokens, dtype=torch.int32)
    return Sequence(row.index, tokens, torch.tensor(row.source, dtype=torch.int8), features, hidden)


def generate_shards(
    generator: Generator, directory: Path, *, n_shards: int, worker: int = 0, n_workers: int = 1, per_shard: int = 64
) -> Iterator[Progress]:
    """Write the shards of one worker (numbers = worker mod n_workers); those that exist already are skipped.

    Sequence i belongs to shard i // per_shard and depends on (seed, i) only, so a killed run is continued by running
    it again: it loses the sequences of unfinished shards and nothing else.
    """
    directory.mkdir(parents=True, exist_ok=True)
    numbers = [n for n in range(worker, n_shards, n_workers) if not shard_path(directory, n).exists()]
    waiting = dict.fromkeys(numbers, per_shard)
    ready: dict[int, list[Sequence]] = {n: [] for n in numbers}
    indices = (index for n in numbers for index in range(n * per_shard, (n + 1) * per_shard))
    tokens = 0
    for done, (index, sequence) in enumerate(generator.run(indices), 1):
        n = index // per_shard
        waiting[n] -= 1
        if sequence is not None:
            ready[n].append(sequence)
            tokens += int((sequence.source != Source.PROMPT).sum())
        whole = ready.pop(n) if waiting[n] == 0 else []
        written = write_shard(directory, n, whole) if whole else None
        yield Progress(done, len(numbers) * per_shard, tokens, written)
