"""Find and read the files of a draft head: a local directory or a hub repository, safetensors first."""

from __future__ import annotations

import json
import re
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from eagle_mars.errors import CheckpointError

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def find_checkpoint(path: str | Path) -> Path:
    """The local directory of `path`, downloaded if it is a hub id ("owner/name") and no such directory exists.

    Raises CheckpointError if it is neither, or can't be downloaded.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if local.exists():
        raise CheckpointError(f"{local} is a file; give the directory that holds the head's config.json and weights.")
    if not _HUB_ID.fullmatch(str(path)):
        raise CheckpointError(f"There is no directory {local}; give a local directory or a hub id like owner/name.")
    try:
        found = _download(str(path), "*.safetensors")
        if not any(found.glob("*.safetensors")):  # a .bin beside safetensors is the same weights once more
            found = _download(str(path), "*.bin")
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise CheckpointError(
            f"{path} is no local directory and could not be fetched from the hub ({type(error).__name__}: {reason}); "
            "check the name and the network, or download it and give its directory."
        ) from error
    return found


def _download(repository: str, weights: str) -> Path:
    return Path(snapshot_download(repository, allow_patterns=["config.json", "*.index.json", weights]))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError if the file is missing, unreadable, or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}; it is needed beside the weights.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error}); fetch it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(value).__name__}; fetch it again.")
    return value


def tensor_names(directory: Path) -> set[str]:
    """Names of all tensors of a checkpoint, without reading their values where the format allows.

    Raises CheckpointError like `read_tensors`.
    """
    single = directory / _WEIGHTS[0]
    if single.is_file():
        try:
            with safe_open(single, "pt") as file:
                return set(file.keys())
        except (OSError, SafetensorError) as error:
            raise _unreadable(single, error) from error
    for name in _WEIGHTS:
        if name.endswith(".json") and (directory / name).is_file():
            return set(_weight_map(directory / name))
    return set(read_tensors(directory))


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a head, on the CPU, memory-mapped where the format allows.

    Looks for model.safetensors, then pytorch_model.bin, each possibly in shards listed by an index file.
    Raises CheckpointError if there is none, or one is damaged.
    """
    for name in _WEIGHTS:
        path = directory / name
        if not path.is_file():
            continue
        if path.suffix != ".json":
            return _read_file(path)
        shards = _weight_map(path)
        tensors: dict[str, Tensor] = {}
        for shard in sorted(set(shards.values())):
            tensors |= _read_file(directory / shard)
        return tensors
    raise CheckpointError(f"{directory} holds no weights; expected {_WEIGHTS[0]} or {_WEIGHTS[2]}.")


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name → file of a checkpoint in shards."""
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict):
        raise CheckpointError(f"{index} has no weight_map; fetch it again.")
    return shards


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # Files of torch < 1.6 are no zip archives, and only archives can be mapped.
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except (OSError, EOFError, RuntimeError, ValueError, SafetensorError, UnpicklingError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise CheckpointError(f"{path} must hold a dictionary of tensors (a state_dict).")
    return tensors


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    reason = str(error).strip().split("\n")[0].rstrip(".")
    return CheckpointError(
        f"{path} can't be read ({reason}); the file is missing, truncated or damaged: fetch it again."
    )
