"""Ahead-of-time compilation of the kernels, with no GPU present: for tests, and for the benchmark's resource table."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, CompiledKernel

from eagle_mars.verify.kernels import accept_and_walk, final_draw, row_statistics
from eagle_mars.verify.triton_backend import merge_chunk, walk_warps

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

_TYPES = {
    "*fp32": "temperature temperature_in cut draft_logprob z1_in z1_out z2_in z2_out mass_in mass_out",
    "*fp64": "theta_in gap_in budget_in regret_out",
    "*i32": "t1_in t1_out t2_in t2_out",
    "*i64": "tokens parents depth rule_in max_relaxed_in path_out accepted_out next_out invalid_out low_out "
    "rescued_out nonpositive_out last_in last_out",
    "*u8": "ancestors by_gap_in longest_in protected released_ratio_in draft_q_in greedy_in relaxed_out removed "
    "removed_out",
    "i32": "rows batch nodes vocab splits width stride_b stride_m stride_v",
}
_TYPE_OF = {name: kind for kind, names in _TYPES.items() for name in names.split()}
_COINS = {"accept_and_walk": "*fp32", "final_draw": "*fp64"}


@dataclass(frozen=True)
class Variant:
    """One kernel with its compile-time sizes."""

    kernel: Any
    constants: dict[str, Any]
    warps: int

    @property
    def name(self) -> str:
        return self.kernel.__name__


@dataclass(frozen=True)
class Resources:
    """Per thread: registers and bytes spilled (AMD: spilled registers). shared: bytes per program."""

    registers: int
    spills: int
    shared: int


def variants(nodes: int, block: int, splits: int, *, draws: bool, cut: bool, width: int = 16) -> Iterator[Variant]:
    """The launches of one verification; `nodes`, `splits` and `width` are powers of two."""
    warp = {"DRAWS": draws, "CUT": cut}
    walk = {"GROUP": 1, "NODES": nodes, "WIDTH": width, "CHUNK": merge_chunk(splits, nodes), **warp}
    yield Variant(row_statistics, {"ROWS": 1, "BLOCK": block, **warp}, 4)
    yield Variant(accept_and_walk, walk, walk_warps(nodes))
    if draws:
        draw = {"GROUP": 1, "NODES": nodes, "SPLITS": splits, "BLOCK": block, "CUT": cut}
        yield Variant(final_draw, draw, 8)


def compile_variant(variant: Variant, target: GPUTarget, logits: str = "bf16") -> CompiledKernel:
    """Compile for `target`; logits: element type, "fp32", "fp16" or "bf16"."""
    kinds = {**_TYPE_OF, "logits": f"*{logits}", "coins": _COINS.get(variant.name, "*fp32")}
    signature = {name: "constexpr" if name in variant.constants else kinds[name] for name in variant.kernel.arg_names}
    source = ASTSource(variant.kernel, signature=signature, constexprs=variant.constants)
    return triton.compile(source, target=target, options={"num_warps": variant.warps})


def resources(compiled: CompiledKernel, target: GPUTarget) -> Resources:
    """What the assembler reports: `ptxas --verbose` for NVIDIA, the metadata in the assembly for AMD."""
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        return Resources(_number(r"\.vgpr_count:\s*(\d+)", text), _number(r"\.vgpr_spill_count:\s*(\d+)", text),
                         compiled.metadata.shared)  # fmt: skip
    ptxas = get_ptxas(target.arch)  # Triton ships two, and each reads only the PTX version written for it
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(compiled.asm["ptx"])
        command = [ptxas.path, "--verbose", f"--gpu-name={_find(r'[.]target (sm_[0-9]+a?)', compiled.asm['ptx'])}"]
        run = subprocess.run(
            [*command, str(ptx), "-o", str(ptx.with_suffix(".cubin"))], capture_output=True, text=True, check=True
        )
    spills = _number(r"(\d+) bytes spill stores", run.stderr) + _number(r"(\d+) bytes spill loads", run.stderr)
    return Resources(_number(r"Used (\d+) registers", run.stderr), spills, compiled.metadata.shared)


def _number(pattern: str, text: str) -> int:
    return int(_find(pattern, text))


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the assembler's report has no {pattern!r}")
    return found.group(1)
