"""What tuning has found, kept per pair, device, dtype and number of threads."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from eagle_mars.draft.proposer import Proposer
from eagle_mars.embedded import cache_home
from eagle_mars.info import cpu_model
from eagle_mars.target import TargetModel
from eagle_mars.tuning.tuner import Tuning, tune

logger = logging.getLogger(__name__)
_SAMPLES = 64  # numbers of each tensor that tell checkpoints apart


def store_path() -> Path:
    """The file, beside the converted models."""
    return cache_home() / "trees.json"


def tuned(
    target: TargetModel, head: Proposer, prompts: Sequence[Tensor], stop_ids: Collection[int], *, fresh: bool
) -> Tuning:
    """What was found before for this pair here, or `tune` on prompts [1, L]. fresh: measure in any case."""
    own = key(target.model, head)
    found = None if fresh else load(own)
    if found is None:
        found = tune(target, head, prompts, stop_ids=stop_ids)
        save(own, found)
    logger.info("draft tree %s: %.1f tokens/s expected", found.best.draft, found.best.tokens_per_second)
    return found


def key(target: nn.Module, head: nn.Module) -> str:
    """Changes with the weights, their layout and dtype, the device, the threads and the release of torch."""
    digest = hashlib.sha256()
    for module in (target, head):
        digest.update(" ".join(sorted({type(part).__name__ for part in module.modules()})).encode())
        for name, parameter in module.named_parameters():
            flat = parameter.detach().flatten()
            sample = flat[:: max(1, flat.numel() // _SAMPLES)].float().cpu().numpy().tobytes()
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.device.type}".encode())
            digest.update(sample)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_model()
    digest.update(f"{device} {torch.get_num_threads()} {torch.__version__}".encode())
    return digest.hexdigest()[:32]


def load(key: str) -> Tuning | None:
    """What was found before; None if nothing was, or if the file can't be read any more."""
    try:
        return Tuning.model_validate(json.loads(store_path().read_text("utf-8"))[key])
    except (FileNotFoundError, KeyError):
        return None
    except (OSError, ValueError, ValidationError) as error:
        logger.warning("%s can't be used (%s); tuning again", store_path(), error)
        return None


def save(key: str, tuning: Tuning) -> None:
    """Add to the file; a reader sees the old one or the new one."""
    path = store_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        known = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        known = {}
    known[key] = tuning.model_dump()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(known, file, indent=1)
    Path(name).replace(path)
