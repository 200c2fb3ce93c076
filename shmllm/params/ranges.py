"""The range of each sampling parameter: a check, and its description in error messages.

The ranges are those of vLLM's SamplingParams. This module must not know the rules between
several fields; `SamplingParams` checks those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_N = 16_384
MAX_BAD_WORDS = 1_000
MAX_SCORED_IDS = 128
MOST_EXTRA_CHARACTERS = 2**16
"""The longest JSON text of `extra_args` that is sent to an engine."""


@dataclass(frozen=True, slots=True)
class Range:
    """The range of one parameter.

    Attributes:
        allows: a function that returns whether a value is in the range.
        description: the description of the range in error messages.
    """

    allows: Callable[[Any], bool]
    description: str


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_token_id(value: object) -> bool:
    return is_int(value) and 0 <= value < 2**31  # type: ignore[operator]


def _is_list_of(item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: is_list(value) and all(map(item, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_bias(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        _is_token_id(token) and is_number(bias) and bias < math.inf and bias == bias
        for token, bias in value.items()
    )


def _is_options(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _has_64_bit_integers(value: object) -> bool:
    """Whether every integer within nested dicts, lists and tuples has 64 bits, with or without a
    sign."""
    waiting: list[Any] = [value]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            return False
        if isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            waiting += value
            if isinstance(value, Mapping):
                waiting += value.values()
    return True


def _number(low: float, high: float) -> Range:
    description = f"a number from {low:g} to {high:g}"
    return Range(lambda value: is_number(value) and low <= value <= high, description)


def _whole_number(low: int, description: str, high: float = math.inf) -> Range:
    return Range(lambda value: is_int(value) and low <= value <= high, description)


def _or_none(inner: Range, description: str) -> Range:
    allows = inner.allows
    return Range(lambda value: value is None or allows(value), description)


_FLAG = Range(lambda value: isinstance(value, bool), "True or False")
_COUNT = _or_none(
    _whole_number(-1, ""), "None, -1 for the whole vocabulary, or a whole number of at least 0"
)
_TOKEN_IDS = Range(_is_list_of(_is_token_id), "a list of token ids")

RANGES = {
    "n": _whole_number(1, f"a whole number from 1 to {MAX_N}", MAX_N),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": Range(
        lambda value: is_number(value) and 0 < value < math.inf, "a finite number above 0"
    ),
    "temperature": _number(0, 2),
    "top_p": Range(
        lambda value: is_number(value) and 0 < value <= 1, "a number above 0 and up to 1"
    ),
    "top_k": _whole_number(-1, "-1, 0 or a positive whole number"),
    "min_p": _number(0, 1),
    "seed": _or_none(_whole_number(-(2**63), "", 2**63 - 1), "None or a 64-bit whole number"),
    "stop": Range(_is_list_of(_is_text), "a non-empty string or a list of them"),
    "stop_token_ids": _TOKEN_IDS,
    "bad_words": Range(
        lambda value: _is_list_of(_is_text)(value) and len(value) <= MAX_BAD_WORDS,
        f"a list of at most {MAX_BAD_WORDS} non-empty strings",
    ),
    "include_stop_str_in_output": _FLAG,
    "ignore_eos": _FLAG,
    "max_tokens": _or_none(_whole_number(1, ""), "None or a whole number of at least 1"),
    "min_tokens": _whole_number(0, "greater than or equal to 0 and a whole number"),
    "logprobs": _COUNT,
    "prompt_logprobs": _COUNT,
    "prompt_logprob_start": _or_none(_whole_number(0, ""), "None or a whole number of at least 0"),
    "logprob_token_ids": _or_none(
        Range(lambda value: _TOKEN_IDS.allows(value) and 0 < len(value) <= MAX_SCORED_IDS, ""),
        f"None or a list of 1 to {MAX_SCORED_IDS} token ids",
    ),
    "flat_logprobs": _FLAG,
    "trace_decode_token_ids": _or_none(
        Range(lambda value: _TOKEN_IDS.allows(value) and len(value) > 0, ""),
        "None or a non-empty list of token ids, which are non-negative integers",
    ),
    "routed_experts_prompt_start": _whole_number(0, "a whole number of at least 0"),
    "detokenize": _FLAG,
    "skip_special_tokens": _FLAG,
    "spaces_between_special_tokens": _FLAG,
    "stream_interval": _or_none(_whole_number(1, ""), "None or a whole number of at least 1"),
    "logit_bias": _or_none(
        Range(_is_bias, ""), "None or a dict from token ids to numbers below infinity"
    ),
    "allowed_token_ids": _or_none(
        Range(lambda value: _TOKEN_IDS.allows(value) and len(value) > 0, ""),
        "None or a non-empty list of token ids",
    ),
    "skip_reading_prefix_cache": _or_none(_FLAG, "None, True or False"),
    "thinking_token_budget": _or_none(
        _whole_number(0, ""), "None, -1 or a whole number of at least 0"
    ),
    "extra_args": _or_none(
        Range(lambda value: _is_options(value) and _has_64_bit_integers(value), ""),
        "None or a dict with str keys, and extra_args integers from -2**63 to 2**64 - 1",
    ),
}
