"""The processes of a data-parallel run (`torchrun` or `accelerate launch`), and which device each of them uses."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from accelerate import PartialState

from eagle_mars.errors import ConfigError

# A process that is done waits for the slowest one: no clock should end that.
_PATIENCE = timedelta(days=30)


@dataclass(frozen=True)
class Workers:
    """This process among the others. rank: from 0. size: number of processes."""

    state: PartialState
    device: str

    @classmethod
    def join(cls, device: str) -> Workers:
        """Meet the other processes, if a launcher started several. device: auto, cpu, cuda, ..."""
        cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
        launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
        state = PartialState(cpu=cpu, **({"timeout": _PATIENCE} if launched else {}))
        return cls(state, "cpu" if cpu else device)

    @property
    def rank(self) -> int:
        return int(self.state.process_index)

    @property
    def size(self) -> int:
        return int(self.state.num_processes)

    def wait(self) -> None:
        """Return when every process has come here."""
        self.state.wait_for_everyone()

    def leave(self) -> None:
        """Part from the other processes, for good."""
        self.state.destroy_process_group()

    def placement(self, gpus_per_model: int, max_gpu_memory: str | None) -> dict[str, Any]:
        """Keywords of the Hugging Face loader that put the model onto this process's device or devices.

        gpus_per_model: GPUs that one copy of the model is spread over. max_gpu_memory: of each, such as `40GiB`.
        Raises ConfigError if there are too few GPUs.
        """
        if self.device == "cpu":
            if gpus_per_model > 1 or max_gpu_memory:
                raise ConfigError("--num-gpus-per-model and --max-gpu-memory are for GPUs, but this run is on the CPU.")
            return {"device_map": "cpu"}
        if gpus_per_model == 1 and not max_gpu_memory:
            alone = self.size == 1 and self.device != "auto"
            return {"device_map": {"": self.device if alone else str(self.state.device)}}
        first = int(self.state.local_process_index) * gpus_per_model
        mine = range(first, first + gpus_per_model)
        present = torch.cuda.device_count()
        if mine.stop > present:
            raise ConfigError(
                f"--num-gpus-per-model {gpus_per_model} needs {mine.stop} GPUs for the processes of this machine, "
                f"which has {present}; start fewer processes."
            )
        limits: dict[int | str, Any] = {
            gpu: (max_gpu_memory or torch.cuda.mem_get_info(gpu)[0]) if gpu in mine else 0 for gpu in range(present)
        }
        return {"device_map": "auto", "max_memory": limits}
