"""What vLLM's `LLM` has beside requests: what programs read of it, and its engine's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import shmllm.frontend.llm
from shmllm.compat.vllm_metrics import Metric, as_metrics
from shmllm.compat.vllm_modules import describe_absent
from shmllm.compat.vllm_names import supported_tasks
from shmllm.errors import RequestError
from shmllm.outputs.sleep_report import SleepState


@dataclass(frozen=True)
class RendererView:
    """What programs read of the renderer and of the input processor of vLLM's engine. `LLM` itself
    makes prompts of what it gets.

    Attributes:
        model_config: as `LLM.model_config`.
    """

    model_config: Any
    _llm: shmllm.frontend.llm.LLM

    def get_tokenizer(self) -> Any:
        """As `LLM.get_tokenizer`."""
        return self._llm.get_tokenizer()

    @property
    def tokenizer(self) -> Any:
        """As `LLM.get_tokenizer`."""
        return self.get_tokenizer()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(describe_absent(f"vllm.renderers.{name}"))


class EngineCalls(shmllm.frontend.llm.LLM):
    """The methods and attributes of `LLM` that are about its engine."""

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What the engine does: "generate", and pooling tasks."""
        return supported_tasks(self.facts)

    @property
    def runner_type(self) -> str:
        """As `model_config.runner_type`."""
        return str(self.model_config.runner_type)

    @property
    def renderer(self) -> RendererView:
        """The tokenizer and the model's configuration."""
        return RendererView(self.model_config, self)

    @property
    def input_processor(self) -> RendererView:
        """As `renderer`."""
        return self.renderer

    def get_metrics(self) -> list[Metric]:  # type: ignore[override]
        """The engine's counters and gauges that vLLM has, too."""
        return as_metrics(super().get_metrics(), self.facts.model_directory)

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """As `shmllm.LLM.start_profile`.

        Raises:
            RequestError: `profiler_kwargs` has something.
        """
        if profiler_kwargs:
            raise RequestError(
                f"profiler_kwargs {sorted(profiler_kwargs)} are not supported: torch's profiler "
                "has one setting here"
            )
        return super().start_profile(
            profile_prefix, delay_iterations=delay_iterations, max_iterations=max_iterations
        )

    def release_kv_cache_memory(self) -> None:
        """Drops keys and values of an engine that sleeps at level 0, until
        `wake_up(tags=["kv_cache"])`. The weights stay awake or asleep, and new requests are queued
        or refused, as before.

        Raises:
            RequestError: the engine is awake.
        """
        release_kv_cache_memory(self)


def release_kv_cache_memory(llm: shmllm.frontend.llm.LLM) -> None:
    """See `EngineCalls.release_kv_cache_memory`."""
    if not llm.is_sleeping():
        raise RequestError("release_kv_cache_memory needs an engine after sleep(level=0)")
    asleep = SleepState(llm._stats()["asleep"])
    if SleepState.KV_CACHE in asleep:
        return
    llm.sleep(level=1, mode="wait")  # which does not change the mode of an earlier sleep
    if SleepState.WEIGHTS not in asleep:
        llm.wake_up(["weights"])
