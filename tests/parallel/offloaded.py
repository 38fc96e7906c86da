"""`torchrun -m tests.parallel.offloaded TARGET HEAD OUT`: each process holds a copy of which parts wait on disk.

Process r decodes the prompts r, r + 2, …; the first one writes what all of them decoded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from eagle_mars import EaModel, VerifyConfig

PROMPTS = ["abc", "a b", "ccab", "bca"]


def texts(ea: EaModel, prompts: list[str]) -> list[list[int]]:
    exact = VerifyConfig(rule="exact")
    return [list(ea.generate(prompt, max_new_tokens=12, verify=exact).token_ids) for prompt in prompts]


def main(target: str, head: str, out: str) -> None:
    from tests.test_device_map import ON_DISK, SHAPE

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = f"{out}.weights-{rank}"
    ea = EaModel.from_pretrained(target, head, *SHAPE, device_map=ON_DISK, offload_folder=folder)
    mine = {
        "texts": texts(ea, PROMPTS[rank::world]),
        "away": sum(p.device.type == "meta" for p in ea.base_model.parameters()),
    }
    everyone: list[dict[str, object]] = [{}] * world
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        Path(out).write_text(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
