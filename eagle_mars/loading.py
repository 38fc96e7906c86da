"""Loading a target and its tokenizer, with every failure told in one sentence."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.distributed import DistributedConfig

from eagle_mars.errors import CheckpointError, ConfigError, UnsupportedTargetError

# What applies to every file of a repository, not only to the weights.
_HUB_OPTIONS = ("cache_dir", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")


def load_target(path: str | Path, role: str = "target", **kwargs: Any) -> tuple[PreTrainedModel, Any]:
    """The causal LM and the tokenizer at `path` (local directory or hub id), in the checkpoint's dtype by default.

    role: what the model is for, as error messages say it.
    kwargs: passed to `AutoModelForCausalLM.from_pretrained` (dtype, device_map, quantization_config, ...; `torch_dtype`
    works as well). tp_plan="auto" spreads every layer over the processes that torchrun has started.
    Raises CheckpointError if something is missing, unreadable or incomplete, UnsupportedTargetError for an
    encoder-decoder, ConfigError for options that can't be used together.
    """
    path = str(path)
    if path.startswith("~"):
        path = str(Path(path).expanduser())
    if path.startswith((".", "/")) and not Path(path).is_dir():
        raise CheckpointError(f"there is no {role} at {path}: no such directory; correct the path or give a hub id.")
    hub = {name: kwargs[name] for name in _HUB_OPTIONS if name in kwargs}
    try:
        config = AutoConfig.from_pretrained(path, **hub)
    except Exception as error:  # transformers' strict configs raise a type of their own for a wrong field
        raise CheckpointError(f"can't read the {role}'s config at {path}: {_first_line(error)}") from error
    if config.is_encoder_decoder:
        raise UnsupportedTargetError(
            f"{path} is an encoder-decoder ({config.model_type}) and can't be a {role}: use a decoder-only causal LM."
        )
    if "torch_dtype" in kwargs:
        kwargs["dtype"] = kwargs.pop("torch_dtype")
    kwargs.setdefault("dtype", "auto")
    if kwargs.get("tp_plan") is not None:
        _spread_over_processes(kwargs)
    for name in ("load_in_8bit", "load_in_4bit"):  # EAGLE's scripts pass them, switched off
        if kwargs.pop(name, False):
            raise ConfigError(f"{name} is gone from transformers; pass quantization_config=BitsAndBytesConfig(...).")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **kwargs)
        tokenizer = AutoTokenizer.from_pretrained(path, **hub)
    except ImportError as error:
        method = _quantization(config, kwargs)
        if method is None:
            raise  # names the missing package itself
        raise ConfigError(
            f"the {role} at {path} is quantised by {method}, which needs more packages: {_first_line(error)}"
        ) from error
    except Exception as error:  # safetensors, torch and tokenizers each raise types of their own
        raise CheckpointError(f"can't load the {role} at {path}: {_first_line(error)}") from error
    model, info = loaded
    bad = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
    if bad:
        shown = ", ".join(bad[:4]) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")
        raise CheckpointError(f"the {role} at {path} is incomplete: no fitting weights for {shown}; download it again.")
    return model, tokenizer


def _quantization(config: Any, kwargs: dict[str, Any]) -> str | None:
    """The method that the weights are, or are asked to be, quantised by; None: they aren't."""
    given = kwargs.get("quantization_config") or getattr(config, "quantization_config", None)
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else given.quant_method
    return str(getattr(method, "value", method))


def tensor_parallel_options(processes: int) -> dict[str, Any]:
    """Keywords for `load_target` that spread the target over exactly `processes` processes; none for 1.

    Raises ConfigError if torchrun has started another number of them.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1 and launched != processes:
        raise ConfigError(
            f"a target spread over {processes} processes needs exactly so many, and this run has {launched}; start it "
            f"with torchrun --nproc-per-node {processes} -m ..."
        )
    return {"tp_plan": "auto"} if processes > 1 else {}


def _spread_over_processes(kwargs: dict[str, Any]) -> None:
    if kwargs.get("device_map") is not None:
        raise ConfigError(
            "tp_plan puts a slice on each process's own device, so it excludes device_map; leave one of them out."
        )
    if "tp_plan" in inspect.signature(DistributedConfig).parameters:  # transformers deprecates the plain keyword
        kwargs["distributed_config"] = DistributedConfig(tp_plan=kwargs.pop("tp_plan"))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
