"""The direction of imports (DESIGN section 2), and what a plain `import eagle_mars` may load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "eagle_mars"

# What a module may import of this package; a folder's name stands for everything in it.
ALLOWED = {
    "errors": set(),
    "config": {"errors"},
    "tree": {"errors"},
    "result": set(),
    "text": set(),
    "scores": {"result"},
    "sampling": {"tree", "config", "errors"},
    "cache": {"config", "errors", "tree"},
    "attention": set(),
    "ranks": {"errors"},
    "causal_lm": {"attention", "errors"},
    "compiled": set(),
    "target": {"attention", "causal_lm", "cache", "compiled", "config", "errors", "ranks", "tree"},
    "draft": {"causal_lm", "compiled", "draft", "config", "errors", "tree"},
    "verify": {"verify", "sampling", "config", "errors", "tree"},
    "engine": {
        "compiled",
        "draft",
        "target",
        "cache",
        "verify",
        "sampling",
        "scores",
        "result",
        "config",
        "errors",
        "tree",
    },
    "batch": {"engine", "draft", "target", "verify", "sampling", "result", "config", "errors", "tree"},
    "speculative_batch": {"batch", "engine", "draft", "target", "verify", "sampling", "tree", "config", "errors"},
    "loading": {"errors"},
    "memory": {"config", "errors", "target"},
    "cpu": {"errors"},
    "prompts": {"errors"},
    "compare": {"result"},
    "stream": {"result", "text"},
    "engines": {"engines", "verify", "config", "errors", "tree", "__version__"},
    "embedded": {"config", "errors"},
    "tuning": {"tuning", "engine", "draft", "target", "verify", "embedded", "info", "tree", "config", "errors"},
    "render": {"compare", "result"},
    "info": {"__version__", "config", "embedded", "verify"},
    "eagle_api": {"engine", "target", "result", "config", "errors"},
    "hf_generate": {"engine", "draft", "target", "verify", "result", "config", "errors"},
    "model": {
        "batch",
        "eagle_api",
        "engine",
        "draft",
        "target",
        "verify",
        "loading",
        "cpu",
        "speculative_batch",
        "stream",
        "tuning",
        "result",
        "config",
        "errors",
    },
}
OUTERMOST = {
    "__init__",
    "cli",
    "cli_options",
    "tune_cli",
    "chat",
    "training",
}  # nothing above may import these; they may import all of it


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def owner(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path: Path) -> set[str]:
    """First names below `eagle_mars` that a file imports at run time."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import would escape this test"
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "eagle_mars":
            parts = node.module.split(".")[1:]
            found |= {parts[0]} if parts else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("eagle_mars.")}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_go_down(path: Path) -> None:
    name = owner(path)
    if name not in OUTERMOST:
        assert imported(path) <= ALLOWED[name]


def test_no_library_module_knows_the_outer_layers() -> None:
    for path in modules():
        text = path.read_text("utf-8")
        assert "import evaluation" not in text
        assert "from evaluation" not in text
        assert "from scripts" not in text


def test_files_stay_small() -> None:
    assert not [path for path in modules() if len(path.read_text("utf-8").splitlines()) > 400]


def test_plain_import_is_light() -> None:
    heavy = ["torch", "triton", "transformers", "fastapi", "fastchat", "gradio", "matplotlib", "typer"]
    code = f"import sys, eagle_mars; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_command_lines_help_is_light() -> None:
    heavy = ["torch", "transformers", "fastapi", "uvicorn", "fastchat", "gradio", "openai"]
    code = f"import sys, eagle_mars.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_using_the_model_needs_no_kernel_and_no_extra() -> None:
    heavy = ["fastapi", "fastchat", "gradio", "matplotlib", "gguf", "eagle_mars.verify.kernels"]
    code = f"import sys, eagle_mars; eagle_mars.EaModel; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
