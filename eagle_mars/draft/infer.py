"""Derive a head's `HeadConfig` from its tensors, its config.json and its target: shapes win over config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.activations import ACT2FN

from eagle_mars.draft.layers import HeadConfig, Rotary
from eagle_mars.errors import CheckpointError


@dataclass(frozen=True)
class TargetSizes:
    """The numbers of a target that a head must fit: hidden size, embedding rows, decoder layers."""

    hidden_size: int
    vocab_size: int
    num_layers: int


def is_eagle3(tensors: Mapping[str, Tensor]) -> bool:
    """The family, from names: only EAGLE-3 norms the feature stream in front of its attention."""
    return any(name.endswith(".hidden_norm.weight") or name.startswith("midlayer.") for name in tensors)


def canonical_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under EAGLE's own names.

    Other trainers prefix everything with "model." and call EAGLE-3's layer `layers.0`. Rotary frequencies, which old
    versions of transformers saved, are dropped: they are computed.
    """
    renamed = {
        name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
        if not name.endswith("rotary_emb.inv_freq")
    }
    if is_eagle3(renamed):
        renamed = {
            "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name: tensor
            for name, tensor in renamed.items()
        }
    return renamed


def capture_layers(raw: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Decoder layers of an EAGLE-3 target whose inputs are the features: {2, N//2, N-3} unless config.json says more.

    `eagle_config.eagle_aux_hidden_state_layer_ids` (SpecForge, SGLang, ModelOpt) counts layers whose *output* is
    taken, so i there is the input of layer i + 1; the same key at the top level (speculators, vLLM) counts inputs.
    Raises CheckpointError if the target has too few layers.
    """
    nested = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or ()
    listed = [i + 1 for i in nested] or list(raw.get("eagle_aux_hidden_state_layer_ids") or ())
    if listed:
        if len(set(listed)) < len(listed) or min(listed) < 0 or max(listed) >= layers:
            raise CheckpointError(
                f"the head wants the inputs of decoder layers {sorted(listed)}, distinct and below the target's layer "
                f"count of {layers}; it was trained for another target."
            )
        return tuple(sorted(listed))
    taps = sorted({2, layers // 2, layers - 3})
    if len(taps) < 3 or taps[0] < 0:
        raise CheckpointError(
            f"an EAGLE-3 head needs three distinct layers 2, N//2 and N-3, but the target has only N={layers} layers "
            f"(2, {layers // 2}, {layers - 3}); name other layers in config.json under "
            "eagle_config.eagle_aux_hidden_state_layer_ids."
        )
    return tuple(taps)


def infer_config(tensors: Mapping[str, Tensor], raw: Mapping[str, Any], target: TargetSizes) -> HeadConfig:
    """The shape of a head whose tensors have their canonical names.

    A tensor that is missing leaves its numbers to config.json, so that the audit can still name it.
    Raises CheckpointError if config.json contradicts the shapes or asks for something that isn't supported.
    """
    raw = {**raw, **(raw.get("transformer_layer_config") or {})}  # speculators nests the decoder's numbers
    if raw.get("norm_before_residual"):
        raise CheckpointError("the head has norm_before_residual=true in config.json, which is not supported.")
    activation = raw.get("hidden_act", "silu")
    if activation not in ACT2FN:
        raise CheckpointError(f'hidden_act "{activation}" in config.json is not an activation of transformers.')
    eagle3 = is_eagle3(tensors)
    layer = "midlayer" if eagle3 else "layers.0"

    def size(name: str, axis: int, otherwise: int) -> int:
        tensor = tensors.get(name)
        return otherwise if tensor is None or tensor.ndim <= axis else tensor.shape[axis]

    hidden = size("fc.weight", 0, raw.get("hidden_size") or target.hidden_size)
    taps = capture_layers(raw, target.num_layers) if eagle3 else ()
    heads, kv_heads, head_dim = _heads(raw, hidden, tensors, layer)
    theta, scaling = _rope(raw)
    config = HeadConfig(
        hidden_size=hidden,
        feature_size=target.hidden_size * max(len(taps), 1),
        intermediate_size=size(f"{layer}.mlp.gate_proj.weight", 0, raw.get("intermediate_size") or 4 * hidden),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=(
            size("lm_head.weight", 0, raw.get("draft_vocab_size") or target.vocab_size) if eagle3 else target.vocab_size
        ),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        hidden_act=activation,
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        num_layers=1 if eagle3 else _count_layers(tensors),
        fc_bias="fc.bias" in tensors,
        qkv_bias=f"{layer}.self_attn.q_proj.bias" in tensors,
        capture_layers=taps,
    )
    try:
        Rotary(config)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"rope_scaling={scaling} in config.json is incomplete: {error.args[0]}.") from error
    return config


def _heads(raw: Mapping[str, Any], hidden: int, tensors: Mapping[str, Tensor], layer: str) -> tuple[int, int, int]:
    """Heads, kv heads and head size: the head count is config.json's, what follows from it is read off the shapes."""
    q, k = tensors.get(f"{layer}.self_attn.q_proj.weight"), tensors.get(f"{layer}.self_attn.k_proj.weight")
    heads, head_dim = raw.get("num_attention_heads"), raw.get("head_dim")
    q_rows = q.shape[0] if q is not None else (heads * head_dim if heads and head_dim else hidden)
    if not heads:
        heads = q_rows // head_dim if head_dim else 32
    kv_heads = raw.get("num_key_value_heads")
    k_rows = k.shape[0] if k is not None else q_rows // heads * (kv_heads or heads)
    head_dim = q_rows // heads
    fits = head_dim > 0 and q_rows % heads == 0 and k_rows % head_dim == 0
    if not fits or head_dim % 2 or heads % (k_rows // head_dim) or kv_heads not in (None, k_rows // head_dim):
        raise CheckpointError(
            f"q_proj with {q_rows} rows and k_proj with {k_rows} rows don't make {heads} attention heads and "
            f"{kv_heads or heads} key/value heads of one even size; correct num_attention_heads and "
            "num_key_value_heads in the head's config.json."
        )
    return heads, k_rows // head_dim, head_dim


def _count_layers(tensors: Mapping[str, Tensor]) -> int:
    return len({name.split(".")[1] for name in tensors if name.startswith("layers.")}) or 1


def _rope(raw: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling as the raw JSON has them; transformers 5 writes both into `rope_parameters`.

    An absent base is 10000, whatever the target uses: EAGLE's trainer never wrote one (EAGLE_SPEC 1.3).
    """
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(scaling.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0)
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    if kind == "default":
        return theta, None
    if kind not in Rotary.SCALINGS:
        raise CheckpointError(
            f'rope_scaling of type "{kind}" in config.json is not supported; known types: {", ".join(Rotary.SCALINGS)}.'
        )
    return theta, {**scaling, "type": kind}
