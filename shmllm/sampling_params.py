"""How a request's tokens are chosen and where its output ends.

Owns the fields, their ranges and their defaults: names, meaning and ranges are those of
vLLM's class of the same name. Knows nothing of how sampling is done.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from shmllm.errors import RequestError
from shmllm.options import reject_unknown_options

logger = logging.getLogger(__name__)

LOWEST_TEMPERATURE = 1e-2


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(slots=True, kw_only=True)
class _Fields:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    detokenize: bool = True
    skip_special_tokens: bool = True


class SamplingParams(_Fields):
    """Parameters of one request.

    Args:
        temperature: 0 is greedy; up to 2. Values between 0 and 0.01 are raised to 0.01.
        top_p: keep the most likely tokens whose probabilities add up to this; (0, 1].
        top_k: keep this many of the most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens at least this times as likely as the most likely one; [0, 1].
        seed: makes the request's tokens repeatable whatever else runs beside it.
        stop: a string or strings that end the output; not part of the text.
        stop_token_ids: token ids that end the output; they stay in `token_ids`.
        include_stop_str_in_output: leave the stop string at the end of the text.
        ignore_eos: go on after the model's end-of-sequence token.
        max_tokens: the most tokens to generate; None goes on to max_model_len.
        min_tokens: no stop of any kind before this many tokens.
        detokenize: False leaves `text` empty.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        RequestError: names the field, the value and the range.
        TypeError: an unknown option; names the nearest one.
    """

    __slots__ = ()

    def __init__(self, **options: Any) -> None:
        reject_unknown_options("SamplingParams", options, (f.name for f in fields(_Fields)))
        super().__init__(**options)
        self._normalise()
        self.check()

    def __repr__(self) -> str:
        shown = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))
        return f"SamplingParams({shown})"

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def clone(self) -> SamplingParams:
        return copy.deepcopy(self)

    def check(self) -> None:
        """Raise RequestError if a field is out of its range."""
        self._check_filters()
        self._check_lengths()
        self._check_stops()

    def _normalise(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop = [] if self.stop is None else self.stop
        self.stop_token_ids = [] if self.stop_token_ids is None else self.stop_token_ids
        if self.seed == -1:
            self.seed = None
        if _is_number(self.temperature) and 0 < self.temperature < LOWEST_TEMPERATURE:
            logger.warning(
                "temperature %s raised to %s, below which sampling overflows",
                self.temperature,
                LOWEST_TEMPERATURE,
            )
            self.temperature = LOWEST_TEMPERATURE

    def _require(self, name: str, valid: bool, allowed: str) -> None:
        if not valid:
            raise RequestError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

    def _check_filters(self) -> None:
        t, p, k, m, seed = self.temperature, self.top_p, self.top_k, self.min_p, self.seed
        self._require("temperature", _is_number(t) and 0 <= t <= 2, "a number from 0 to 2")
        self._require("top_p", _is_number(p) and 0 < p <= 1, "a number above 0 and up to 1")
        self._require("top_k", _is_int(k) and k >= -1, "-1, 0 or a positive whole number")
        self._require("min_p", _is_number(m) and 0 <= m <= 1, "a number from 0 to 1")
        self._require(
            "seed",
            seed is None or (_is_int(seed) and -(2**63) <= seed < 2**63),
            "None or a 64-bit whole number",
        )

    def _check_lengths(self) -> None:
        most, least = self.max_tokens, self.min_tokens
        self._require(
            "max_tokens",
            most is None or (_is_int(most) and most >= 1),
            "None or a whole number of at least 1",
        )
        self._require("min_tokens", _is_int(least) and least >= 0, "a whole number of at least 0")
        self._require("min_tokens", most is None or least <= most, f"at most max_tokens ({most})")

    def _check_stops(self) -> None:
        stop, ids = self.stop, self.stop_token_ids
        strings = _is_list(stop) and all(isinstance(s, str) and s for s in stop)
        self._require("stop", strings, "a non-empty string or a list of them")
        whole = _is_list(ids) and all(_is_int(i) and 0 <= i < 2**31 for i in ids)
        self._require("stop_token_ids", whole, "a list of token ids")
        self._require("stop", not stop or self.detokenize, "empty when detokenize is False")
