"""Reads prompts, their parameters and their adapters from iterables, a few at a time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from shmllm.errors import RequestError
from shmllm.frontend.prompts import Prompt, as_list
from shmllm.params.lora import LoRARequest
from shmllm.params.sampling import SamplingParams

ParamsSource = SamplingParams | Iterable[SamplingParams] | None
AdaptersSource = LoRARequest | Iterable[LoRARequest | None] | None
Taken = tuple[int, Prompt, SamplingParams, LoRARequest | None]

CHUNK_S = 0.01
"""The time after which a chunk of prompts is submitted although it is not full, in seconds."""


class PromptSource:
    """Reads prompts and their parameters from iterables, a few at a time.

    Args:
        prompts: one prompt, or any iterable of prompts.
        params: one SamplingParams for all prompts, or an iterable with one per prompt.
        default: the parameters if `params` is None.
        adapters: one adapter or None for all prompts, or an iterable with one or None per prompt.

    Attributes:
        is_exhausted: whether the iterable of prompts has ended.
        position: the index of the next prompt.

    Raises:
        RequestError: an argument has a wrong type, or the lists have different lengths.
    """

    def __init__(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: ParamsSource,
        default: SamplingParams,
        adapters: AdaptersSource = None,
    ) -> None:
        if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
            raise RequestError(f"prompts must be an iterable, got {type(prompts).__name__}")
        is_list = isinstance(prompts, Sequence | dict)
        self._prompts: Iterator[Any] = iter(as_list(prompts) if is_list else prompts)  # type: ignore[arg-type]
        params = default if params is None else params
        if isinstance(params, SamplingParams):
            self._params: Iterator[SamplingParams] = itertools.repeat(params)
        elif isinstance(params, str | bytes) or not isinstance(params, Iterable):
            raise RequestError(
                "sampling_params must be a SamplingParams or an iterable of them, got "
                f"{type(params).__name__}"
            )
        else:
            self._params = iter(params)
        if is_list and isinstance(params, Sequence):
            _check_lengths(len(as_list(prompts)), len(params))  # type: ignore[arg-type]
        if adapters is None or isinstance(adapters, LoRARequest):
            self._adapters: Iterator[LoRARequest | None] = itertools.repeat(adapters)
        elif isinstance(adapters, str | bytes) or not isinstance(adapters, Iterable):
            raise RequestError(
                f"lora_request must be a LoRARequest or an iterable of them, got {adapters!r}"
            )
        else:
            self._adapters = iter(adapters)
        self.is_exhausted = False
        self.position = 0

    def take(self, most: int) -> list[Taken]:
        """Read the next prompts, as tuples of index, prompt, parameters and adapter.

        At most `most` prompts, and only until CHUNK_S has passed: a prompt that the iterable
        yields late must not delay the submission of those before it.

        Raises:
            RequestError: the parameters ended before the prompts, or one has a wrong type.
        """
        taken: list[Taken] = []
        deadline = time.monotonic() + CHUNK_S
        while len(taken) < most and not (taken and time.monotonic() >= deadline):
            try:
                prompt = next(self._prompts)
            except StopIteration:
                self.is_exhausted = True
                break
            taken.append((self.position, prompt, self._next_params(), self._next_adapter()))
            self.position += 1
        return taken

    def _next_params(self) -> SamplingParams:
        params = next(self._params, None)
        if params is None:
            raise RequestError(f"sampling_params ended before prompt {self.position}")
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params {self.position} is a {type(params).__name__}, not a "
                "SamplingParams"
            )
        return params

    def _next_adapter(self) -> LoRARequest | None:
        try:
            return next(self._adapters)
        except StopIteration:
            raise RequestError(f"lora_request ended before prompt {self.position}") from None


def _check_lengths(num_prompts: int, num_params: int) -> None:
    if num_prompts != num_params:
        raise RequestError(
            f"{num_prompts} prompts and {num_params} sampling_params: give one "
            "SamplingParams for all prompts, or one for each"
        )
