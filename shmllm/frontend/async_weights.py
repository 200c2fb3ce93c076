"""The methods of AsyncLLM that change the model's weights: those of LLM, in a thread."""

from __future__ import annotations

import asyncio

from shmllm.frontend.weight_methods import UpdateMode, Version, WeightMethods
from shmllm.frontend.weight_push import NamedTensors


class AsyncWeightMethods:
    """What AsyncLLM inherits. Requests go on meanwhile, and other coroutines run."""

    @property
    def _weights(self) -> WeightMethods:
        raise NotImplementedError

    async def update_weights(
        self,
        weights: NamedTensors,
        *,
        version: Version | None = None,
        mode: UpdateMode = "keep",
        reset_prefix_cache: bool = True,
    ) -> None:
        """See `LLM.update_weights`. A generator runs in the thread."""
        await asyncio.to_thread(
            self._weights.update_weights,
            weights,
            version=version,
            mode=mode,
            reset_prefix_cache=reset_prefix_cache,
        )

    async def start_weight_update(self) -> None:
        """See `LLM.start_weight_update`."""
        await asyncio.to_thread(self._weights.start_weight_update)

    async def finish_weight_update(
        self,
        version: Version | None = None,
        *,
        mode: UpdateMode = "keep",
        reset_prefix_cache: bool = True,
    ) -> None:
        """See `LLM.finish_weight_update`."""
        await asyncio.to_thread(
            self._weights.finish_weight_update,
            version,
            mode=mode,
            reset_prefix_cache=reset_prefix_cache,
        )

    async def abandon_weight_update(self) -> None:
        """See `LLM.abandon_weight_update`."""
        await asyncio.to_thread(self._weights.abandon_weight_update)

    async def get_weight_version(self) -> Version:
        """See `LLM.get_weight_version`."""
        return await asyncio.to_thread(self._weights.get_weight_version)
