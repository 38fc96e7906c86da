"""A new EAGLE-3 head that starts from the target: draft vocabulary, feature scales, and copied weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eagle_mars.draft.eagle3 import Eagle3Head
from eagle_mars.draft.infer import capture_layers
from eagle_mars.draft.layers import HeadConfig
from eagle_mars.training.dataset import ShardDataset
from eagle_mars.training.shards import Source

_SAMPLE_SEQUENCES = 96


def sample_states(dataset: ShardDataset) -> tuple[Tensor, Tensor]:
    """Features [N, 3H] and final hidden states [N, H] at drawn tokens of sequences spread over the data."""
    step = max(1, len(dataset.entries) // _SAMPLE_SEQUENCES)
    batch = dataset.batch(dataset.entries[::step][:_SAMPLE_SEQUENCES])
    drawn = batch.source != Source.PROMPT
    return batch.features[drawn], batch.hidden[drawn]


def draft_vocabulary(tokens: Tensor, hidden: Tensor, lm_head: nn.Module, vocab_size: int, size: int) -> Tensor:
    """The ``size`` target ids that the target most likely draws, ascending.

    Counts of drawn tokens alone say little about the rare ones; the target's own probabilities on a sample of states
    add, for every drawn token, the mass of what could have stood there.
    """
    counts = torch.bincount(tokens, minlength=vocab_size).float()
    mass = torch.zeros(vocab_size)
    with torch.inference_mode():
        for rows in hidden.split(512):
            mass += lm_head(rows).float().softmax(-1).sum(0)
    score = counts + mass * (len(tokens) / len(hidden))
    return score.topk(min(size, vocab_size)).indices.sort().values


def feature_scales(features: Tensor) -> Tensor:
    """Median root mean square of each of the three taps: [3]. The median ignores the first token's massive ones."""
    return features.view(len(features), 3, -1).square().mean(-1).sqrt().median(0).values


def head_config(model: PreTrainedModel, draft_vocab_size: int, num_kv_heads: int | None = None) -> HeadConfig:
    """A head shaped like one layer of ``model``, if wanted with another number of key/value heads."""
    config = model.config.get_text_config()
    return HeadConfig(
        hidden_size=config.hidden_size,
        feature_size=3 * config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=num_kv_heads or config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        hidden_act=config.hidden_act,
        rope_theta=config.rope_parameters["rope_theta"],
        max_position_embeddings=config.max_position_embeddings,
        capture_layers=capture_layers({}, config.num_hidden_layers),
    )


def new_head(
    model: PreTrainedModel, vocabulary: Tensor, scales: Tensor, *, noise: float = 0.01, num_kv_heads: int | None = None
) -> Eagle3Head:
    """A head in fp32 that takes features *divided by their scales* and begins as the target's last layer."""
    head = random_head(model, vocabulary, noise=noise, num_kv_heads=num_kv_heads)
    _copy_last_layer(head, model, scales)
    lm_head: Any = model.get_output_embeddings()
    with torch.no_grad():
        head.lm_head.weight.copy_(lm_head.weight[vocabulary])
    return head


@torch.no_grad()
def random_head(
    model: PreTrainedModel, vocabulary: Tensor, *, noise: float = 0.02, num_kv_heads: int | None = None
) -> Eagle3Head:
    """A head in fp32 with normal weights of deviation ``noise`` over the sorted draft ``vocabulary``."""
    head = Eagle3Head(head_config(model, len(vocabulary), num_kv_heads)).float()
    for parameter in head.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=noise)
    if len(vocabulary) < head.config.vocab_size:
        head.d2t.copy_(vocabulary - torch.arange(len(vocabulary)))
        head.t2d[vocabulary] = True
    return head


@torch.no_grad()
def _copy_last_layer(head: Eagle3Head, model: PreTrainedModel, scales: Tensor) -> None:
    """``fc`` passes the highest tap through. That tap then has unit scale, where the target's last layer expects
    ``scales[2]``, so what the layer adds to it is divided by the same number.
    """
    decoder: Any = model.get_decoder()
    last, layer = decoder.layers[-1], head.midlayer
    size = head.config.hidden_size
    head.fc.weight[:, 2 * size :] += torch.eye(size)
    layer.hidden_norm.weight.copy_(last.input_layernorm.weight)
    layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
    copies = head.config.num_kv_heads // model.config.get_text_config().num_key_value_heads
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(last.self_attn, name).weight
        if name != "q_proj":
            # More key/value heads than the target's: those of a group start equal.
            weight = weight.unflatten(0, (-1, head.config.head_dim)).repeat_interleave(copies, 0).flatten(0, 1)
        getattr(layer.self_attn, name).weight[:, size:] = weight
    layer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight / scales[2])
    layer.mlp.gate_proj.weight.copy_(last.mlp.gate_proj.weight)
    layer.mlp.up_proj.weight.copy_(last.mlp.up_proj.weight)
    layer.mlp.down_proj.weight.copy_(last.mlp.down_proj.weight / scales[2])
    head.norm.weight.copy_(decoder.norm.weight)


@dataclass(frozen=True)
class StartingPoint:
    """An untrained head with what its numbers mean: feature scales [3] and sorted draft vocabulary [Dv]."""

    head: Eagle3Head
    scales: Tensor
    vocabulary: Tensor


def starting_point(
    model: PreTrainedModel,
    dataset: ShardDataset,
    draft_vocab_size: int,
    earlier: dict[str, Any] | Eagle3Head | None = None,
    *,
    from_target: bool = True,
    num_kv_heads: int | None = None,
) -> StartingPoint:
    """A head over the vocabulary of ``dataset``, bound to the embedding of ``model``.

    Its weights come from an ``earlier`` checkpoint or exported head, else from the target's last layer, else they are
    random.
    """
    features, hidden = sample_states(dataset)
    vocab_size = model.config.get_text_config().vocab_size
    lm_head = model.get_output_embeddings()
    vocabulary = draft_vocabulary(dataset.drawn_tokens(), hidden, lm_head, vocab_size, draft_vocab_size)
    if isinstance(earlier, Eagle3Head):
        earlier = as_checkpoint(earlier, feature_scales(features))
    scales = feature_scales(features) if earlier is None else earlier["scales"]
    if from_target:
        head = new_head(model, vocabulary, scales, num_kv_heads=num_kv_heads)
    else:
        head = random_head(model, vocabulary, num_kv_heads=num_kv_heads)
    if earlier is not None:
        adopt(head, earlier["head"], vocabulary, earlier["vocabulary"])
    return _bound(StartingPoint(head, scales, vocabulary), model)


def as_checkpoint(head: Eagle3Head, scales: Tensor) -> dict[str, Any]:
    """What `starting_point` reads of a checkpoint, from a head that takes features as they are (`export_head`)."""
    state = {name: tensor.float() for name, tensor in head.state_dict().items() if tensor.is_floating_point()}
    state["fc.weight"] = state["fc.weight"] * scales.repeat_interleave(head.config.hidden_size)
    vocabulary = head.to_target(torch.arange(head.config.draft_vocab_size))
    return {"head": state, "scales": scales, "vocabulary": vocabulary}


def resumed_point(model: PreTrainedModel, checkpoint: dict[str, Any]) -> StartingPoint:
    """The head of a checkpoint.pt, bound to the embedding of ``model``."""
    vocabulary, state = checkpoint["vocabulary"], checkpoint["head"]
    config = head_config(model, len(vocabulary))
    num_kv_heads = len(state["midlayer.self_attn.k_proj.weight"]) // config.head_dim
    head = random_head(model, vocabulary, num_kv_heads=num_kv_heads)
    head.load_state_dict(state)
    return _bound(StartingPoint(head, checkpoint["scales"], vocabulary), model)


def _bound(start: StartingPoint, model: PreTrainedModel) -> StartingPoint:
    start.head.bind(model.get_input_embeddings().requires_grad_(False), model.get_output_embeddings())
    return start


@torch.no_grad()
def adopt(head: Eagle3Head, state: dict[str, Tensor], vocabulary: Tensor, old_vocabulary: Tensor) -> None:
    """Take over the weights of an earlier head, whose draft vocabulary may differ: new ids keep the target's rows."""
    shared = torch.isin(vocabulary, old_vocabulary)
    rows = head.lm_head.weight.clone()
    rows[shared] = state["lm_head.weight"][torch.searchsorted(old_vocabulary, vocabulary[shared])]
    ours = {name: state[name] for name in state if name not in ("lm_head.weight", "d2t", "t2d")}
    head.load_state_dict(ours | {"lm_head.weight": rows}, strict=False)
