"""What an engine is started with.

Frozen dataclasses; a component gets the part it needs, never the whole. They cross to the
engine process as JSON, so every field is a plain value.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from shmllm.config.graphs import GraphConfig
from shmllm.errors import EngineStartError

DType = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
Quantization = Literal["int8"]
SchedulingPolicy = Literal["fcfs", "priority"]
WaitPolicyName = Literal["latency", "balanced", "idle"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]

GRAMMAR_STEP_ITEMS = 5_000
"""Bounds the parser's work for one token of a structured output: about 50 ms. JSON schemas need
a few hundred; a grammar of many meanings, such as `root ::= root root | "a"`, any number."""
BLOCK_SIZES = (8, 16, 32, 64)
DTYPES: tuple[str, ...] = get_args(DType)
SCHEDULING_POLICIES: tuple[str, ...] = get_args(SchedulingPolicy)
LOAD_FORMATS: tuple[str, ...] = get_args(LoadFormat)
QUANTIZATIONS: tuple[str, ...] = get_args(Quantization)
WAIT_POLICIES: tuple[str, ...] = get_args(WaitPolicyName)
LOGPROBS_MODES: tuple[str, ...] = get_args(LogprobsMode)
UNLIMITED_LOGPROBS = -1
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise EngineStartError(message)


def _require_positive(name: str, value: object) -> None:
    valid = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    _require(valid, f"{name} must be a whole number of at least 1, got {value!r}")


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """Which model, and how its weights are read.

    Attributes:
        directory: a Hugging Face model directory.
        dtype: of weights and activations; auto is float32 on a CPU, and on a GPU what the
            checkpoint was saved in.
        load_format: auto and safetensors read files; dummy makes random weights.
        seed: of dummy weights.
        max_model_len: tokens of prompt and output together; None takes the model's own.
        tokenizer_directory: of another tokenizer than the model's; for grammars alone.
        quantization: int8 keeps the matrices that are multiplied with in 8 bits, rounded per
            output channel; None: not.
        deterministic: compute each token's numbers in a way that does not depend on what else
            is in the batch, on chunks, caching and preemption, to the last bit. On a CPU that
            holds whatever this says, and costs nothing.
    """

    directory: str
    dtype: DType = "auto"
    load_format: LoadFormat = "auto"
    seed: int = 0
    max_model_len: int | None = None
    tokenizer_directory: str | None = None
    quantization: Quantization | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        _require(self.dtype in DTYPES, f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        _require(
            self.load_format in LOAD_FORMATS,
            f"load_format {self.load_format!r} is not one of {', '.join(LOAD_FORMATS)}",
        )
        _require(
            self.quantization is None or self.quantization in QUANTIZATIONS,
            f"quantization {self.quantization!r} is not one of None, {', '.join(QUANTIZATIONS)}",
        )
        _require(
            isinstance(self.deterministic, bool),
            f"deterministic must be True or False, got {self.deterministic!r}",
        )
        if self.max_model_len is not None:
            _require_positive("max_model_len", self.max_model_len)
        _require(
            isinstance(self.seed, int) and 0 <= self.seed < 2**63,
            f"seed must be a whole number from 0 to 2**63 - 1, got {self.seed!r}",
        )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache.

    Attributes:
        block_size: tokens per block.
        memory_bytes: bytes for keys and values; None: on a CPU 2 GiB or a quarter of the free
            memory, whichever is less; on a GPU what `gpu_memory_utilization` leaves.
        enable_prefix_caching: keep full blocks of finished requests for later ones.
        gpu_memory_utilization: what part of a GPU's memory the engine may use in all.
    """

    block_size: int = 16
    memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.92

    def __post_init__(self) -> None:
        _require(
            self.block_size in BLOCK_SIZES,
            f"block_size must be one of {BLOCK_SIZES}, got {self.block_size!r}",
        )
        _require(
            isinstance(self.enable_prefix_caching, bool),
            f"enable_prefix_caching must be True or False, got {self.enable_prefix_caching!r}",
        )
        if self.memory_bytes is not None:
            _require_positive("kv_cache_memory_bytes", self.memory_bytes)
        part = self.gpu_memory_utilization
        _require(
            isinstance(part, int | float) and not isinstance(part, bool) and 0 < part <= 1,
            f"gpu_memory_utilization must be a number above 0 and at most 1, got {part!r}",
        )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What one step may hold.

    Attributes:
        max_num_seqs: requests running at once.
        max_num_batched_tokens: the token budget of a step.
        policy: fcfs runs requests in their order; priority those with the lowest `priority`
            first.
        async_scheduling: plan a step while the one before it runs; None: where that helps, which
            is on a GPU.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    policy: SchedulingPolicy = "fcfs"
    async_scheduling: bool | None = None

    def __post_init__(self) -> None:
        _require_positive("max_num_seqs", self.max_num_seqs)
        _require_positive("max_num_batched_tokens", self.max_num_batched_tokens)
        _require(
            self.policy in SCHEDULING_POLICIES,
            f"scheduling_policy {self.policy!r} is not one of {', '.join(SCHEDULING_POLICIES)}",
        )
        _require(
            self.async_scheduling is None or isinstance(self.async_scheduling, bool),
            f"async_scheduling must be None, True or False, got {self.async_scheduling!r}",
        )


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """How an engine and its front ends wait for each other.

    Attributes:
        wait_policy: what a side that has nothing to do spends on being woken fast:
            "latency" spins longest, "balanced" a little, "idle" not at all. The first two
            are toned down where spinning would take a core from the model.
        timeout_s: how long a front end of a named engine may leave its outputs unread,
            with no room for more, before it is cut off.
        allow_callables: whether front ends of a named engine may send functions that it
            runs. A private engine always runs those of the front end that started it.
    """

    wait_policy: WaitPolicyName = "balanced"
    timeout_s: float = 30.0
    allow_callables: bool = False

    def __post_init__(self) -> None:
        _require(
            self.wait_policy in WAIT_POLICIES,
            f"wait_policy {self.wait_policy!r} is not one of {', '.join(WAIT_POLICIES)}",
        )
        _require(
            isinstance(self.timeout_s, int | float) and 0 < self.timeout_s < float("inf"),
            f"client_timeout must be a number of seconds above 0, got {self.timeout_s!r}",
        )
        _require(
            isinstance(self.allow_callables, bool),
            f"allow_callables must be True or False, got {self.allow_callables!r}",
        )


@dataclass(frozen=True, slots=True)
class LogprobsConfig:
    """What requests get that ask for log-probabilities.

    Attributes:
        max_logprobs: alternatives that a request may ask for; -1 sets no bound.
        mode: of what: of the model's logits or of those that the sampling steps leave, and
            whether as log-probabilities or as they are.
    """

    max_logprobs: int = 20
    mode: LogprobsMode = "raw_logprobs"

    def __post_init__(self) -> None:
        most = self.max_logprobs
        _require(
            isinstance(most, int) and not isinstance(most, bool) and most >= UNLIMITED_LOGPROBS,
            f"max_logprobs must be -1 or a whole number of at least 0, got {most!r}",
        )
        _require(
            self.mode in LOGPROBS_MODES,
            f"logprobs_mode {self.mode!r} is not one of {', '.join(LOGPROBS_MODES)}",
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine needs to start.

    Attributes:
        num_threads: compute threads; None takes the cores this process may use.
        device: what the model runs on: "cpu", "cuda", which is the first GPU, or "cuda:1"; "auto"
            is a GPU where the engine finds one that it can use.
    """

    load: LoadConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    client: ClientConfig = ClientConfig()
    logprobs: LogprobsConfig = LogprobsConfig()
    graphs: GraphConfig = field(default_factory=GraphConfig)
    num_threads: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        _require(
            isinstance(self.device, str) and DEVICE.fullmatch(self.device) is not None,
            f"device {self.device!r} is not one of auto, cpu, cuda, cuda:0, cuda:1 and so on",
        )
        if self.num_threads is not None:
            _require_positive("num_threads", self.num_threads)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineConfig:
        parts: dict[str, Any] = json.loads(text)
        graphs = parts["graphs"]
        if graphs["capture_sizes"] is not None:
            graphs["capture_sizes"] = tuple(graphs["capture_sizes"])
        return cls(
            load=LoadConfig(**parts["load"]),
            cache=CacheConfig(**parts["cache"]),
            scheduler=SchedulerConfig(**parts["scheduler"]),
            client=ClientConfig(**parts["client"]),
            logprobs=LogprobsConfig(**parts["logprobs"]),
            graphs=GraphConfig(**graphs),
            num_threads=parts["num_threads"],
            device=parts["device"],
        )
