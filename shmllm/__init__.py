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
    from shmllm.frontend.engine_args import AsyncEngineArgs, EngineArgs
    from shmllm.frontend.input_processor import EmbedsPrompt, TextPrompt, TokensPrompt
    from shmllm.frontend.llm import LLM
    from shmllm.outputs.beam_search import BeamSearchOutput, BeamSearchSequence
    from shmllm.outputs.logprobs import Logprob
    from shmllm.outputs.pooling import (
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from shmllm.outputs.request import CompletionOutput, RequestOutput
    from shmllm.outputs.sleep_report import SleepReport
    from shmllm.params.beam_search import BeamSearchParams
    from shmllm.params.pooling import PoolerConfig, PoolingParams
    from shmllm.params.sampling import RepetitionDetectionParams, RequestOutputKind, SamplingParams
    from shmllm.params.structured_outputs import StructuredOutputsParams


_HOMES = {
    "AsyncLLM": "shmllm.frontend.async_llm",
    "AsyncLLMEngine": "shmllm.frontend.async_llm",
    "LLM": "shmllm.frontend.llm",
    "AsyncEngineArgs": "shmllm.frontend.engine_args",
    "BeamSearchOutput": "shmllm.outputs.beam_search",
    "BeamSearchParams": "shmllm.params.beam_search",
    "BeamSearchSequence": "shmllm.outputs.beam_search",
    "CompletionOutput": "shmllm.outputs.request",
    "EmbeddingOutput": "shmllm.outputs.pooling",
    "EmbeddingRequestOutput": "shmllm.outputs.pooling",
    "EmbedsPrompt": "shmllm.frontend.input_processor",
    "EngineArgs": "shmllm.frontend.engine_args",
    "Logprob": "shmllm.outputs.logprobs",
    "PoolerConfig": "shmllm.params.pooling",
    "PoolingOutput": "shmllm.outputs.pooling",
    "PoolingParams": "shmllm.params.pooling",
    "PoolingRequestOutput": "shmllm.outputs.pooling",
    "RepetitionDetectionParams": "shmllm.params.sampling",
    "RequestOutput": "shmllm.outputs.request",
    "RequestOutputKind": "shmllm.params.sampling",
    "SamplingParams": "shmllm.params.sampling",
    "ScoringOutput": "shmllm.outputs.pooling",
    "ScoringRequestOutput": "shmllm.outputs.pooling",
    "SleepReport": "shmllm.outputs.sleep_report",
    "StructuredOutputsParams": "shmllm.params.structured_outputs",
    "TextPrompt": "shmllm.frontend.input_processor",
    "TokensPrompt": "shmllm.frontend.input_processor",
    **dict.fromkeys(
        (
            "CallError",
            "EngineDeadError",
            "EnginePausedError",
            "EngineStartError",
            "IpcError",
            "IpcTimeoutError",
            "MessageTooLargeError",
            "NoSpaceError",
            "ProtocolMismatchError",
            "RequestError",
            "SegmentError",
            "ShmLLMError",
        ),
        "shmllm.errors",
    ),
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CallError",
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
    "Logprob",
    "MessageTooLargeError",
    "NoSpaceError",
    "PoolerConfig",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
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
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'shmllm' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return __all__
