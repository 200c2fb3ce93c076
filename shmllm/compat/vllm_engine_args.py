"""vLLM's EngineArgs, and the parts of vLLM's configuration that clients read."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import Any, Self

import shmllm.frontend.engine_args
from shmllm.compat.vllm_cli_args import add_arguments
from shmllm.compat.vllm_options import translate
from shmllm.params.signatures import takes_fields_of


@dataclass(frozen=True)
class SchedulerConfig:
    """The scheduler's limits.

    Attributes:
        max_num_seqs: the largest number of running requests.
    """

    max_num_seqs: int


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache.

    Attributes:
        block_size: the number of tokens per block.
        enable_prefix_caching: whether requests reuse the blocks of equal prefixes.
    """

    block_size: int
    enable_prefix_caching: bool


@dataclass(frozen=True)
class ParallelConfig:
    """The degrees of parallelism.

    Attributes:
        tensor_parallel_size: the number of processes that divide each layer.
        pipeline_parallel_size: the number of processes that divide the layers.
        data_parallel_size: the number of engines.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1


@dataclass(frozen=True)
class ModelConfig:
    """The model.

    Attributes:
        model: bundled name, directory or hub id.
        tokenizer: the tokenizer's directory or hub id.
        max_model_len: the largest number of prompt and output tokens; None: the model's own limit.
    """

    model: str
    tokenizer: str
    max_model_len: int | None


@dataclass(frozen=True)
class VllmConfig:
    """The configuration of an engine."""

    model_config: ModelConfig
    scheduler_config: SchedulerConfig
    cache_config: CacheConfig
    parallel_config: ParallelConfig


@takes_fields_of(shmllm.frontend.engine_args.EngineArgs)
class EngineArgs(shmllm.frontend.engine_args.EngineArgs):
    """`shmllm.EngineArgs` with vLLM's options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**translate(options))

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Adds an argument for each option, and returns the parser."""
        return add_arguments(parser, (each.name for each in fields(cls)))

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The options in the result of a parser that `add_cli_args` completed."""
        names = (each.name for each in fields(cls))
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})

    def create_engine_config(self, *arguments: Any, **options: Any) -> VllmConfig:
        """The configuration of an engine with these options. It starts no engine."""
        return VllmConfig(
            self.create_model_config(),
            SchedulerConfig(self.max_num_seqs),
            CacheConfig(self.block_size, self.enable_prefix_caching),
            ParallelConfig(
                self.tensor_parallel_size, self.pipeline_parallel_size, self.data_parallel_size
            ),
        )

    def create_model_config(self) -> ModelConfig:
        """The model's part of the configuration."""
        return ModelConfig(self.model, self.tokenizer or self.model, self.max_model_len)


class AsyncEngineArgs(EngineArgs):
    """The options of `AsyncLLM`; the same as those of `LLM`."""
