"""What may follow in a transcript: Whisper's rules (Radford et al., 2022, section 4.5).

A request asks for them with ``extra_args={"transcription": {...}}``, whose fields are those of
`Rules`; `frontend/transcription` writes them. An engine has them if its model has an encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from shmllm.params.sampling import SamplingParams
from shmllm.plugins.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

ARGUMENT = "transcription"
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
        rules = cls(
            suppress=tuple(given.get("suppress", ())),
            suppress_first=tuple(given.get("suppress_first", ())),
            timestamps=given.get("timestamps"),
            latest_first=given.get("latest_first"),
            end=given.get("end", 0),
        )
        lists = (*rules.suppress, *rules.suppress_first)
        ids = (*lists, rules.timestamps, rules.latest_first, rules.end)
        if not all(each is None or (type(each) is int and each >= 0) for each in ids):
            raise ValueError(f"extra_args[{ARGUMENT!r}] consists of token ids")
        return rules


class TranscriptionRules(AdapterLogitsProcessor):
    """Applies the rules of the requests that have some."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        Rules.of(sampling_params)

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        rules = Rules.of(params)
        if rules is None:
            return None

        def apply(output: Sequence[int], logits: Tensor) -> Tensor:
            size = len(logits)
            banned = rules.suppress if output else (*rules.suppress, *rules.suppress_first)
            for token in banned:
                logits[token : token + 1] = -torch.inf
            if rules.timestamps is None:
                return logits
            for first, end in timestamp_bounds(rules, output):
                logits[first : min(end, size)] = -torch.inf
            return prefer_timestamps(logits, rules.timestamps)

        return apply


def timestamp_bounds(rules: Rules, output: Sequence[int]) -> list[tuple[int, int]]:
    """Return the half-open intervals of tokens that may not follow an output.

    Timestamps come in pairs, the end of a segment and the beginning of the next one, but for the
    first, and the last before the end. None is before an earlier one, and a segment is not empty.
    """
    begin, last = rules.timestamps, 2**31
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
