"""vLLM's options as an object, and what clients read of the configuration made of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import shmllm.frontend.engine_args
from shmllm.compat.vllm_options import translate


@dataclass(frozen=True)
class SchedulerConfig:
    """How much runs at once."""

    max_num_seqs: int


@dataclass(frozen=True)
class ParallelConfig:
    """One process on one machine."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1


@dataclass(frozen=True)
class ModelConfig:
    """Which model; a `max_model_len` of None is the model's own."""

    model: str
    tokenizer: str
    max_model_len: int | None


@dataclass(frozen=True)
class VllmConfig:
    """The parts together."""

    model_config: ModelConfig
    scheduler_config: SchedulerConfig
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)


class EngineArgs(shmllm.frontend.engine_args.EngineArgs):
    """`shmllm.EngineArgs` from vLLM's options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**translate(options))

    def create_engine_config(self, *arguments: Any) -> VllmConfig:
        """What an engine of these options would have. Starts nothing."""
        return VllmConfig(self.create_model_config(), SchedulerConfig(self.max_num_seqs))

    def create_model_config(self) -> ModelConfig:
        """The part of it that is about the model."""
        return ModelConfig(self.model, self.tokenizer or self.model, self.max_model_len)


class AsyncEngineArgs(EngineArgs):
    """The same, for `AsyncLLM`."""
