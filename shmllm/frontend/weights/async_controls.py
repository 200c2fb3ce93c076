"""What a front end of coroutines does to the weights of its engine; see `controls`."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from shmllm.frontend.cancelled_calls import call_in_thread
from shmllm.frontend.llm import LLM
from shmllm.frontend.weights.push import NamedTensors, UpdateMode, Version
from shmllm.frontend.weights.transfer import HasUpdateInfo


class AsyncWeightControls:
    """The methods of `AsyncLLM` about weights."""

    _llm: LLM

    async def update_weights(
        self,
        weights: NamedTensors | HasUpdateInfo,
        *,
        version: Version | None = None,
        mode: UpdateMode = "keep",
        reset_prefix_cache: bool = True,
    ) -> None:
        """See `LLM.update_weights`. Requests and other coroutines continue meanwhile; a generator
        of weights runs in another thread. After a cancellation that thread abandons the update
        before it takes another tensor, and later calls about weights wait for that."""
        await call_in_thread(
            partial(
                self._llm.update_weights,
                weights,
                version=version,
                mode=mode,
                reset_prefix_cache=reset_prefix_cache,
            )
        )

    async def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        """See `LLM.start_weight_update`."""
        await call_in_thread(partial(self._llm.start_weight_update, is_checkpoint_format))

    async def finish_weight_update(
        self,
        version: Version | None = None,
        *,
        weight_version: Version | None = None,
        mode: UpdateMode = "keep",
        reset_prefix_cache: bool = True,
    ) -> None:
        """See `LLM.finish_weight_update`."""
        await call_in_thread(
            partial(
                self._llm.finish_weight_update,
                version,
                weight_version=weight_version,
                mode=mode,
                reset_prefix_cache=reset_prefix_cache,
            )
        )

    async def abandon_weight_update(self) -> None:
        """See `LLM.abandon_weight_update`."""
        await call_in_thread(self._llm.abandon_weight_update)

    async def get_weight_version(self) -> Version:
        """See `LLM.get_weight_version`."""
        return await call_in_thread(self._llm.get_weight_version)

    async def update_weight_version(self, new_version: Version) -> None:
        """See `LLM.update_weight_version`."""
        await call_in_thread(partial(self._llm.update_weight_version, new_version))

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """See `LLM.init_weight_transfer_engine`. Requests continue meanwhile."""
        await call_in_thread(partial(self._llm.init_weight_transfer_engine, request))

    async def shutdown_weight_transfer_engine(self) -> None:
        """See `LLM.shutdown_weight_transfer_engine`."""
        await call_in_thread(self._llm.shutdown_weight_transfer_engine)

    async def start_draft_weight_update(self) -> NoReturn:
        """See `LLM.start_draft_weight_update`."""
        self._llm.start_draft_weight_update()

    async def compute_weight_checksums(self) -> dict[str, str]:
        """See `LLM.compute_weight_checksums`."""
        return await call_in_thread(self._llm.compute_weight_checksums)

    async def get_world_size(self, include_dp: bool = True) -> int:
        """See `LLM.get_world_size`."""
        return self._llm.get_world_size(include_dp)
