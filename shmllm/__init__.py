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
    from shmllm.frontend.input_processor import TextPrompt, TokensPrompt
    from shmllm.frontend.llm import LLM
    from shmllm.logprobs import Logprob
    from shmllm.outputs import CompletionOutput, RequestOutput
    from shmllm.sampling_params import (
        RepetitionDetectionParams,
        RequestOutputKind,
        SamplingParams,
    )
    from shmllm.structured_params import StructuredOutputsParams

_HOMES = {
    "AsyncLLM": "shmllm.frontend.async_llm",
    "AsyncLLMEngine": "shmllm.frontend.async_llm",
    "LLM": "shmllm.frontend.llm",
    "CompletionOutput": "shmllm.outputs",
    "Logprob": "shmllm.logprobs",
    "RepetitionDetectionParams": "shmllm.sampling_params",
    "RequestOutput": "shmllm.outputs",
    "RequestOutputKind": "shmllm.sampling_params",
    "SamplingParams": "shmllm.sampling_params",
    "StructuredOutputsParams": "shmllm.structured_params",
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
    "AsyncLLM",
    "AsyncLLMEngine",
    "CallError",
    "CompletionOutput",
    "EngineDeadError",
    "EnginePausedError",
    "EngineStartError",
    "IpcError",
    "IpcTimeoutError",
    "Logprob",
    "MessageTooLargeError",
    "NoSpaceError",
    "ProtocolMismatchError",
    "RepetitionDetectionParams",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SegmentError",
    "ShmLLMError",
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
