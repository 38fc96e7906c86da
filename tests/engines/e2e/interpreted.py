"""Triton kernels of vLLM on a machine without a GPU: `python -m tests.engines.e2e.interpreted MODULE ARGUMENTS`.

For tests only. vLLM counts Triton as present if a backend says that it is active; the kernels then run in Triton's
interpreter, which is numpy: slow, and no evidence about the compiler.
"""

from __future__ import annotations

import os
import runpy
import sys
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl
from triton import backends
from triton.language.extra import libdevice


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


@triton.jit
def _log1p(x):
    return tl.log(1.0 + x)


def pretend_backend() -> None:
    """Before anything of vLLM is imported."""
    libdevice.log1p = _log1p  # the interpreter has no device library
    backends.backends["cpu"] = SimpleNamespace(driver=_Driver, compiler=None)


if __name__ == "__main__":
    pretend_backend()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
