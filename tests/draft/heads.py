"""Small heads for the tests of the draft side: random ones, recorded ones, and one whose tree is known by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from eagle_mars.draft.checkpoint import load_head
from eagle_mars.draft.eagle1 import Eagle1Head
from eagle_mars.draft.eagle3 import Eagle3Head
from eagle_mars.draft.head import Head
from eagle_mars.draft.layers import HeadConfig

HIDDEN, VOCAB, DRAFT_VOCAB = 32, 60, 40


def random_head(family: str = "eagle3", seed: int = 0, **changes: object) -> Head:
    """A random fp32 head of `family`, bound to a random embedding and output projection."""
    torch.manual_seed(seed)
    eagle3 = family == "eagle3"
    shape = {
        "hidden_size": HIDDEN,
        "feature_size": 3 * HIDDEN if eagle3 else HIDDEN,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB if eagle3 else VOCAB,
        "capture_layers": (2, 4, 5) if eagle3 else (),
    }
    head: Head = (Eagle3Head if eagle3 else Eagle1Head)(HeadConfig(**{**shape, **changes}))
    for parameter in head.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    if isinstance(head, Eagle3Head) and hasattr(head, "d2t"):
        ids = torch.randperm(VOCAB)[: head.config.draft_vocab_size].sort().values
        head.d2t.copy_(ids - torch.arange(len(ids)))
    head.bind(nn.Embedding(VOCAB, head.config.hidden_size), nn.Linear(head.config.hidden_size, VOCAB, bias=False))
    return head.eval().requires_grad_(False)


def random_rows(head: Head, rows: int, batch: int = 1, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Features [B, rows, F] and next tokens [B, rows]."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(batch, rows, head.config.feature_size, generator=generator)
    return features, torch.randint(0, VOCAB, (batch, rows), generator=generator)


def golden_target(golden: Path, name: str) -> tuple[SimpleNamespace, nn.Embedding, nn.Linear]:
    """Config, embedding and output projection of a recorded target."""
    directory = golden / "models" / name
    config = SimpleNamespace(**json.loads((directory / "config.json").read_text()))
    tensors: dict[str, Tensor] = {}
    for shard in directory.glob("*.safetensors"):
        tensors |= load_file(shard)
    lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    lm_head.weight = nn.Parameter(tensors["lm_head.weight"], requires_grad=False)
    return config, nn.Embedding.from_pretrained(tensors["model.embed_tokens.weight"]), lm_head


def golden_head(golden: Path, target: str, name: str) -> Head:
    config, embedding, lm_head = golden_target(golden, target)
    return load_head(golden / "heads" / name, config, embed_tokens=embedding, lm_head=lm_head, dtype=torch.float32)


class TableHead(Head):
    """A head that is a table: row t of `table` [V, V] holds the draft logits after token t, whatever came before."""

    def __init__(self, table: Tensor, target_ids: Tensor | None = None) -> None:
        tokens, draft = table.shape
        super().__init__(HeadConfig(1, 1, 1, 1, 1, 2, tokens, draft), own_embedding=False)
        self.table = nn.Parameter(table, requires_grad=False)
        self.target_ids = target_ids
        self.calls: list[tuple[Tensor, Tensor, Tensor | None]] = []

    @property
    def num_layers(self) -> int:
        return 0

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def forward(
        self, x: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: list, start: int
    ) -> Tensor:
        self.calls.append((tokens, positions, None if mask is None else mask.clone()))
        return tokens.unsqueeze(-1).to(self.table.dtype)

    def logits(self, output: Tensor) -> Tensor:
        return self.table[output[..., 0].long()]

    def to_target(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.target_ids is None else self.target_ids[draft_ids]
