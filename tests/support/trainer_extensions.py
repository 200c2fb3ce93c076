"""Doubles of the classes by which three trainers extend vLLM's workers.

Each does what the trainer's own class does with a worker, in code of ours: the names of its
methods, the attributes that it reads, and the order of its calls are those of OpenRLHF, verl and
prime-rl. Tensors travel over gloo, in shared memory, and in files.
"""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Client
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from shmllm import LoRARequest

HOST = "127.0.0.1"


class OneByOne:
    """As OpenRLHF's `WorkerWrap`: a call for each weight, in a group with the trainer."""

    device: Any
    model_config: Any
    model_runner: Any

    def init_process_group(self, port: int, rank_offset: int, world_size: int) -> int:
        assert dist.is_initialized(), "the worker is in the default group"
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        rank = dist.get_rank() + rank_offset
        group = StatelessProcessGroup.create(HOST, port, rank, world_size)
        self._model_update_group = PyNcclCommunicator(group, device=self.device)
        return rank

    def update_weight(self, name: str, dtype: torch.dtype, shape: list[int]) -> None:
        assert dtype == self.model_config.dtype, f"{dtype}, {self.model_config.dtype}"
        weight = torch.empty(shape, dtype=dtype)
        self._model_update_group.broadcast(weight, src=0)
        self.model_runner.model.load_weights(weights=[(name, weight)])
        del weight


class InBuckets:
    """As verl's `vLLMColocateWorkerExtension`: one call that receives buckets of weights, which
    the next bucket overwrites."""

    rank: int
    local_rank: int
    device: Any
    model_runner: Any
    was_made_with: Any

    def __new__(cls, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        made.was_made_with = kwargs["vllm_config"].parallel_config.tensor_parallel_size
        return made

    def update_weights_from_ipc(self, address: str) -> int:
        assert self.device.type == "cpu"
        assert self.model_runner.vllm_config.speculative_config is None
        count = 0
        with Client(f"{address}-{self.local_rank}", "AF_UNIX") as trainer:
            memory = SharedMemory(trainer.recv())
            try:
                while (bucket := trainer.recv()) is not None:
                    weights = [
                        (
                            name,
                            torch.frombuffer(
                                memory.buf, dtype=dtype, count=shape.numel(), offset=at
                            ),
                        )
                        for name, (dtype, shape, at) in bucket.items()
                    ]
                    shaped = [(n, w.view(bucket[n][1])) for n, w in weights]
                    self.model_runner.model.load_weights(shaped)
                    count += len(weights)
                    del weights, shaped
                    trainer.send("done")
            finally:
                memory.close()
        return count


class FromFiles:
    """As prime-rl's workers: one call reads a checkpoint that the trainer has written."""

    model_runner: Any

    def init_broadcaster(self) -> None:
        """Do nothing: a directory needs no preparation."""

    def update_weights_from_path(self, weight_dir: str) -> None:
        self.model_runner.model.load_weights(self._weights(Path(weight_dir)))

    def liveness_probe(self) -> None:
        """Do nothing. The reply shows that the engine answers."""

    def _weights(self, directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    yield name, file.get_tensor(name)


class Forbids:
    """As verl's class, it changes the logits from which tokens are sampled."""

    model_runner: Any

    def forbid(self, tokens: list[int]) -> None:
        model = self.model_runner.model
        compute_logits = model.compute_logits

        def without_tokens(logits: torch.Tensor) -> torch.Tensor:
            changed: torch.Tensor = compute_logits(logits)
            changed[..., tokens] = -torch.inf
            return changed

        model.compute_logits = without_tokens


class Adapts:
    """As verl's class, it makes adapters known to its worker by requests with tensors."""

    add_lora: Any
    remove_lora: Any

    def adapt(self, number: int, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bool:
        request = LoRARequest("sent", number)
        if not tensors:
            return bool(self.add_lora(request))
        return bool(self.add_lora(RequestWithTensors(request, config, tensors)))

    def forget(self, number: int) -> bool:
        return bool(self.remove_lora(number))


class RequestWithTensors(LoRARequest):
    """A request with the attributes that verl's has."""

    def __init__(self, request: LoRARequest, config: Any, tensors: Any) -> None:
        super().__init__(request.lora_name, request.lora_int_id, "no-directory")
        object.__setattr__(self, "peft_config", config)
        object.__setattr__(self, "lora_tensors", tensors)


class Taken:
    """Has a method that the worker has itself."""

    def get_model(self) -> None: ...


class Fails:
    """Cannot be made."""

    def __new__(cls, **kwargs: Any) -> Any:
        raise RuntimeError("no GPU")
