"""The training loop of an EAGLE-3 head: resumable, data-parallel over processes, on CPU or GPU."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from eagle_mars.draft.eagle3 import Eagle3Head
from eagle_mars.training.dataset import Batch, ShardDataset
from eagle_mars.training.evaluate import chain_acceptance
from eagle_mars.training.initialise import StartingPoint
from eagle_mars.training.loss import soft_cross_entropy
from eagle_mars.training.shards import Source
from eagle_mars.training.unroll import unroll


class TrainOptions(BaseModel):
    """The recipe. Defaults: what trained the embedded head."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(1650, gt=0, description="optimiser steps, K = 1 ones included")
    single_steps: int = Field(350, ge=0, description="steps at the start without unrolling (K = 1)")
    unroll: int = Field(3, gt=0, description="K, unrolled steps of the training-time test")
    step_decay: float = Field(0.8, gt=0, le=1, description="weight of unrolled step i is step_decay ** i")
    tokens_per_batch: int = Field(640, gt=0, description="rows per process and optimiser step")
    lr: float = Field(1e-3, gt=0)
    lm_head_lr_ratio: float = Field(0.3, ge=0)
    warm_up: int = Field(40, ge=0, description="steps of linear warm-up, then cosine to 0")
    clip: float = Field(1.0, gt=0)
    sampled_weight: float = Field(0.7, ge=0, description="loss weight of answers at T > 0; greedy ones count 1")
    hidden_weight: float = Field(
        0.0, ge=0, description="weight of the squared distance to the target's final hidden state, relative to its size"
    )
    question_weight: float = Field(0.4, ge=0, description="loss weight of questions that the target wrote")
    save_every: int = Field(50, gt=0)
    eval_every: int = Field(200, gt=0)
    seed: int = 0


@dataclass(frozen=True)
class StepStats:
    """Per unrolled step: mean loss in nats, share of drafts equal to the drawn token (greedy rows)."""

    loss: list[float]
    accuracy: list[float]


class TrainingTimeTest(nn.Module):
    """The head with its loss, as one module: data parallelism hooks the parameters that `forward` reaches."""

    def __init__(self, head: Eagle3Head, vocabulary: Tensor, target_lm_head: nn.Linear, options: TrainOptions) -> None:
        super().__init__()
        self.head, self.options = head, options
        # Constants, but no buffers: data parallelism would send those around in every step.
        device = head.lm_head.weight.device
        self.draft_id = torch.full((head.config.vocab_size,), -1, device=device)
        self.draft_id[vocabulary.to(device)] = torch.arange(len(vocabulary), device=device)
        self.teacher = target_lm_head.weight.detach()[vocabulary].to(device, torch.float32)
        weights = {Source.PROMPT: 0.0, Source.QUESTION: options.question_weight, Source.SAMPLED: options.sampled_weight}
        self.source_weight = torch.tensor([*weights.values(), 1.0], device=device)

    def forward(self, batch: Batch, n_steps: int) -> tuple[Tensor, StepStats]:
        """Sum over steps of the weighted mean loss of their rows, plus statistics."""
        # The teacher stays in fp32 under mixed precision: bf16 logits of 20 are off by up to .06.
        with torch.no_grad(), torch.autocast(batch.hidden.device.type, enabled=False):
            probabilities = (batch.hidden @ self.teacher.T).softmax(-1)
        total = batch.features.new_zeros(())
        losses, accuracies = [], []
        for step in unroll(self.head, batch, n_steps):
            draft_id = self.draft_id[step.token]
            # Outside the vocabulary the restricted target is noise. The drawn token stands for the target's argmax,
            # which it is on greedy rows.
            keep = (step.valid & (draft_id >= 0)).nonzero().squeeze(-1)
            source = batch.source[step.teacher[keep]].long()
            output, teacher = self.head.norm(step.output[keep]), step.teacher[keep]
            logits = self.head.lm_head(output)
            loss = soft_cross_entropy(logits, probabilities[teacher])
            if self.options.hidden_weight > 0:
                loss = loss + self.options.hidden_weight * _distance(output, batch.hidden[teacher])
            weight = self.source_weight[source]
            mean = (loss * weight).sum() / weight.sum().clamp_min(1e-6)
            total = total + mean * self.options.step_decay**step.number
            with torch.no_grad():
                greedy = source == Source.GREEDY
                # Cheaper than argmax; a tie counts as a hit.
                drawn = logits.gather(1, draft_id[keep].unsqueeze(1)).squeeze(1)
                hits = (drawn >= logits.amax(-1))[greedy].sum()
                # Tokens out of the vocabulary are misses.
                out = (step.valid & (draft_id < 0) & (batch.source[step.teacher] == Source.GREEDY)).sum()
                accuracies.append(float(hits) / max(int(greedy.sum() + out), 1))
            losses.append(float(mean.detach()))
        return total, StepStats(losses, accuracies)


def _distance(output: Tensor, hidden: Tensor) -> Tensor:
    """Squared distance of rows [N, H], in units of the target's mean square: [N]."""
    return (output - hidden).square().mean(-1) / hidden.square().mean()


class Trainer:
    """Trains the head of ``start`` on ``dataset``; everything needed to go on after a kill lies in ``directory``.

    The head takes features divided by their scales and is bound to the target's embedding. ``accelerator`` says where:
    of several processes each takes its share of the batches, and gradients are averaged.
    """

    def __init__(
        self,
        start: StartingPoint,
        target_lm_head: nn.Linear,
        dataset: ShardDataset,
        options: TrainOptions,
        directory: Path,
        accelerator: Accelerator,
        held_out: ShardDataset | None = None,
    ) -> None:
        self.head = start.head.to(accelerator.device)
        self.head.borrowed[0].to(accelerator.device)
        self.scales, self.vocabulary = start.scales.to(accelerator.device), start.vocabulary
        self.dataset, self.held_out = dataset, held_out
        self.options, self.directory, self.accelerator = options, directory, accelerator
        body = [p for name, p in self.head.named_parameters() if name != "lm_head.weight"]
        groups: list[dict[str, Any]] = [
            {"params": body, "ratio": 1.0},
            {"params": [self.head.lm_head.weight], "ratio": options.lm_head_lr_ratio},
        ]
        optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        module = TrainingTimeTest(self.head, self.vocabulary, target_lm_head, options)
        self.module, self.optimizer = accelerator.prepare(module, optimizer)
        self.step = 0
        self.rows = 0
        self.cpu_seconds = 0.0
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoint.pt"

    def resume(self) -> bool:
        """Continue from the checkpoint of ``directory``, if there is one."""
        if not self.checkpoint.exists():
            return False
        state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)  # and copied from there
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.rows, self.cpu_seconds = state["step"], state["rows"], state["cpu_seconds"]
        return True

    def save(self) -> None:
        """Replace the checkpoint in one move."""
        state = {
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scales": self.scales.cpu(),
            "vocabulary": self.vocabulary,
            "step": self.step,
            "rows": self.rows,
            "cpu_seconds": self.cpu_seconds,
        }
        partial = self.checkpoint.with_suffix(f".partial-{os.getpid()}")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def train(self) -> Iterator[dict[str, Any]]:
        """Run to ``options.steps``; yields what is also appended to metrics.jsonl (by rank 0)."""
        options = self.options
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        batches = self.dataset.forever(options.tokens_per_batch, options.seed, rank=rank, world=world, skip=self.step)
        began, spent, rows_before = time.monotonic(), self.cpu_seconds - time.process_time(), self.rows
        while self.step < options.steps:
            batch = next(batches)
            n_steps = 1 if self.step < options.single_steps else options.unroll
            stats = self._update(batch.to(self.accelerator.device).scaled(self.scales), n_steps)
            self.step += 1
            self.rows += len(batch.position) * world
            self.cpu_seconds = spent + time.process_time()
            record: dict[str, Any] = {
                "step": self.step,
                "k": n_steps,
                "loss": stats.loss,
                "accuracy": stats.accuracy,
                "lr": self.optimizer.param_groups[0]["lr"],
                "rows": self.rows,
                "rows_per_second": round((self.rows - rows_before) / (time.monotonic() - began), 1),
                "cpu_seconds_per_process": round(self.cpu_seconds, 1),
            }
            last = self.step == options.steps
            if self.accelerator.is_main_process:
                if self.held_out is not None and (last or self.step % options.eval_every == 0):
                    record["held_out"] = vars(chain_acceptance(self.head, self.scales, self.held_out))
                if last or self.step % options.save_every == 0:
                    self.save()
                with (self.directory / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(record) + "\n")
            yield record

    def _update(self, batch: Batch, n_steps: int) -> StepStats:
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr() * group["ratio"]
        loss, stats = self.module(batch, n_steps)
        self.optimizer.zero_grad(set_to_none=True)
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.head.parameters(), self.options.clip)
        self.optimizer.step()
        return stats

    def _lr(self) -> float:
        options = self.options
        if self.step < options.warm_up:
            return options.lr * (self.step + 1) / options.warm_up
        progress = (self.step - options.warm_up) / max(1, options.steps - options.warm_up)
        return options.lr * 0.5 * (1 + math.cos(math.pi * progress))
