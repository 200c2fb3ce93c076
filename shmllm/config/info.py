"""The information that a ready engine reports about itself and its model."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from shmllm.config.engine import SchedulingPolicy, WaitPolicyName
from shmllm.config.items import ItemInfo
from shmllm.config.pooling import PoolingInfo
from shmllm.config.routed_experts import RoutedInfo
from shmllm.config.shared_kv import Role

MAX_ELEMENT_BYTES = 8
"""The size of a float64, the largest dtype of embeddings."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The information that a ready engine reports.

    Attributes:
        model_directory: the directory of the tokenizer and of config.json.
        model_type: the architecture's name in config.json.
        num_blocks: the number of KV blocks that requests can use; 0 if the model has no attention.
        num_states: the number of blocks of recurrent states that requests can use; 0 if the model
            has none.
        max_states_per_request: the most of them that a request of max_model_len tokens holds.
        max_blocks_per_request: the most KV blocks that a request of max_model_len tokens holds.
        weight_bytes: the size of the weights in memory.
        seed: the seed of requests that have none.
        tensor_parallel_size: the number of processes that each compute a part of every layer.
        pipeline_parallel_size: the number of processes that each compute some of the layers.
        max_logprobs: the largest number of alternatives per position that a request may ask for,
            at most vocab_size.
        logprobs_mode: what log-probabilities are.
        model_options: the options that change what the model computes, and that no other field
            shows, as JSON.
        activation_dtype: what matrix products round activations to.
        kv_cache_dtype: what keys and values are stored as.
        quantization: what matrices were rounded to; empty if they have the dtype.
        instructions: what a CPU multiplies matrices by, such as "AVX512_BF16"; empty on a GPU.
        device: "cpu", or the name of the GPU.
        async_scheduling: whether each step is planned while the previous one runs.
        device_uuid: the UUID of the GPU; empty on a CPU.
        graphs: the captured CUDA graphs in words; empty if there are none.
        logits_processors: the names of the classes of custom logits processors.
        data_parallel_size: the number of engines of a pool; the numbers above are of one of them.
        extension_methods: the names of the methods that `worker_extension_cls` adds to workers.
        max_loras: the largest number of adapters in a step; 0: the engine has no adapters.
        speculative_method: who drafts tokens; empty: nobody does.
        speculative_model: the model that drafts; empty if none does.
        num_speculative_tokens: the most tokens that are drafted for a request in a step.
        role: what the engine does in a pool: "prefill", "decode" or "both".
        shared_kv_cache_bytes: the size of the prefix cache that it shares with other engines; 0: it
            shares none.
        pooling: what it computes of prompts beside tokens, or instead of them.
        images: which images prompts may have.
        num_outputs: the number of tokens, the first ones, that the model can write; None: all.
        routed: the form of the experts that outputs have; None: they have none.
        sampling_masks: whether outputs have the tokens among which each token was drawn.
        warnings: warnings for the person who started the engine, one sentence each.
    """

    model_directory: str
    model_type: str
    dtype: str
    num_parameters: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    block_size: int
    num_blocks: int
    num_states: int = field(default=0, kw_only=True)
    max_states_per_request: int = field(default=0, kw_only=True)
    max_blocks_per_request: int
    kv_cache_bytes: int
    weight_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int = field(default=0, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    num_threads: int
    wait_policy: WaitPolicyName
    load_seconds: float
    max_logprobs: int = 20
    scheduling_policy: SchedulingPolicy = "fcfs"
    hidden_size: int = 0
    embeds_width: int = 0
    logprobs_mode: str = "raw_logprobs"
    model_options: str = "{}"
    activation_dtype: str = "float32"
    kv_cache_dtype: str = "float32"
    quantization: str = ""
    instructions: str = ""
    deterministic: bool = False
    device: str = "cpu"
    device_uuid: str = ""
    async_scheduling: bool = False
    graphs: str = ""
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.0
    logits_processors: tuple[str, ...] = ()
    extension_methods: tuple[str, ...] = field(default=(), kw_only=True)
    max_loras: int = 0
    speculative_method: str = ""
    speculative_model: str = ""
    num_speculative_tokens: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    role: Role = "both"
    shared_kv_cache_bytes: int = 0
    pooling: PoolingInfo = field(default_factory=PoolingInfo)
    items: ItemInfo = field(default_factory=ItemInfo)
    num_outputs: int | None = None
    routed: RoutedInfo | None = None
    sampling_masks: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def processor(self) -> str:
        """The name of the GPU, or the number of CPU threads, for display."""
        size, count = self.num_processes, self.data_parallel_size
        ranks = f" of {size} processes" if size > 1 else ""
        engines = f" in each of {count} engines" if count > 1 else ""
        if self.device != "cpu":
            return f"{self.device}{engines}"
        plural = "" if self.num_threads == 1 else "s"
        return f"{self.num_threads} thread{plural}{ranks}{engines}"

    @property
    def num_rows(self) -> int:
        """The largest number of requests that run at once: those of all batches of a pipeline, and
        of all engines of a pool."""
        return self.max_num_seqs * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def num_processes(self) -> int:
        """The number of processes that compute."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def precision(self) -> str:
        """What weights are stored as, and what else has another dtype; on a CPU the instructions of
        products as well. For display."""
        stored, others = self.quantization or self.dtype, []
        if self.activation_dtype != stored:
            others.append(f"{self.activation_dtype} activations")
        if self.kv_cache_dtype != self.dtype:
            others.append(f"{self.kv_cache_dtype} keys and values")
        text = f"{stored} with {' and '.join(others)}" if others else stored
        return f"{text} ({self.instructions})" if self.instructions else text

    @property
    def places(self) -> str:
        """Where the model is computed, by how many processes if these are several, and the role if
        the engine has one."""
        words = [self.device]
        if self.pipeline_parallel_size > 1:
            words.append(f"{self.pipeline_parallel_size} stages")
        elif self.tensor_parallel_size > 1:
            words.append(f"{self.tensor_parallel_size} ranks")
        if self.role != "both":
            words.append(self.role)
        return ", ".join(words)

    @property
    def speculation(self) -> str:
        """Who drafts tokens, and at most how many; empty if nobody does. For display."""
        if not self.speculative_method:
            return ""
        return (
            f"{self.speculative_model or self.speculative_method}, "
            f"up to {self.num_speculative_tokens}"
        )

    @property
    def max_concurrency(self) -> float:
        """The number of requests of max_model_len tokens that the KV cache has room for."""
        pools = (
            (self.num_blocks, self.max_blocks_per_request),
            (self.num_states, self.max_states_per_request),
        )
        return min(count / most for count, most in pools if most)

    @property
    def num_counted_blocks(self) -> int:
        """The number of blocks of the pool that statistics show: of keys and values, or of states
        if the model keeps nothing else."""
        return self.num_blocks if self.max_blocks_per_request else self.num_states

    @property
    def max_embeds_bytes(self) -> int:
        """The most bytes of a prompt that is given as embeddings, whatever their dtype."""
        return self.max_model_len * self.hidden_size * MAX_ELEMENT_BYTES

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineInfo:
        values: dict[str, Any] = json.loads(text)
        for name in ("eos_token_ids", "logits_processors", "extension_methods", "warnings"):
            values[name] = tuple(values[name])
        values["pooling"] = PoolingInfo.from_fields(values["pooling"])
        values["items"] = ItemInfo.from_json(values["items"])
        if values["routed"] is not None:
            values["routed"] = RoutedInfo.from_fields(values["routed"])
        return cls(**{each.name: values[each.name] for each in fields(cls)})
