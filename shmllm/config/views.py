"""The configuration of a running engine under vLLM's names, read-only.

Programs written for vLLM read it from `llm.llm_engine`, and plugins get it as their `vllm_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from shmllm.config.info import EngineInfo


class ModelConfigView:
    """The configuration of the model.

    Args:
        info: what the engine reports about itself.
        model_defaults: the sampling defaults that come with the model.

    Attributes:
        model, tokenizer, served_model_name: the model's directory.
        max_model_len: the largest number of prompt and output tokens of one request.
        max_logprobs: the largest number of alternatives per position.
        seed: the seed of requests that have none.
        architecture, architectures: the architecture's name in config.json.
        is_encoder_decoder: whether an encoder reads a part of each prompt.
        is_multimodal_model: whether prompts may have images, sounds or videos.
    """

    tokenizer_mode = "auto"
    quantization = None
    trust_remote_code = False
    skip_tokenizer_init = False

    def __init__(self, info: EngineInfo, model_defaults: Mapping[str, Any]) -> None:
        self._info = info
        self._model_defaults = model_defaults
        self.model = self.tokenizer = self.served_model_name = info.model_directory
        self.max_model_len = info.max_model_len
        self.max_logprobs, self.seed = info.max_logprobs, info.seed
        self.architecture, self.architectures = info.model_type, [info.model_type]
        self.is_encoder_decoder = info.items.num_encoded > 0 or info.items.has_encoder_text
        self.is_multimodal_model = bool({*info.items.modalities} - {"text"})

    @property
    def dtype(self) -> Any:
        """The torch.dtype of the model. Imports torch."""
        import torch

        return getattr(torch, self._info.dtype)

    @property
    def hf_config(self) -> Any:
        """The model's configuration as a transformers object. Imports transformers."""
        return _hf_config(self.model)

    @property
    def hf_text_config(self) -> Any:
        """The part of it that describes the language model."""
        return self.hf_config.get_text_config()

    def get_vocab_size(self) -> int:
        return self._info.vocab_size

    def get_hidden_size(self) -> int:
        return int(self.hf_text_config.hidden_size)

    def get_head_size(self) -> int:
        config = self.hf_text_config
        own = getattr(config, "head_dim", None)
        return int(own or config.hidden_size // config.num_attention_heads)

    def get_num_attention_heads(self, parallel_config: ParallelConfigView) -> int:
        """The heads of a rank."""
        total = self.hf_text_config.num_attention_heads
        return int(total) // parallel_config.tensor_parallel_size

    def get_total_num_kv_heads(self) -> int:
        config = self.hf_text_config
        return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)

    def get_num_kv_heads(self, parallel_config: ParallelConfigView) -> int:
        """The heads of keys and values of a rank; ranks may share one."""
        return max(1, self.get_total_num_kv_heads() // parallel_config.tensor_parallel_size)

    def get_sliding_window(self) -> int | None:
        """The window in config.json, which need not be that of all layers; None: there is none."""
        window = getattr(self.hf_text_config, "sliding_window", None)
        return None if window is None else int(window)

    def get_total_num_hidden_layers(self) -> int:
        return int(self.hf_text_config.num_hidden_layers)

    def get_num_layers(self, parallel_config: ParallelConfigView) -> int:
        """The most layers of a stage, if all have equally many."""
        return -(-self.get_total_num_hidden_layers() // parallel_config.pipeline_parallel_size)

    @property
    def runner_type(self) -> str:
        """What the engine was loaded for: "generate", which includes vectors here, or "pooling"."""
        return "generate" if self._info.pooling.generates else "pooling"

    @property
    def embedding_size(self) -> int:
        """The number of components of an embedding without `dimensions`."""
        return self._info.pooling.embedding_size or self._info.hidden_size

    @property
    def is_matryoshka(self) -> bool:
        """Whether requests may ask for `dimensions`."""
        return self._info.pooling.matryoshka

    @property
    def matryoshka_dimensions(self) -> list[int] | None:
        """The dimensions that they may ask for; None: any."""
        return list(self._info.pooling.matryoshka_dimensions) or None

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """The sampling defaults in the model's generation_config.json."""
        return dict(self._model_defaults)


@lru_cache(maxsize=8)
def _hf_config(directory: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(directory)


@dataclass(frozen=True)
class CacheConfigView:
    """The size of the KV cache.

    Attributes:
        block_size: the number of tokens per block.
        num_gpu_blocks: the number of blocks, on a CPU as well.
        gpu_memory_utilization: the option; it has no effect on a CPU.
        enable_prefix_caching: whether requests reuse the blocks of equal prefixes.
        cache_dtype: what keys and values are stored as.
        num_cpu_blocks: always 0.
    """

    block_size: int
    num_gpu_blocks: int
    enable_prefix_caching: bool
    gpu_memory_utilization: float
    cache_dtype: str
    num_cpu_blocks: int = 0


@dataclass(frozen=True)
class SchedulerConfigView:
    """The limits of the scheduler.

    Attributes:
        max_num_seqs: the largest number of requests in one step.
        max_num_batched_tokens: the largest number of tokens in one step.
        max_model_len: the largest number of prompt and output tokens of one request.
        policy: which requests come first, "fcfs" or "priority".
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str


@dataclass(frozen=True)
class ParallelConfigView:
    """The parallelism of the engine.

    Attributes:
        world_size: the number of processes that compute for an engine.
        world_size_across_dp: the same for all engines.
        tensor_parallel_size: how many divide each layer.
        pipeline_parallel_size: how many divide the layers.
        data_parallel_size: the number of engines.
        rank: the number of the process among those of the engine.
    """

    world_size: int = 1
    world_size_across_dp: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    rank: int = 0


@dataclass(frozen=True)
class SpeculativeConfigView:
    """Who drafts tokens.

    Attributes:
        method: the method.
        model: the model that drafts; None if none does.
        num_speculative_tokens: the most tokens that are drafted for a request in a step.
    """

    method: str
    model: str | None
    num_speculative_tokens: int


@dataclass(frozen=True)
class VllmConfigView:
    """All configurations of the engine."""

    model_config: ModelConfigView
    cache_config: CacheConfigView
    scheduler_config: SchedulerConfigView
    parallel_config: ParallelConfigView = field(default_factory=ParallelConfigView)
    lora_config: None = None
    speculative_config: SpeculativeConfigView | None = None

    @classmethod
    def of(
        cls, info: EngineInfo, model_defaults: Mapping[str, Any], rank: int = 0
    ) -> VllmConfigView:
        """The configurations of an engine, as it reports them, in the process of a rank."""
        return cls(
            ModelConfigView(info, model_defaults),
            CacheConfigView(
                info.block_size,
                info.num_counted_blocks,
                info.enable_prefix_caching,
                info.gpu_memory_utilization,
                info.kv_cache_dtype,
            ),
            SchedulerConfigView(
                info.max_num_seqs,
                info.max_num_batched_tokens,
                info.max_model_len,
                info.scheduling_policy,
            ),
            ParallelConfigView(
                info.num_processes,
                info.num_processes * info.data_parallel_size,
                info.tensor_parallel_size,
                info.pipeline_parallel_size,
                info.data_parallel_size,
                rank,
            ),
            speculative_config=_speculation(info),
        )


def _speculation(info: EngineInfo) -> SpeculativeConfigView | None:
    if not info.speculative_method:
        return None
    return SpeculativeConfigView(
        info.speculative_method, info.speculative_model or None, info.num_speculative_tokens
    )
