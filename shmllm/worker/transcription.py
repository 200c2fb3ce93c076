"""What may follow in a transcript: Whisper's rules (Radford et al., 2022, section 4.5).

A request asks for them with ``extra_args={"transcription": {...}}``, whose fields are those of
`Rules`; `frontend/transcription` writes them. An engine has them if its model has an encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor

from shmllm.params.sampling import SamplingParams
from shmllm.plugins.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

ARGUMENT = "transcription"
_LISTS = ("suppress", "suppress_first")
_LAST = 2**31
"""Larger than each token id."""
NAME = "shmllm.worker.transcription:TranscriptionRules"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """
    Attributes:
        suppress: tokens that are never sampled.
        suppress_first: tokens that are not sampled first.
        timestamps: the first token that is a timestamp, which all behind it are; text has smaller
            ones. None: none is sampled.
        latest_first: the last timestamp that may be sampled first.
        end: the token that ends a transcript, behind those of text.
    """

    suppress: tuple[int, ...] = ()
    suppress_first: tuple[int, ...] = ()
    timestamps: int | None = None
    latest_first: int | None = None
    end: int = 0

    @classmethod
    def of(cls, params: SamplingParams) -> Self | None:
        """Return the rules of a request; None: it has none.

        Raises:
            ValueError: they are malformed.
        """
        given = (params.extra_args or {}).get(ARGUMENT)
        if given is None:
            return None
        if not isinstance(given, dict) or given.keys() - cls.__slots__:
            raise ValueError(f"extra_args[{ARGUMENT!r}] has the fields {sorted(cls.__slots__)}")
        suppress, suppress_first = (given.get(name) or () for name in _LISTS)
        if not all(isinstance(each, list | tuple) for each in (suppress, suppress_first)):
            raise ValueError(f"extra_args[{ARGUMENT!r}]: {' and '.join(_LISTS)} are lists")
        begin, latest_first = given.get("timestamps"), given.get("latest_first")
        end = given.get("end", 0)
        given_ids = (each for each in (begin, latest_first) if each is not None)
        ids = (*suppress, *suppress_first, end, *given_ids)
        if not all(type(each) is int and 0 <= each < _LAST for each in ids):
            raise ValueError(f"extra_args[{ARGUMENT!r}] consists of token ids")
        if begin == 0:
            raise ValueError(f"extra_args[{ARGUMENT!r}] has timestamps, and no text before them")
        return cls(
            suppress=tuple(suppress),
            suppress_first=tuple(suppress_first),
            timestamps=begin,
            latest_first=latest_first,
            end=end,
        )


class TranscriptionRules(AdapterLogitsProcessor):
    """Applies the rules of the requests that have some."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        Rules.of(sampling_params)

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._indices = lru_cache(maxsize=64)(_indices)  # most requests have the same rules

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        rules = Rules.of(params)
        if rules is None:
            return None
        always, first = rules.suppress, (*rules.suppress, *rules.suppress_first)

        def apply(output: Sequence[int], logits: Tensor) -> Tensor:
            size, banned = len(logits), always if output else first
            if banned:
                logits.index_fill_(0, self._indices(banned, size, logits.device), -torch.inf)
            if rules.timestamps is None:
                return logits
            for begin, end in timestamp_bounds(rules, output):
                logits[begin : min(end, size)] = -torch.inf
            return prefer_timestamps(logits, rules.timestamps)

        return apply


def _indices(tokens: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """Return the tokens of a vocabulary of this size, on the device of the logits."""
    return torch.tensor([token for token in tokens if token < size], device=device).long()


def timestamp_bounds(rules: Rules, output: Sequence[int]) -> list[tuple[int, int]]:
    """Return the half-open intervals of tokens that may not follow an output.

    Timestamps come in pairs, the end of a segment and the beginning of the next one, but for the
    first, and the last before the end. None is before an earlier one, and a segment is not empty.
    """
    begin, last = rules.timestamps, _LAST
    assert begin is not None, "there are timestamps"
    if not output:
        first_banned = last if rules.latest_first is None else rules.latest_first + 1
        return [(0, begin), (first_banned, last)]
    times = [token for token in output if token >= begin]
    if output[-1] < begin:
        return [(begin, times[-1] + 1)] if times else []
    if len(output) < 2 or output[-2] >= begin:
        return [(begin, last)]
    return [(0, rules.end), (begin, times[-1])]


def prefer_timestamps(logits: Tensor, begin: int) -> Tensor:
    """Leave timestamps alone if all of them together are more likely than any token of text."""
    of_text, of_times = logits[:begin], logits[begin:]
    is_time = torch.logsumexp(of_times, 0) > of_text.max()
    logits[:begin] = torch.where(is_time, -torch.inf, of_text)
    return logits
