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

from triton import backends


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


def pretend_backend() -> None:
    """Before anything of vLLM is imported."""
    backends.backends["cpu"] = SimpleNamespace(driver=_Driver, compiler=None)


if __name__ == "__main__":
    pretend_backend()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
