"""The processes of a run (`torchrun` or `accelerate launch`), and which device each of them uses.

By default each has a copy of the model and its share of the questions; a tensor-parallel model is one for all of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from accelerate import PartialState

from eagle_mars.errors import ConfigError
from eagle_mars.loading import tensor_parallel_options

# A process that is done waits for the slowest one: no clock should end that.
_PATIENCE = timedelta(days=30)


@dataclass(frozen=True)
class Workers:
    """This process among the others.

    tensor_parallel: processes that a copy of the model is spread over: 1, or all of them.
    rank: number of this process's copy, from 0. size: number of copies, which share the questions.
    """

    state: PartialState
    device: str
    tensor_parallel: int = 1

    @classmethod
    def join(cls, device: str, tensor_parallel: int = 1) -> Workers:
        """Meet the other processes, if a launcher started several. device: auto, cpu, cuda, ...

        Raises ConfigError if a tensor-parallel model has other processes than it needs.
        """
        tensor_parallel_options(tensor_parallel)
        cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
        launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
        state = PartialState(cpu=cpu, **({"timeout": _PATIENCE} if launched else {}))
        return cls(state, "cpu" if cpu else device, tensor_parallel)

    @property
    def rank(self) -> int:
        return int(self.state.process_index) // self.tensor_parallel

    @property
    def size(self) -> int:
        return int(self.state.num_processes) // self.tensor_parallel

    @property
    def first(self) -> bool:
        """Whether this process speaks for all."""
        return int(self.state.process_index) == 0

    @property
    def writes(self) -> bool:
        """Whether this process writes its copy's answers: all that share a copy have the same ones."""
        return int(self.state.process_index) % self.tensor_parallel == 0

    def wait(self) -> None:
        """Return when every process has come here."""
        self.state.wait_for_everyone()

    def leave(self) -> None:
        """Part from the other processes, for good."""
        self.state.destroy_process_group()

    def placement(self, gpus_per_model: int, max_gpu_memory: str | None) -> dict[str, Any]:
        """Keywords of the Hugging Face loader that put the model onto this process's device or devices.

        gpus_per_model: GPUs that one copy of the model is spread over. max_gpu_memory: of each, such as `40GiB`.
        Raises ConfigError if there are too few GPUs, or both ways of using several are asked for.
        """
        if self.tensor_parallel > 1:
            if gpus_per_model > 1 or max_gpu_memory:
                raise ConfigError(
                    "--tensor-parallel gives every process one device, so it excludes --num-gpus-per-model and "
                    "--max-gpu-memory; leave them out."
                )
            return {"device_map": None, **tensor_parallel_options(self.tensor_parallel)}
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
