"""Custom logits processors for tests. What each does follows from a request's extra arguments."""

from __future__ import annotations

from typing import Any

import torch

from shmllm.params.sampling import SamplingParams
from shmllm.plugins.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)


class Stateful(LogitsProcessor):
    """Keeps the state of each index of a batch, in the order in which vLLM's own processors do it:
    additions, removals, moves."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self.states: dict[int, tuple[dict[str, Any], list[int] | None, list[int]]] = {}
        self.updates: list[BatchUpdate | None] = []

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.updates.append(batch_update)
        if batch_update is None:
            return
        for index, params, prompt, output in batch_update.added:
            self.states[index] = (params.extra_args or {}, prompt, output)
        for index in batch_update.removed:
            del self.states[index]
        for begin, end, how in batch_update.moved:
            assert how is MoveDirectionality.UNIDIRECTIONAL
            self.states[end] = self.states.pop(begin)
        assert sorted(self.states) == list(range(batch_update.batch_size))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class BatchCount(Stateful):
    """Makes outputs count up from "count"; raises while a request has output as long as "fails"."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        assert logits.shape[0] == len(self.states)
        for index, (arguments, _, output) in self.states.items():
            if arguments.get("fails") == len(output):
                raise ValueError("a request asked for this")
            if "count" in arguments:
                logits[index] = -torch.inf
                logits[index, arguments["count"] + len(output)] = 0
        return logits


class AlwaysFails(Stateful):
    """Raises for every batch."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        raise ValueError("always")


class FavourOne(AdapterLogitsProcessor):
    """Raises the logit of the token "one" by "bias", for requests that have both."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        arguments = params.extra_args or {}
        if "one" not in arguments:
            return None

        def favour(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits[arguments["one"]] += arguments["bias"]
            return logits

        return favour


class FlattenDraws(AdapterLogitsProcessor):
    """Multiplies the logits of draws by "factor": argmax-invariant."""

    def is_argmax_invariant(self) -> bool:
        return True

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        factor = (params.extra_args or {}).get("factor")
        return None if factor is None else lambda output, logits: logits * factor
