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


KB_bytes, MB_bytes, GB_bytes = 10**3, 10**6, 10**9
KiB_bytes, MiB_bytes, GiB_bytes = 2**10, 2**20, 2**30


class SamplingType(IntEnum):
    """How a request samples."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class FinishReason(IntEnum):
    """Why a request ended. As text it is the `finish_reason` of an output."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()
