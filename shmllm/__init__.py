"""LLM inference on one machine: front end and engine share memory instead of sending messages.

Public names, each imported when it is first used, so that `import shmllm` is fast and
pulls in neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shmllm.version import __version__

if TYPE_CHECKING:
    from shmllm.errors import (
        CallError,
        EngineDeadError,
        EnginePausedError,
        EngineStartError,
        IpcError,
        IpcTimeoutError,
        MessageTooLargeError,
        NoSpaceError,
        ProtocolMismatchError,
        RequestError,
        SegmentError,
        ShmLLMError,
    )
    from shmllm.frontend.async_llm import AsyncLLM, AsyncLLMEngine
    from shmllm.frontend.llm import LLM
    from shmllm.frontend.options.engine_args import AsyncEngineArgs, EngineArgs
    from shmllm.frontend.prompt_chunks import PromptChunk
    from shmllm.frontend.prompts import EmbedsPrompt, MultiModalPrompt, TextPrompt, TokensPrompt
    from shmllm.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        LateChunk,
        Logprob,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
        SleepReport,
    )
    from shmllm.params import (
        BeamSearchParams,
        LateChunkingParams,
        LateInteractionParams,
        LoRARequest,
        PoolerConfig,
        PoolingParams,
        RepetitionDetectionParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )

_IN_FRONT_END = {
    "AsyncLLM": "async_llm",
    "AsyncLLMEngine": "async_llm",
    "LLM": "llm",
    "AsyncEngineArgs": "options.engine_args",
    "EngineArgs": "options.engine_args",
    "EmbedsPrompt": "prompts",
    "MultiModalPrompt": "prompts",
    "PromptChunk": "prompt_chunks",
    "TextPrompt": "prompts",
    "TokensPrompt": "prompts",
}
_LIGHT_FIRST = ("shmllm.errors", "shmllm.params", "shmllm.outputs")
"""Where the other names are. Only the last of these packages imports numpy."""

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CallError",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "EngineArgs",
    "EngineDeadError",
    "EnginePausedError",
    "EngineStartError",
    "IpcError",
    "IpcTimeoutError",
    "LateChunk",
    "LateChunkingParams",
    "LateInteractionParams",
    "LoRARequest",
    "Logprob",
    "MessageTooLargeError",
    "MultiModalPrompt",
    "NoSpaceError",
    "PoolerConfig",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptChunk",
    "ProtocolMismatchError",
    "RepetitionDetectionParams",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "SegmentError",
    "ShmLLMError",
    "SleepReport",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _IN_FRONT_END:
        return getattr(import_module(f"shmllm.frontend.{_IN_FRONT_END[name]}"), name)
    if name in __all__:
        for package in _LIGHT_FIRST:
            if hasattr(module := import_module(package), name):
                return getattr(module, name)
    raise AttributeError(f"module 'shmllm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
