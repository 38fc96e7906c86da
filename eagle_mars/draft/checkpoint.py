"""Load a released draft head: find its files, detect its family, audit every name and shape, bind it to its target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from eagle_mars.draft.eagle1 import Eagle1Head
from eagle_mars.draft.eagle3 import Eagle3Head
from eagle_mars.draft.files import find_checkpoint, read_json, read_tensors
from eagle_mars.draft.head import Head
from eagle_mars.draft.infer import TargetSizes, canonical_names, infer_config, is_eagle3
from eagle_mars.draft.layers import HeadConfig
from eagle_mars.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def load_head(
    path: str | Path,
    target_config: PretrainedConfig,
    *,
    embed_tokens: nn.Module,
    lm_head: nn.Module,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Head:
    """Load an EAGLE-1/2 or EAGLE-3 head for a target and borrow the target's embedding and output projection.

    path: local directory, or hub id. target_config: the target's text config (hidden_size, vocab_size,
    num_hidden_layers are read). embed_tokens, lm_head: the target's modules; a head that brings an embedding keeps it.
    dtype, device: of the head; EAGLE uses the target's dtype and the device of its last layer.

    Raises CheckpointError: files missing or damaged, or a head that doesn't fit, with every mismatch listed.
    """
    directory = find_checkpoint(path)
    target = TargetSizes(target_config.hidden_size, target_config.vocab_size, target_config.num_hidden_layers)
    try:
        raw = read_json(directory / "config.json")
        tensors = canonical_names(read_tensors(directory))
        head = _build(tensors, raw, target)
    except CheckpointError as error:
        raise CheckpointError(f"Draft head {path}: {error}") from error.__cause__
    state = {
        # A copy even where nothing changes: the tensors read are views of a mapped file, which may be replaced later.
        name: tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
        for name, tensor in tensors.items()
    }
    head.load_state_dict(state, assign=True)
    head.bind(embed_tokens, lm_head)
    return head.eval().requires_grad_(False)


def _build(tensors: dict[str, Tensor], raw: dict[str, Any], target: TargetSizes) -> Head:
    """The head on the meta device, audited; `tensors` is completed or trimmed to exactly its state."""
    config = infer_config(tensors, raw, target)
    own_embedding = "embed_tokens.weight" in tensors
    with torch.device("meta"):
        head: Head = (Eagle3Head if is_eagle3(tensors) else Eagle1Head)(config, own_embedding)
    if config.draft_vocab_size == config.vocab_size:  # the mapping is the identity; some files carry it nevertheless
        tensors.pop("d2t", None)
        tensors.pop("t2d", None)
    elif "t2d" not in tensors and "d2t" in tensors:
        tensors["t2d"] = _membership(tensors["d2t"], config.vocab_size)
    problems = _misfits(config, tensors, raw, target, own_embedding) + _audit(head, tensors)
    if not problems and "d2t" in tensors:
        problems = _mapping_faults(tensors["d2t"], tensors["t2d"])
    if problems:
        raise CheckpointError("it doesn't fit: " + "; ".join(problems) + ".")
    return head


def _misfits(
    config: HeadConfig, tensors: dict[str, Tensor], raw: dict[str, Any], target: TargetSizes, own_embedding: bool
) -> list[str]:
    """Where head and target disagree, in the words of a user: which number against which."""
    problems = []
    fc = tensors.get("fc.weight")
    taps = max(len(config.capture_layers), 1)
    embedded = 0 if config.capture_layers else config.hidden_size  # EAGLE-1/2 puts the embedding into fc
    if fc is not None and fc.ndim == 2 and fc.shape[1] - embedded != config.feature_size:
        width = fc.shape[1] - embedded
        problems.append(
            f"the head expects features {taps}x{width / taps:g}={width} wide, "
            f"the target gives {taps}x{target.hidden_size}={config.feature_size}"
        )
    borrows = not own_embedding or not config.capture_layers
    if borrows and config.hidden_size != target.hidden_size:
        problems.append(f"the head's hidden size is {config.hidden_size}, the target's is {target.hidden_size}")
    vocabulary = _vocabulary(tensors, raw)
    if vocabulary is not None and vocabulary != target.vocab_size:
        problems.append(f"the head's vocabulary has {vocabulary} tokens, the target's has {target.vocab_size}")
    return problems


def _vocabulary(tensors: dict[str, Tensor], raw: dict[str, Any]) -> int | None:
    """The target vocabulary that the head was trained for, if its files tell."""
    for name in ("t2d", "embed_tokens.weight"):
        if name in tensors:
            return tensors[name].shape[0]
    return raw.get("vocab_size")


def _audit(head: Head, tensors: dict[str, Tensor]) -> list[str]:
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    problems = []
    missing = sorted(expected.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - expected.keys())
    if missing:
        problems.append("missing " + ", ".join(f"{name} {list(expected[name])}" for name in missing))
    if unexpected:
        problems.append("unexpected " + ", ".join(f"{name} {list(tensors[name].shape)}" for name in unexpected))
    problems += [
        f"{name} is {list(tensors[name].shape)} instead of {list(shape)}"
        for name, shape in sorted(expected.items())
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    return problems


def _membership(d2t: Tensor, vocab_size: int) -> Tensor:
    ids = _target_ids(d2t)
    member = torch.zeros(vocab_size, dtype=torch.bool)
    member[ids[(ids >= 0) & (ids < vocab_size)]] = True
    return member


def _target_ids(d2t: Tensor) -> Tensor:
    return d2t.long() + torch.arange(d2t.shape[0])


def _mapping_faults(d2t: Tensor, t2d: Tensor) -> list[str]:
    """d2t holds offsets; with t2d it must describe one set of distinct target ids."""
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        return [f"d2t must be int64 and t2d bool, not {d2t.dtype} and {t2d.dtype}"]
    ids, vocabulary = _target_ids(d2t), t2d.shape[0]
    if ids.min() < 0 or ids.max() >= vocabulary:
        return [f"d2t reaches target ids {int(ids.min())} to {int(ids.max())}, outside the vocabulary of {vocabulary}"]
    if ids.unique().numel() < ids.numel():
        return ["d2t maps several draft tokens to one target token"]
    if not torch.equal(_membership(d2t, vocabulary), t2d):
        return ["t2d and d2t disagree about which tokens are in the draft vocabulary"]
    return []
