"""vLLM's EngineArgs, and the parts of vLLM's configuration that clients read."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import shmllm.frontend.options.engine_args
from shmllm.compat.vllm_cli_args import add_arguments
from shmllm.compat.vllm_options import translate
from shmllm.params.signatures import takes_fields_of
from shmllm.params.unknown_options import reject_unknown_options


@dataclass(frozen=True)
class SchedulerConfig:
    """The scheduler's limits.

    Attributes:
        max_num_seqs: the largest number of running requests.
        max_num_batched_tokens: the largest number of tokens in a step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int


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
    """The configuration of an engine.

    Attributes:
        engine_args: the options that it was made of, with which an engine is started.
    """

    model_config: ModelConfig
    scheduler_config: SchedulerConfig
    cache_config: CacheConfig
    parallel_config: ParallelConfig
    engine_args: EngineArgs = field(repr=False)


@takes_fields_of(shmllm.frontend.options.engine_args.EngineArgs)
class EngineArgs(shmllm.frontend.options.engine_args.EngineArgs):
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
            SchedulerConfig(self.max_num_seqs, self.max_num_batched_tokens),
            CacheConfig(self.block_size, self.enable_prefix_caching),
            ParallelConfig(
                self.tensor_parallel_size, self.pipeline_parallel_size, self.data_parallel_size
            ),
            self,
        )

    def create_model_config(self) -> ModelConfig:
        """The model's part of the configuration."""
        return ModelConfig(self.model, self.tokenizer or self.model, self.max_model_len)


class AsyncEngineArgs(EngineArgs):
    """The options of `AsyncLLM`; the same as those of `LLM`."""


class Executor:
    """Programs pass it to an engine beside a `VllmConfig`; an engine starts its processes."""

    @staticmethod
    def get_class(vllm_config: Any) -> type[Executor]:
        """The executor of each configuration."""
        return Executor


_BESIDE_CONFIG = (
    *("executor_class", "log_stats", "usage_context", "mm_registry", "use_cached_outputs"),
    *("log_requests", "start_engine_loop", "stat_loggers", "client_addresses", "client_count"),
    *("client_index", "multiprocess_mode", "enable_log_requests", "aggregate_engine_logging"),
    "disable_log_stats",
)


def engine_options(callee: str, model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an engine from the arguments of its class.

    Args:
        callee: the name of the class, for messages.
        model: the model, or a VllmConfig.
        options: the other options; or `vllm_config`, and arguments of vLLM's class beside it, of
            which only `stat_loggers` has an effect.

    Raises:
        TypeError: `vllm_config` is no VllmConfig, or an argument beside it is unknown.
    """
    config = options.get("vllm_config", model)
    if not isinstance(config, VllmConfig):
        if "vllm_config" in options:
            return config_options(callee, config, {})
        return {"model": model, **options}
    others = {name: value for name, value in options.items() if name != "vllm_config"}
    return config_options(callee, config, others)


def config_options(callee: str, config: Any, others: Mapping[str, Any]) -> dict[str, Any]:
    """As `engine_options`, of a configuration and the arguments beside it."""
    if not isinstance(config, VllmConfig):
        raise TypeError(
            f"vllm_config of {callee} must be what EngineArgs.create_engine_config returns, "
            f"got {type(config).__name__}"
        )
    reject_unknown_options(callee, others, _BESIDE_CONFIG)
    loggers = others.get("stat_loggers")
    given = {} if loggers is None else {"stat_loggers": loggers}
    return config.engine_args.llm_options() | given
