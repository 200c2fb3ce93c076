"""Makes a trainer's end of a backend."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from shmllm.config.weight_transfer import BACKENDS
from shmllm.errors import RequestError
from shmllm.transfer.sender import Sender
from shmllm.transfer.source import WeightSource
from shmllm.transfer.trainer_info import TrainerInitInfo


class WeightTransferTrainerFactory:
    """Makes a trainer's end of the backend that an init info names."""

    @staticmethod
    def trainer_init(
        init_info: TrainerInitInfo, *, client: Any, source: WeightSource | None = None
    ) -> Sender:
        """Connect a trainer with an engine. Every rank of the trainer calls this function.

        Args:
            init_info: an object of a subclass of TrainerInitInfo, whose `backend` must be the one
                of the engine's weight_transfer_config.
            client: an `LLM`, or an object with the methods init_weight_transfer_engine,
                start_weight_update, update_weights and finish_weight_update of vLLM's clients.
            source: the weights.

        Returns:
            An object with `send_weights()` and `shutdown()`.

        Raises:
            RequestError: the backend is unknown or not possible here, the source is missing, or
                the engines do not answer in time.
        """
        backend = getattr(init_info, "backend", None)
        if backend not in BACKENDS:
            known = ", ".join(BACKENDS)
            raise RequestError(f"the backend {backend!r} is not one of {known}")
        if source is None:
            raise RequestError("trainer_init needs a source of weights, such as ModuleSource")
        sender: Sender = import_module(BACKENDS[backend]).Sender(init_info, client, source)
        return sender
