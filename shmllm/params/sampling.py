"""How a request's tokens are chosen, what comes with them, and where its output ends.

Owns the fields and their defaults: names and meaning are those of vLLM's class of the same
name; `sampling_ranges` has what each may be. Knows nothing of how sampling is done.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from shmllm.errors import RequestError
from shmllm.params.keywords import reject_unknown_options
from shmllm.params.ranges import RANGES, is_int, is_number
from shmllm.params.structured_outputs import StructuredOutputsParams

logger = logging.getLogger(__name__)

LOWEST_TEMPERATURE = 1e-2

TokenSequences = tuple[tuple[int, ...], ...]
"""What becomes of `bad_words`: the output may contain none of these."""


class RequestOutputKind(Enum):
    """What each of a stream's outputs holds.

    CUMULATIVE: everything so far. DELTA: what is new. FINAL_ONLY: there is one output, at
    the end.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2

    def __repr__(self) -> str:
        return str(self)


@dataclass(slots=True)
class RepetitionDetectionParams:
    """Ends a request whose output goes round in circles.

    Args:
        max_pattern_size: longest repeated piece to look for, in tokens; 0 looks for none.
        min_pattern_size: shortest; 0 means 1.
        min_count: how often the piece has to stand at the end, one behind the other; at
            least 2.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        most, least, count = self.max_pattern_size, self.min_pattern_size, self.min_count
        if not all(is_int(value) and 0 <= value < 2**31 for value in (most, least, count)):
            raise RequestError(f"repetition_detection takes whole numbers from 0, got {self!r}")
        if least > most:
            raise RequestError(
                f"repetition_detection.min_pattern_size must be at most max_pattern_size "
                f"({most}), got {least}"
            )
        if most and count < 2:
            raise RequestError(f"repetition_detection.min_count must be at least 2, got {count}")


@dataclass(slots=True, kw_only=True)
class _Fields:
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    bad_words: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    skip_reading_prefix_cache: bool | None = None
    extra_args: dict[str, Any] | None = None


_NAMES = tuple(f.name for f in fields(_Fields))


class SamplingParams(_Fields):
    """Parameters of one request.

    Args:
        n: completions of the prompt; 1 to 16384. They share its KV blocks, and with a seed
            the i-th gets seed + i.
        presence_penalty: subtracted from the logit of every token that the output has; -2 to 2.
        frequency_penalty: the same times how often the output has it; -2 to 2.
        repetition_penalty: divides positive and multiplies negative logits of tokens that
            prompt or output have; above 0, 1 does nothing.
        temperature: 0 is greedy; up to 2. Values between 0 and 0.01 are raised to 0.01.
        top_p: keep the most likely tokens whose probabilities add up to this; (0, 1].
        top_k: keep this many of the most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens at least this times as likely as the most likely one; [0, 1].
        seed: makes the request's tokens repeatable whatever else runs beside it.
        stop: a string or strings that end the output; not part of the text.
        stop_token_ids: token ids that end the output; they stay in `token_ids`.
        bad_words: strings that the output may not contain, as their usual tokens.
        ignore_eos: go on after the model's end-of-sequence token.
        max_tokens: the most tokens to generate; None goes on to max_model_len.
        min_tokens: no stop of any kind before this many tokens.
        logprobs: log-probabilities of this many of the most likely tokens, and of the one
            that was chosen, for each output token; 0: only of the chosen one; -1: of the
            whole vocabulary. The engine's `max_logprobs` bounds it.
        prompt_logprobs: the same for each prompt token but the first.
        detokenize: False leaves `text` empty.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: accepted; tokenizers of today write none of their own.
        include_stop_str_in_output: leave the stop string at the end of the text.
        output_kind: what the outputs of a stream hold; `LLM.generate` returns final ones.
        stream_interval: tokens from one output of a stream to the next; the first and the
            last come at once.
        structured_outputs: what the output has to match.
        logit_bias: added to the logits, by token id; -inf forbids a token.
        allowed_token_ids: the only tokens that may be chosen.
        repetition_detection: ends a request that repeats itself, with reason "repetition".
        skip_reading_prefix_cache: compute the whole prompt; None does so only where
            `prompt_logprobs` needs it.
        extra_args: not used; for code that carries its own.

    Raises:
        RequestError: names the field, the value and the range.
        TypeError: an unknown option; names the nearest one.
    """

    __slots__ = ()
    # Clients copy parameters by going over one of these.
    __struct_fields__ = _NAMES
    __annotations__ = _Fields.__annotations__

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except TypeError:
            reject_unknown_options("SamplingParams", options, _NAMES)
            raise
        self._normalise(options)
        self._check(options)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in _NAMES)
        return f"SamplingParams({shown})"

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def reads_prefix_cache(self) -> bool:
        """Prompt log-probabilities need the hidden states that a hit leaves uncomputed."""
        return self.prompt_logprobs is None and not self.skip_reading_prefix_cache

    def clone(self) -> SamplingParams:
        return copy.deepcopy(self)

    def check(self) -> None:
        """Raise RequestError if a field is out of its range."""
        self._check(_NAMES)

    def _normalise(self, given: Mapping[str, Any]) -> None:
        for name in ("stop", "stop_token_ids", "bad_words"):
            if name in given:
                value = given[name]
                is_text = isinstance(value, str) and name != "stop_token_ids"
                setattr(self, name, [value] if is_text else [] if value is None else value)
        for name in ("logprobs", "prompt_logprobs"):
            if given.get(name) is True:
                setattr(self, name, 1)
        if self.seed == -1:
            self.seed = None
        if given.get("logit_bias") is not None:
            self.logit_bias = _bias_by_id(given["logit_bias"])
        if isinstance(self.structured_outputs, Mapping):
            self.structured_outputs = StructuredOutputsParams(**self.structured_outputs)
        if isinstance(self.repetition_detection, Mapping):
            self.repetition_detection = RepetitionDetectionParams(**self.repetition_detection)
        if is_number(self.temperature) and 0 < self.temperature < LOWEST_TEMPERATURE:
            logger.warning(
                "temperature %s raised to %s, below which sampling overflows",
                self.temperature,
                LOWEST_TEMPERATURE,
            )
            self.temperature = LOWEST_TEMPERATURE

    def _require(self, name: str, valid: bool, allowed: str) -> None:
        if not valid:
            raise RequestError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

    def _check(self, names: Iterable[str]) -> None:
        """Fields nobody named hold their defaults: looking at those would double the cost."""
        for name in names:
            known = RANGES.get(name)
            if known is not None:
                self._require(name, known.allows(getattr(self, name)), known.words)
            else:
                self._check_object(name)
        most = self.max_tokens
        if most is not None and self.min_tokens > most:
            self._require("min_tokens", False, f"at most max_tokens ({most})")
        if self.stop and not self.detokenize:
            self._require("stop", False, "empty when detokenize is False")
        if self.n > 1 and self.temperature == 0:
            self._require("n", False, "1 when temperature is 0, since all would be the same")

    def _check_object(self, name: str) -> None:
        kind: type = _OBJECTS[name]
        value = getattr(self, name)
        valid = isinstance(value, kind) or (value is None and name != "output_kind")
        self._require(name, valid, f"a {kind.__name__}")


_OBJECTS = {
    "output_kind": RequestOutputKind,
    "structured_outputs": StructuredOutputsParams,
    "repetition_detection": RepetitionDetectionParams,
}


def _bias_by_id(given: Any) -> Any:
    """JSON knows only text keys. What is no dict, or no number, is for the range check."""
    if not isinstance(given, Mapping):
        return given
    by_id = {
        int(token) if isinstance(token, str) and token.isdecimal() else token: bias
        for token, bias in given.items()
    }
    return by_id or None
