"""SGLang's own verification on a machine that can't run SGLang: its files as they are in the wheel, on a stand.

Real: `eagle_sample`, the Triton kernels (greedy tree, sampled chain), `SamplingParams`, the hook registry, auxiliary
outputs. Stood in for: everything that needs a GPU, a model or a server, and `tree_speculative_sampling_target_only`, a
CUDA kernel, by the function of that name below, written from what the kernel does. Triton runs in its interpreter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from eagle_mars.engines import sglang as plugin
from eagle_mars.engines.request import MarsRequest
from eagle_mars.tree import DraftTree
from tests.engines.links import links

PACKAGES = (
    "sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.speculative", "sglang.srt",
    "sglang.srt.managers", "sglang.srt.plugins", "sglang.srt.sampling", "sglang.srt.speculative",
)  # fmt: skip
SPEC = SimpleNamespace(
    speculative_use_rejection_sampling=False,
    speculative_use_block_verification=False,
    speculative_accept_threshold_single=1.0,
    speculative_accept_threshold_acc=1.0,
)
PARALLEL = SimpleNamespace(
    pp_size=1, attn_tp_rank=0, tp_group=SimpleNamespace(world_size=1), attn_tp_group=SimpleNamespace(world_size=1)
)


class ServerArgs:
    def check_server_args(self) -> None: ...


def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """With thresholds of 1, each node has one coin, and its children are tried in order: the first is accepted at which
    their summed probability exceeds the coin. The token after the path is drawn from the last node's row without the
    children tried there, or from the whole row where the path has its full length.
    """
    length = accept_index.shape[1]
    for b, tokens in enumerate(candidates.tolist()):
        first, following = retrive_next_token[b].tolist(), retrive_next_sibling[b].tolist()
        at, accepted, tried = 0, 0, []
        accept_index[b, 0] = retrive_index[b, 0]
        while accepted < length - 1:
            child, mass, tried = first[at], 0.0, []
            while child >= 0:
                p = float(target_probs[b, at, tokens[child]])
                mass += p
                if p > 0 and float(uniform_samples[b, at]) < mass:
                    break
                tried.append(tokens[child])
                child = following[child]
            if child < 0:
                break
            predicts[retrive_index[b, at]] = tokens[child]
            at, accepted, tried = child, accepted + 1, []
            accept_index[b, accepted] = retrive_index[b, child]
        row = target_probs[b, at].double()
        row[tried] = 0
        total = row.cumsum(0)
        coin = uniform_samples_for_final_sampling[b].double()
        accept_token_num[b] = accepted
        predicts[retrive_index[b, at]] = int(torch.searchsorted(total, coin * total[-1], right=True))


def renormalised(probs: Tensor, kept: Tensor) -> Tensor:
    probs = probs.masked_fill(~kept, 0.0)
    return probs / probs.sum(-1, keepdim=True)


def keep_top_k(probs: Tensor, top_ks: Tensor) -> Tensor:
    ranked = probs.sort(-1, descending=True).values
    last = (top_ks.long() - 1).clamp(max=probs.shape[-1] - 1)
    return renormalised(probs, probs >= ranked.gather(-1, last.unsqueeze(-1)))


def keep_top_p(probs: Tensor, top_ps: Tensor) -> Tensor:
    ranked, order = probs.sort(-1, descending=True)
    kept = ranked.double().cumsum(-1) - ranked < top_ps.unsqueeze(-1)
    return renormalised(probs, torch.zeros_like(kept).scatter(-1, order, kept))


def module(name: str, **content: object) -> None:
    """A stand-in module. Its parents must be there."""
    made = sys.modules[name] = ModuleType(name)
    made.__path__ = []
    vars(made).update(content)


def load(sources: Path) -> ModuleType:
    """SGLang's `eagle_utils` from the unpacked wheel in `sources`, everything around it in place, no hook yet."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1 before anything imports triton"
    assert "sglang" not in sys.modules, "one stand per process"
    for name in PACKAGES:  # their own __init__ files would import half of the server
        module(name)
        sys.modules[name].__path__ = [str(sources.joinpath(*name.split(".")))]
    (version,) = sources.glob("sglang-*.dist-info")
    sys.modules["sglang"].__version__ = version.name.removesuffix(".dist-info").removeprefix("sglang-")

    def nothing(*_: object, **__: object) -> None: ...

    def no() -> bool:
        return False

    module("sglang.srt.utils", **dict.fromkeys(("is_cpu", "is_cuda", "is_hip", "is_musa", "is_npu"), no))
    sys.modules["sglang.srt.utils"].is_xpu = lambda: True  # the platform whose greedy verifier is the Triton kernel
    module("sglang.srt.utils.async_probe", **dict.fromkeys(
        ("maybe_detect_oob", "maybe_detect_nan", "sanitize_nan_logits"), nothing
    ))  # fmt: skip
    module("sglang.srt.platforms", current_platform=None)
    module("sglang.srt.platforms.interface", reject_out_of_tree_path=nothing)
    module("sglang.srt.runtime_context", get_spec=lambda: SPEC, get_parallel=lambda: PARALLEL,
           get_observability=lambda: SimpleNamespace(enable_metrics=False))  # fmt: skip
    for name in ("hardware_backend", "hardware_backend.npu", "hardware_backend.npu.dsv4", "mem_cache", "layers",
                 "sampling.penaltylib", "sampling.watermarking"):  # fmt: skip
        module(f"sglang.srt.{name}")
    module("sglang.srt.hardware_backend.npu.dsv4.dsv4_common_hooks", maybe_build_dsv4_verify_bundle=nothing)
    module("sglang.srt.mem_cache.allocation", alloc_for_spec_decode=nothing)
    module("sglang.srt.mem_cache.allocation_sizing", get_alloc_reserve_per_decode=nothing,
           page_aligned_decode_alloc_lens=nothing)  # fmt: skip
    module("sglang.srt.layers.dp_attention", is_dp_attention_enabled=no)
    module("sglang.srt.sampling.penaltylib.repetition_penalty", apply_scaling_penalties=nothing)
    module("sglang.srt.sampling.watermarking.core", WatermarkRequestConfig=dict, normalize_watermark_request=nothing)
    module("sglang.srt.speculative.spec_utils", SIMULATE_ACC_LEN=-1, SIMULATE_ACC_TOKEN_MODE="fixed",
           generate_simulated_accept_index=nothing)  # fmt: skip
    module("sglang.srt.server_args", ServerArgs=ServerArgs)
    module("sglang.kernels.ops.sampling", softmax=lambda z, temperatures: (z / temperatures).softmax(-1))
    module("sglang.kernels.ops.sampling.renorm", top_k_renorm_prob=keep_top_k, top_p_renorm_prob=keep_top_p)
    chain = import_module("sglang.kernels.ops.speculative.reject_sampling").chain_speculative_sampling_triton
    module("sglang.kernels.ops.speculative.verify_sampling", chain_speculative_sampling_triton=chain,
           tree_speculative_sampling_target_only=tree_speculative_sampling_target_only)  # fmt: skip
    return import_module("sglang.srt.speculative.eagle_utils")


def install(default: MarsRequest) -> None:
    """The plugin, by SGLang's own registry."""
    plugin.install(default)
    import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()


@dataclass(frozen=True)
class Sampled:
    """How the batch is sampled: [B] temperature, top_k, top_p; accept [B, M] and draw [B] are the verifier's coins.

    q: [B, M - 1, V] of a chain whose drafts were drawn from it, else None: the tree sampler.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    accept: Tensor
    draw: Tensor
    q: Tensor | None = None


@contextmanager
def path_of(eagle: ModuleType, sampled: Sampled | None) -> Iterator[None]:
    """Which of `eagle_sample`'s verifiers is taken, and the coins that it gets."""
    before = eagle._is_xpu, eagle._verify_coins, SPEC.speculative_use_rejection_sampling
    if sampled is not None:
        eagle._is_xpu = False
        eagle._verify_coins = lambda **_: (sampled.accept, sampled.draw)
        SPEC.speculative_use_rejection_sampling = sampled.q is not None
    try:
        yield
    finally:
        eagle._is_xpu, eagle._verify_coins, SPEC.speculative_use_rejection_sampling = before


def verify(
    eagle: ModuleType, tree: DraftTree, logits: Tensor, requests: list[Any], levels: int, sampled: Sampled | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`eagle_sample` on a batch of trees: (path [B, levels + 1], next token [B], relaxed [B, levels] flags)."""
    batch, nodes = tree.tokens.shape
    first, following = links(tree)
    index = torch.arange(batch * nodes).view(batch, nodes)
    given = SimpleNamespace(
        draft_token=tree.tokens.flatten(),
        draft_token_num=nodes,
        max_tree_depth=levels + 1,
        tree_topk=-1,
        retrieve_index=index,
        retrieve_next_token=first,
        retrieve_next_sibling=following,
        draft_probs=None if sampled is None else sampled.q,
    )
    info = SimpleNamespace(
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        is_all_greedy=sampled is None,
        sampling_seed=None,
        need_min_p_sampling=False,
    )
    if sampled is not None:
        info.temperatures, info.top_ks, info.top_ps = sampled.temperature.unsqueeze(1), sampled.top_k, sampled.top_p
        info.need_top_k_sampling = info.need_top_p_sampling = True
    step = SimpleNamespace(
        device="cpu",
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        seq_lens=torch.zeros(batch, dtype=torch.long),
        sampling_info=info,
        reqs=requests,
        return_logprob=False,
    )
    output = SimpleNamespace(next_token_logits=logits.flatten(0, 1).clone(), auxiliary_device_output=None)
    with path_of(eagle, sampled):
        predict, lengths, accepted = eagle.eagle_sample(given, step, output)
    path = torch.where(accepted < 0, -1, accepted.long() % nodes)
    assert torch.equal(lengths.long(), (path >= 0).sum(-1))
    last = accepted.long().gather(1, lengths.long().unsqueeze(1) - 1).squeeze(1)
    flags = output.auxiliary_device_output
    none = torch.zeros(batch, levels, dtype=torch.bool)
    return path, predict.long()[last], none if flags is None or flags.flags is None else flags.flags
