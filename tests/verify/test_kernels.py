"""The kernels without a GPU: the interpreter suite in its own process, and compilation for every supported target."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eagle_mars.config import VerifyConfig
from eagle_mars.errors import ConfigError
from eagle_mars.tree import DraftTree
from eagle_mars.verify import verify
from eagle_mars.verify.compiled import TARGETS, compile_variant, resources, variants

ROOT = Path(__file__).parents[2]


def test_interpreted_kernels_equal_the_reference() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/verify/kernel_suite.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert "skipped" not in run.stdout


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for variant in variants(nodes=16, block=256, splits=4, draws=True, cut=True, width=8):
        compiled = compile_variant(variant, TARGETS[target])
        used = resources(compiled, TARGETS[target])
        assert 0 < used.registers <= 512
        assert used.spills == 0
        # B * M * V overflows 32 bits, so no logit may be addressed with an int32 offset.
        offsets = re.findall(r"tt\.addptr .*!tt\.ptr<bf16>>?, (?:tensor<\S+x)?(i\d+)>?", compiled.asm["ttir"])
        assert set(offsets) == {"i64"}


def test_a_backend_that_can_not_serve_says_why() -> None:
    tree = DraftTree.from_parents(torch.tensor([[0, 1]]), torch.tensor([[-1, 0]]))
    with pytest.raises(ConfigError, match=r"the logits are not on a GPU; use backend="):
        verify(tree, torch.zeros(1, 2, 4), VerifyConfig(), backend="triton")
