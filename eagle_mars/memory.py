"""How much memory decoding takes, by arithmetic: weights, key/value rows, the draft head, prefill and the tree.

docs/scaling.md has the formulas in words and what they give for models of 8 to 235 billion parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eagle_mars.config import DraftConfig
from eagle_mars.errors import ConfigError
from eagle_mars.target import PREFILL_CHUNK, chunk_rows

_HEADROOM = 256  # rows to spare in the head's first buffer (`draft.drafter`)


@dataclass(frozen=True)
class TargetSize:
    """Sizes of a causal LM.

    parameters: all of them. intermediate: width of the MLP that one token meets, over all of its experts.
    experts, chosen: of each layer, and how many of them a token goes through; 1 without a mixture. expert: parameters
    of one expert in all layers together.
    """

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int
    chosen: int
    expert: int

    @classmethod
    def of(cls, config: Any) -> TargetSize:
        """From a Hugging Face text config with gated MLPs: Llama, Qwen, Mistral and their mixtures of experts.

        Biases and norms are left out. Raises ConfigError if a size is missing.
        """
        try:
            hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
            experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
            chosen = config.num_experts_per_tok if experts > 1 else 1
            intermediate = getattr(config, "moe_intermediate_size", None) if experts > 1 else None
            intermediate = intermediate or config.intermediate_size
            vocab = config.vocab_size
        except AttributeError as error:
            raise ConfigError(
                f"the config doesn't tell its sizes ({error}); memory can't be computed from it."
            ) from error
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        attention = 2 * hidden * (heads + kv_heads) * head_dim
        expert = layers * 3 * hidden * intermediate
        tables = vocab * hidden * (1 if config.tie_word_embeddings else 2)
        return cls(
            parameters=tables + layers * attention + experts * expert,
            layers=layers,
            hidden=hidden,
            intermediate=chosen * intermediate,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=vocab,
            experts=experts,
            chosen=chosen,
            expert=expert,
        )

    def met(self, tokens: int) -> float:
        """Parameters that a forward over that many tokens reads; expected, if each chooses its experts evenly."""
        unread = (1 - self.chosen / self.experts) ** tokens
        return self.parameters - self.experts * self.expert * unread

    @property
    def active(self) -> float:
        """Parameters that one token meets."""
        return self.met(1)

    @property
    def row(self) -> int:
        """Numbers that a token leaves in the cache: a key and a value per layer and key/value head."""
        return 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Memory:
    """Bytes on each device. cache: key/value rows of the target; head_cache: of the head. prefill, tree: what one
    forward over a piece of the prompt, and one over a draft tree with its verification, take for a moment."""

    weights: float
    head: float
    cache: float
    head_cache: float
    prefill: float
    tree: float

    @property
    def peak(self) -> float:
        """What stays, and the larger one of what comes and goes."""
        return self.weights + self.head + self.cache + self.head_cache + max(self.prefill, self.tree)


def memory(
    target: TargetSize,
    head_parameters: int,
    draft: DraftConfig,
    prompt_tokens: int,
    new_tokens: int,
    *,
    number: int = 2,
    weight: float | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    responses: int = 1,
    devices: int = 1,
) -> Memory:
    """Bytes on each of `devices` that share a tensor-parallel target; the head is whole on all of them.

    number: bytes of a number of caches, activations and the head. weight: bytes of a weight of the target, if
    quantised. responses: decoded together, each with prompts and answers of these lengths.
    """
    rows = min(2 * prompt_tokens, prompt_tokens + new_tokens + draft.total_token)
    longest = prompt_tokens + new_tokens + draft.total_token
    # Beyond twice the prompt the cache doubles once more, and holds old and new rows while it is copied.
    cached = rows if rows == longest else longest + rows
    scratch = _HEADROOM + draft.depth * draft.top_k
    head_row = 2 * target.kv_heads * target.head_dim
    groups = target.heads // target.kv_heads
    piece = chunk_rows(prompt_tokens, groups, prefill_chunk)
    masked = prompt_tokens if prompt_tokens > piece else 0
    # The mask of a later piece, for each query head of a group: as bool, and as numbers where the kernel wants them.
    mask = groups * piece * masked * (1 + number)
    activations = piece * number * (4 * target.hidden + 3 * target.intermediate / devices)
    features = piece * number * 3 * target.hidden * 2  # three taps, and joined
    nodes = responses * draft.total_token
    return Memory(
        weights=target.parameters * (number if weight is None else weight) / devices,
        head=head_parameters * number,
        cache=responses * cached * target.row * number / devices,
        head_cache=responses * (longest + scratch) * head_row * number,
        prefill=mask + activations + features,
        tree=nodes * target.vocab * (number + 4 + 8),  # logits; verification's copies in fp32 and fp64
    )
