"""The interface of custom logits processors: vLLM's, with its names and meaning.

A class that implements `LogitsProcessor` sees a batch of requests, each at an index, and changes
the logits of all; one that implements `AdapterLogitsProcessor` makes a function for each request.
Tensors are torch's. This module must not know who keeps the batch.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar

from shmllm.params.sampling import SamplingParams

RequestLogitsProcessor = Callable[..., Any]
"""A function of a request's output tokens and its logits, (V,) float32, which returns the logits to
sample from. With three parameters, it takes the prompt's tokens ahead of the output's."""


Entry = TypeVar("Entry")
"""What a processor keeps of a request."""


class MoveDirectionality(Enum):
    """How a request moves to another index: alone, or in exchange for the request there."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


RemovedRequest = int
AddedRequest = tuple[int, SamplingParams, list[int] | None, list[int]]
MovedRequest = tuple[int, int, MoveDirectionality]


@dataclass(frozen=True)
class BatchUpdate:
    """The changes of the batch since the last update: first removals, then additions, then moves.

    Attributes:
        batch_size: the number of requests in the batch now.
        removed: the indices of requests that left.
        added: (index, parameters, prompt's tokens, output's tokens) of requests that came. The
            prompt's tokens are None if it was given as embeddings. The list of the output's tokens
            grows with the output. A request that returns after a preemption is added again, with
            the tokens of its output so far.
        moved: (from, to, how) of requests whose index changed.
    """

    batch_size: int
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Changes the logits of a batch of requests.

    Args:
        vllm_config: the engine's configuration, a `VllmConfigView`.
        device: the torch.device of the logits.
        is_pin_memory: whether host memory that is copied to the device should be pinned.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError if a request must not have these parameters. The engine calls this
        when it gets a request, before it queues it."""
        return

    @abstractmethod
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None: ...

    @abstractmethod
    def apply(self, logits: Any) -> Any:
        """Return the changed logits, (batch_size, V) float32, the same tensor or another one. Rows
        of requests that get no token in this step are zeros."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the processor never changes which token has the largest logit. Such a processor
        is called for draws only, behind temperature and min_p."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Take note of a new step, before `apply`; None if the batch did not change."""


class AdapterLogitsProcessor(LogitsProcessor):
    """Changes the logits of single requests, each by a function of its own.

    Attributes:
        req_info: by index, the function of one argument, the request's logits.
    """

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self.req_info: dict[int, partial[Any]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return the function for a request with these parameters; None if it needs none."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._bound)

    def _bound(
        self, params: SamplingParams, prompt: list[int] | None, output: list[int]
    ) -> partial[Any] | None:
        function = self.new_req_logits_processor(params)
        return None if function is None else _bind(function, prompt, output)

    def apply(self, logits: Any) -> Any:
        for index, function in self.req_info.items():
            apply_to_row(function, logits, index)
        return logits


def process_dict_updates(
    req_entries: dict[int, Entry],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], Entry | None],
) -> bool:
    """Bring the entries of single requests up to date.

    Args:
        req_entries: by index, what a processor keeps of a request; it is changed.
        batch_update: the changes of the batch; None: there are none.
        new_state: makes the entry of a request that came, from its parameters, the prompt's tokens
            and the output's; None if it needs none.

    Returns:
        Whether an entry came, went or moved.
    """
    if batch_update is None:
        return False
    touched = [req_entries.pop(index, None) for index in batch_update.removed]
    for index, params, prompt, output in batch_update.added:
        touched.append(req_entries.pop(index, None))
        entry = new_state(params, prompt, output)
        if entry is not None:
            req_entries[index] = entry
            touched.append(entry)
    for begin, end, how in batch_update.moved:
        moving, other = req_entries.pop(begin, None), req_entries.pop(end, None)
        touched += [moving, other]
        if moving is not None:
            req_entries[end] = moving
        if other is not None and how is MoveDirectionality.SWAP:
            req_entries[begin] = other
    return any(entry is not None for entry in touched)


def apply_to_row(function: Callable[[Any], Any], logits: Any, index: int) -> None:
    """Replace a row of logits by what the function returns for it.

    Args:
        function: an element of `req_info`.
        logits: (N, V) float32.
        index: the row.
    """
    row = logits[index]
    changed = function(row)
    if changed is not row:
        if changed.shape != row.shape:
            raise ValueError(f"it returned logits of shape {tuple(changed.shape)}")
        row.copy_(changed)


def _bind(
    function: RequestLogitsProcessor, prompt: list[int] | None, output: list[int]
) -> partial[Any]:
    if len(inspect.signature(function).parameters) != 3:
        return partial(function, output)
    if prompt is None:
        raise ValueError("it needs the prompt's tokens, and the prompt was given as embeddings")
    return partial(function, prompt, output)
