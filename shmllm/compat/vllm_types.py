"""Types of vLLM that programs name in annotations or compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from shmllm.outputs.logprobs import Logprob

MultiModalDataDict = Mapping[str, Any]
"""The `multi_modal_data` of a prompt."""
PromptLogprobs = Sequence[dict[int, Logprob] | None]
"""`RequestOutput.prompt_logprobs`."""
SampleLogprobs = Sequence[dict[int, Logprob]]
"""`CompletionOutput.logprobs`."""


class FinishReason(IntEnum):
    """Why a request ended. As text it is the `finish_reason` of an output."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()
