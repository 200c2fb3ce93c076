"""`vllm.config`: the classes that group vLLM's options, for programs that write them.

An object holds the settings that the program gave; `translate` passes them to `LLM` as a dict. The
table in `frontend.options.foreign_tables` says which of them have an effect.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum, auto
from typing import Any, ClassVar


class Settings:
    """Settings by name. The class attributes are vLLM's defaults of those that programs read."""

    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({given})"


class AttentionConfig(Settings):
    """Accepted without effect: each device has one implementation of attention."""

    backend = None
    flash_attn_version = None


class KernelConfig(Settings):
    """Accepted without effect: each device has its own kernels."""

    enable_jit_warmup = True
    moe_backend = "auto"
    linear_backend = "auto"


class StructuredOutputsConfig(Settings):
    """The defaults of structured outputs. The backend is always llguidance."""

    backend = "auto"
    disable_fallback = False
    disable_any_whitespace = False
    disable_additional_properties = False
    reasoning_parser = ""
    enable_in_reasoning = False


class ReasoningConfig(Settings):
    """What begins reasoning, and what ends it when its budget is used."""

    reasoning_parser = ""
    reasoning_start_str = ""
    reasoning_end_str = ""


class WeightTransferConfig(Settings):
    """How a trainer's weights reach an engine. The default is vLLM's, not shmllm's "shm"."""

    def __init__(self, backend: str = "nccl") -> None:
        super().__init__(backend=backend)


class KVTransferConfig(Settings):
    """The KV connector; see docs/plugins.md."""

    kv_connector = None
    kv_role = None
    kv_connector_extra_config: ClassVar[dict[str, Any]] = {}
    kv_connector_module_path = None


class CompilationMode(IntEnum):
    """vLLM's ways to compile a model, of which none has an effect."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


class CompilationConfig(Settings):
    """The settings of CUDA graphs; those of compilers have no effect."""

    mode = None
    cudagraph_mode = None
    cudagraph_capture_sizes = None
    max_cudagraph_capture_size = None


class ProfilerConfig(Settings):
    """The settings of `LLM.start_profile`."""

    profiler = None
    torch_profiler_dir = ""


class UsageContext(StrEnum):
    """Where an engine runs, for vLLM's reports of usage. shmllm reports none."""

    UNKNOWN_CONTEXT = auto()
    LLM_CLASS = auto()
    API_SERVER = auto()
    OPENAI_API_SERVER = auto()
    OPENAI_BATCH_RUNNER = auto()
    ENGINE_CONTEXT = auto()
