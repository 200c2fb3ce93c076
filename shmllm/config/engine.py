"""The options of an engine, and its configuration.

Each dataclass is the part of the configuration that one component reads, and declares the options
in it; see `config.options`. An `EngineConfig` is sent to the engine process as JSON, so its values
are plain.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args, get_type_hints

from shmllm.config.front_end import FrontEndConfig
from shmllm.config.graphs import GraphConfig
from shmllm.config.load import LoadConfig
from shmllm.config.lora import LoraConfig
from shmllm.config.options import (
    Bytes,
    Device,
    Flag,
    Number,
    OneOf,
    Option,
    Section,
    Whole,
    option,
    options_in,
)
from shmllm.config.parallel import ParallelConfig
from shmllm.config.plugins import PluginConfig
from shmllm.config.shared_kv import SharedKVConfig
from shmllm.config.speculative import MOST_DRAFTING, SpeculativeConfig
from shmllm.config.weight_transfer import WeightTransferConfig
from shmllm.errors import EngineStartError

SchedulingPolicy = Literal["fcfs", "priority"]
WaitPolicyName = Literal["latency", "balanced", "idle"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]

UNLIMITED_LOGPROBS = -1


@dataclass(frozen=True, slots=True)
class CacheConfig(Section):
    """The paged KV cache."""

    block_size: int = option(
        16, "Tokens per KV block: 8, 16, 32, 64 or 128.", OneOf((8, 16, 32, 64, 128))
    )
    memory_bytes: int | None = option(
        None,
        "Bytes for keys and values, as a number or as text such as 512M or 1GiB.",
        Bytes(),
        name="kv_cache_memory_bytes",
        default_text="on a CPU 2 GiB, or a quarter of the free memory if that is less; on a GPU "
        "the rest of gpu_memory_utilization",
    )
    enable_prefix_caching: bool = option(
        True, "Reuse the KV blocks of equal prefixes.", Flag(), flag="--prefix-caching"
    )
    gpu_memory_utilization: float = option(
        0.92, "Part of a GPU's memory that the engine uses in all.", Number(1)
    )
    num_blocks: int | None = option(
        None,
        "Number of KV blocks, one of which holds no request's tokens.",
        Whole(2, optional=True),
        name="num_gpu_blocks_override",
        default_text="what kv_cache_memory_bytes holds",
    )
    disable_hybrid_kv_cache_manager: bool = option(
        False, "Keep the KV blocks behind the sliding windows and chunks of layers, too.", Flag()
    )

    mamba_block_size: int = option(
        512,
        "Tokens between two recurrent states that the prefix cache keeps; rounded up to a multiple "
        "of block_size. Without prefix caching a request has one state.",
        Whole(),
    )

    def given_bytes(self, bytes_for: Callable[[int], int], num_ranks: int = 1) -> int | None:
        """The size of a rank's cache in bytes, if the options say it; a number of blocks counts
        first.

        Args:
            bytes_for: returns the size of a rank's cache with a number of blocks.
            num_ranks: the number of processes that divide the cache.
        """
        if self.num_blocks is not None:
            return bytes_for(self.num_blocks)
        return None if self.memory_bytes is None else self.memory_bytes // num_ranks


@dataclass(frozen=True, slots=True)
class SchedulerConfig(Section):
    """The limits of a step and the order of requests."""

    max_num_seqs: int = option(256, "Most requests that run at once.", Whole())
    max_num_batched_tokens: int = option(
        2048, "Token budget of a step; longer prompts are computed in chunks.", Whole()
    )
    policy: SchedulingPolicy = option(
        "fcfs",
        '"priority" runs the requests with the lowest `priority` first, "fcfs" the oldest.',
        OneOf(get_args(SchedulingPolicy)),
        name="scheduling_policy",
    )
    async_scheduling: bool | None = option(
        None,
        "Plan a step while the previous one runs.",
        Flag(optional=True),
        default_text="on a GPU only",
    )
    long_prefill_token_threshold: int = option(
        0,
        "Most prompt tokens of one request in a step, so that short prompts pass; 0 sets no bound.",
        Whole(0),
    )
    scheduler_reserve_full_isl: bool = option(
        True,
        "Admit a request beside others only if its whole prompt, and the next tokens of all, fit "
        "into the KV cache.",
        Flag(),
    )
    watermark: float = option(
        0.0,
        "Part of the KV blocks that stay free when a request is admitted beside others.",
        Number(1, or_zero=True),
    )


@dataclass(frozen=True, slots=True)
class ClientConfig(Section):
    """The options for the connection between an engine and its front ends."""

    wait_policy: WaitPolicyName = option(
        "balanced",
        'How long both processes spin before they sleep: "latency" longest, "idle" not at all.',
        OneOf(get_args(WaitPolicyName)),
    )
    timeout_s: float = option(
        30.0,
        "Seconds after which the engine disconnects a front end that does not read its outputs.",
        Number(unit="seconds"),
        name="client_timeout",
        in_llm=False,
    )
    item_cache_gb: float = option(
        1.0,
        "GiB of prepared images that a front end keeps, and the engine for it, so that the same "
        "image is prepared and sent once; 0 keeps none.",
        Number(unit="GiB", or_zero=True),
        name="mm_processor_cache_gb",
    )
    allow_callables: bool = option(
        False,
        "Let every front end run functions of its own in the engine (collective_rpc).",
        Flag(),
        in_llm=False,
    )

    @property
    def item_cache_bytes(self) -> int:
        """`item_cache_gb` in bytes."""
        return int(self.item_cache_gb * 2**30)


@dataclass(frozen=True, slots=True)
class LogprobsConfig(Section):
    """What outputs say of the distributions that tokens are drawn from."""

    max_logprobs: int = option(
        20,
        "Most alternatives per position that a request may ask for; -1 sets no bound.",
        Whole(UNLIMITED_LOGPROBS, words="-1 or a whole number of at least 0"),
    )
    mode: LogprobsMode = option(
        "raw_logprobs",
        "What `logprobs` report: the model's numbers (raw) or those after the sampling steps "
        "(processed), as log-probabilities or logits.",
        OneOf(get_args(LogprobsMode)),
        name="logprobs_mode",
    )
    returns_masks: bool = option(
        False,
        "Outputs have the tokens among which each token was drawn, so that a trainer normalises "
        "over the same ones: docs/rl.md.",
        Flag(),
        name="return_sampling_mask",
    )


@dataclass(frozen=True, slots=True)
class EngineConfig(Section):
    """Everything that an engine needs to start."""

    load: LoadConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    client: ClientConfig = ClientConfig()
    logprobs: LogprobsConfig = LogprobsConfig()
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    graphs: GraphConfig = field(default_factory=GraphConfig)
    plugins: PluginConfig = field(default_factory=PluginConfig)
    transfer: WeightTransferConfig = field(default_factory=WeightTransferConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    shared_kv: SharedKVConfig = field(default_factory=SharedKVConfig)
    num_threads: int | None = option(
        None,
        "Compute threads.",
        Whole(maximum=4096, optional=True),
        default_text="the usable cores",
    )
    device: str = option(
        "auto", '"cpu", "cuda", "cuda:1"; auto is a GPU if the engine finds one.', Device()
    )

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.lora.enable_lora and self.load.model_impl == "transformers":
            raise EngineStartError(
                "enable_lora is not possible with model_impl='transformers', whose modules compute "
                "their products themselves: leave one of the two out"
            )
        if self.parallel.num_processes > 1:
            self._check_division()
        if self.load.decode_kernel == "persistent":
            self._check_decoder()
        if self.speculative.reads_states:
            self._refuse_with(
                f"the speculative method {self.speculative.method!r}",
                {
                    "model_impl='transformers'": self.load.model_impl == "transformers",
                    "decode_kernel='persistent'": self.load.decode_kernel == "persistent",
                },
            )
        if self.load.returns_experts:
            self._refuse_with(
                "enable_return_routed_experts",
                {
                    "model_impl='transformers'": self.load.model_impl == "transformers",
                    "pipeline_parallel_size": self.parallel.pipeline_parallel_size > 1,
                    "shared_kv_cache_bytes": self.shared_kv.num_bytes,
                    "kv_connector": self.plugins.kv_connector,
                },
            )
        if self.logprobs.returns_masks and self.logprobs.mode != "processed_logprobs":
            raise EngineStartError(
                "return_sampling_mask needs logprobs_mode='processed_logprobs', which are "
                f"normalised over the tokens of the masks, instead of {self.logprobs.mode!r}"
            )
        if self.shared_kv.num_bytes is not None:
            self._check_blocks_elsewhere("shared_kv_cache_bytes")
        if self.shared_kv.reads == "in_place" and self.copies_hits:
            raise EngineStartError(
                "shared_kv_cache_reads='in_place' is not possible with a draft model, which writes "
                "its keys and values into the blocks: pass 'copy', or leave the option out"
            )
        if self.plugins.kv_connector:
            self._check_blocks_elsewhere("kv_connector")

    def _check_division(self) -> None:
        """Raise EngineStartError if several processes cannot do what other options ask for."""
        method, is_pipeline = self.speculative.method, self.parallel.pipeline_parallel_size > 1
        impossible = {
            "model_impl='transformers'": self.load.model_impl == "transformers",
            "enable_lora": self.lora.enable_lora and is_pipeline,
            f"the speculative method {method!r}": method is not None and is_pipeline,
            "async_scheduling": self.scheduler.async_scheduling and is_pipeline,
        }
        for name, is_asked in impossible.items():
            if is_asked:
                raise EngineStartError(
                    f"{name} is not possible with {self.parallel.option}: leave one of the two out"
                )

    def _check_decoder(self) -> None:
        """Raise EngineStartError if other options do not allow all layers in one kernel."""
        mode = self.graphs.effective_mode
        impossible = {
            "model_impl='transformers'": self.load.model_impl == "transformers",
            "enable_lora": self.lora.enable_lora,
            self.parallel.option: self.parallel.num_processes > 1,
            f"cudagraph_mode {mode.name}": mode.name in ("PIECEWISE", "FULL"),
        }
        self._refuse_with("decode_kernel='persistent'", impossible)

    def _check_blocks_elsewhere(self, option: str) -> None:
        """Raise EngineStartError if other options do not allow KV blocks outside of the engine."""
        is_connector = option == "kv_connector"
        num_ranks = 1 if is_connector else self.parallel.tensor_parallel_size  # which are possible
        impossible = {
            # Blocks that a connector failed to load must not reach other engines.
            "shared_kv_cache_bytes": is_connector and self.shared_kv.num_bytes,
            "enable_prefix_caching=False": not self.cache.enable_prefix_caching,
            "model_impl='transformers'": self.load.model_impl == "transformers",
            self.parallel.option: self.parallel.num_processes > num_ranks,
        }
        self._refuse_with(option, impossible)

    @staticmethod
    def _refuse_with(option: str, others: Mapping[str, object]) -> None:
        """Raise EngineStartError if an option is given beside one of others that exclude it, each
        by its name with whether it is given."""
        for name, is_given in others.items():
            if is_given:
                raise EngineStartError(
                    f"{option} is not possible with {name}: leave one of the two out"
                )

    @property
    def copies_hits(self) -> bool:
        """Whether hits in the shared cache are always copied. A draft model computes its keys and
        values when it drafts first, after the blocks were shared, and writes them there."""
        return self.shared_kv.reads == "copy" or self.speculative.method == "draft_model"

    @property
    def max_drafting(self) -> int:
        """The largest number of requests for which tokens are drafted in a step."""
        return min(self.scheduler.max_num_seqs, MOST_DRAFTING) * (self.speculative.most_drafted > 0)

    @property
    def max_drafts(self) -> int:
        """The largest number of drafted tokens in a step."""
        most = self.max_drafting * self.speculative.most_drafted
        return min(most, self.scheduler.max_num_batched_tokens - 1)

    @property
    def num_rows(self) -> int:
        """The largest number of requests that run at once."""
        return self.scheduler.max_num_seqs * self.parallel.pipeline_parallel_size

    @property
    def max_samples(self) -> int:
        """The largest number of tokens at which a step samples."""
        return self.scheduler.max_num_seqs + self.max_drafts

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineConfig:
        """Decode a configuration.

        Raises:
            EngineStartError: a value is not valid.
        """
        values: dict[str, Any] = json.loads(text)
        for name, section in get_type_hints(cls).items():
            if isinstance(section, type) and issubclass(section, Section):
                values[name] = section(**values[name])
        return cls(**values)


SECTIONS: dict[str, type[Section]] = {
    "load": LoadConfig,
    "cache": CacheConfig,
    "shared_kv": SharedKVConfig,
    "scheduler": SchedulerConfig,
    "client": ClientConfig,
    "logprobs": LogprobsConfig,
    "lora": LoraConfig,
    "parallel": ParallelConfig,
    "graphs": GraphConfig,
    "plugins": PluginConfig,
    "transfer": WeightTransferConfig,
}
"""The parts of an EngineConfig whose options are options of an engine, by their field's name."""

OPTIONS: tuple[Option, ...] = tuple(
    each
    for section in (FrontEndConfig, EngineConfig, *SECTIONS.values())
    for each in options_in(section)
)
"""All options of an engine and of its front end."""
