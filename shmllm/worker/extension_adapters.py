"""Low-rank adapters for the classes that extend workers, by the methods of vLLM's workers.

This module must not know how an engine manages its adapters.
"""

from __future__ import annotations

from typing import Any

from shmllm.errors import RequestError
from shmllm.params.lora import LoRARequest


class AdapterMethods:
    """`add_lora` and `remove_lora` of an extended worker, in an engine of one process.

    A front end calls `LLM.add_lora` instead, in an engine of any size.
    """

    _core: Any
    vllm_config: Any

    def add_lora(self, lora_request: Any, *arguments: Any, **options: Any) -> bool:
        """Make an adapter known.

        Args:
            lora_request: its LoRARequest; instead of a directory, a request of a subclass may have
                `lora_tensors` and `peft_config`, as `LLM.add_lora` takes them. Anything else is the
                first argument of the worker's own method.

        Returns:
            Whether it was read: False if it is known and stays as it is.

        Raises:
            RequestError: the adapter does not suit the model, its number is in use, or the engine
                has no adapters or several processes.
        """
        own: Any = super()
        if not isinstance(lora_request, LoRARequest):
            own.add_lora(lora_request, *arguments, **options)
            return True
        core = self._core_of_one_process()
        tensors = getattr(lora_request, "lora_tensors", None)
        if tensors is None:
            return bool(core.adapters.add(lora_request))
        config = getattr(lora_request, "peft_config", None) or {}
        named = lora_request.lora_name, lora_request.lora_int_id
        own.add_lora(*named, config, tensors, lora_request.load_inplace)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter. Returns whether it was known.

        Raises:
            RequestError: requests use it, or the engine has no adapters or several processes.
        """
        return bool(self._core_of_one_process().adapters.remove(lora_id))

    def _core_of_one_process(self) -> Any:
        size = self.vllm_config.parallel_config.world_size
        if size > 1:
            raise RequestError(
                f"a method of a worker cannot change the adapters of {size} processes: call "
                "LLM.add_lora or LLM.remove_lora"
            )
        return self._core
