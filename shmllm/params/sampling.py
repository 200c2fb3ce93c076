"""SamplingParams: the parameters of one generation request, with vLLM's names and meaning.

This module owns the fields, their defaults and the rules between fields; `ranges` contains the
range of each field. It must not know how tokens are sampled.
"""

from __future__ import annotations

import copy
import logging
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Self

from shmllm.errors import RequestError
from shmllm.params.ranges import RANGES, is_int, is_number
from shmllm.params.signatures import takes_fields_of
from shmllm.params.structured_outputs import StructuredOutputsParams
from shmllm.params.token_table import TokenTable
from shmllm.params.unknown_options import of_mapping, without_neutral

logger = logging.getLogger(__name__)

LOWEST_TEMPERATURE = 1e-2

_SHORT = reprlib.Repr()
"""Shows values in messages. A list of a million entries would take seconds and megabytes."""
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = _SHORT.maxfrozenset = _SHORT.maxdict = 20
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200

TokenSequences = tuple[tuple[int, ...], ...]
"""Token sequences that the output must not contain; `bad_words` as token ids."""


class RequestOutputKind(Enum):
    """The contents of each output of a streamed request.

    CUMULATIVE: all text and tokens so far. DELTA: the text and tokens since the last output.
    FINAL_ONLY: the request has one output, when it is finished.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2

    def __repr__(self) -> str:
        return str(self)


@dataclass(slots=True)
class RepetitionDetectionParams:
    """Ends a request whose output ends with a repeated token sequence.

    Args:
        max_pattern_size: the length of the longest sequence to look for, in tokens; 0 turns
            the detection off.
        min_pattern_size: the length of the shortest sequence, in tokens; 0 means 1.
        min_count: the number of consecutive repetitions of a sequence at the end of the output
            that ends the request; at least 2.

    Raises:
        RequestError: a field is out of its range.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        longest, shortest = self.max_pattern_size, self.min_pattern_size
        count = self.min_count
        if not all(is_int(value) and 0 <= value < 2**31 for value in (longest, shortest, count)):
            raise RequestError(f"repetition_detection must have whole numbers from 0, got {self!r}")
        if shortest > longest:
            raise RequestError(
                f"repetition_detection.min_pattern_size must be at most max_pattern_size "
                f"({longest}), got {shortest}"
            )
        if longest and count < 2:
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
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
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
    thinking_token_budget: int | None = None
    extra_args: dict[str, Any] | None = None
    trace_decode_token_ids: list[int] | None = None
    routed_experts_prompt_start: int = 0


_NAMES = tuple(f.name for f in fields(_Fields))


@takes_fields_of(_Fields)
class SamplingParams(_Fields):
    """Sampling parameters of one request. All arguments are keyword arguments.

    Args:
        n: the number of completions of the prompt; 1 to 16384. They share the KV blocks of the
            prompt. With a seed, completion i uses seed + i.
        presence_penalty: the number to subtract from the logit of each token that the output
            already contains; -2 to 2. Default 0.
        frequency_penalty: the number to subtract from the logit of a token for each time that
            the output already contains it; -2 to 2. Default 0.
        repetition_penalty: for tokens that the prompt or the output already contains, positive
            logits are divided by this and negative logits are multiplied by it; above 0.
            Default 1, which changes nothing.
        temperature: the number by which logits are divided before the softmax; 0 to 2. 0 means
            greedy sampling. Values between 0 and 0.01 are raised to 0.01.
        top_p: sample from the smallest set of most likely tokens whose probabilities add up to
            at least this; above 0 and up to 1. Default 1, which keeps all tokens.
        top_k: sample from this many most likely tokens; 0 (the default) or -1 keeps all tokens.
        min_p: keep the tokens whose probability is at least `min_p` times that of the most
            likely token; 0 to 1. Default 0, which keeps all tokens.
        seed: a 64-bit seed that makes the tokens of this request reproducible, independent of
            the other requests in the batch; None or -1 uses the engine's seed.
        stop: a string or a list of strings. The output ends before the first of them that the
            text contains; of several that end together, before the first in the list.
        stop_token_ids: token ids that end the output, without repetitions. `token_ids` contains
            the one that ended it; `text` does not.
        bad_words: strings that the output must not contain. The engine forbids their usual
            tokenizations, at the beginning of a text and after a space.
        ignore_eos: continue after the model's end-of-sequence token.
        max_tokens: the largest number of tokens to generate; at least 1. None generates up to
            the engine's `max_model_len`. Default 16.
        min_tokens: the smallest number of tokens to generate before an end-of-sequence token,
            a stop token or a stop string may end the output. Default 0.
        logprobs: the number of most likely tokens whose log-probabilities are returned for
            each output token, besides that of the sampled token. 0 returns the sampled token's
            only; -1 returns those of the whole vocabulary; None (the default) returns none.
            The engine's `max_logprobs` is the upper limit.
        prompt_logprobs: the same for each prompt token except the first.
        prompt_logprob_token_ids: the token ids whose log-probabilities are returned for each of
            these tokens instead, as `RequestOutput.prompt_token_id_logprobs`: nested lists or an
            array, a row for each prompt token behind the first; -1 fills a row up. A TokenTable
            after construction.
        prompt_logprob_start: how many of the tokens behind the first have no row; None means 0.
        logprob_token_ids: the token ids whose log-probabilities are returned for each output
            token instead of those of the most likely tokens; at least 1, at most 128. Their
            `Logprob.rank` is None. If `logprobs` is given as well, it must be their number.
        flat_logprobs: return log-probabilities as `FlatLogprobs`.
        detokenize: False leaves `text` empty.
        skip_special_tokens: leave special tokens out of `text`.
        spaces_between_special_tokens: with `skip_special_tokens` False, False leaves out what the
            tokenizer writes between two added tokens that follow each other: in most
            vocabularies nothing, in some a space.
        include_stop_str_in_output: keep the stop string, or the text of the stop token, at the
            end of `text`.
        output_kind: the contents of each output of a stream; see RequestOutputKind.
            `LLM.generate` always returns final outputs.
        stream_interval: the number of new tokens after which a stream yields the next output.
            The first and the last output are not delayed. None means 1.
        structured_outputs: a constraint that the output must match: a StructuredOutputsParams
            or a dict of its fields.
        logit_bias: numbers to add to the logits, by token id; -inf forbids a token.
        allowed_token_ids: the only token ids that may be sampled; None allows all.
        repetition_detection: ends a request whose output repeats itself, with finish_reason
            "repetition": a RepetitionDetectionParams or a dict of its fields.
        skip_reading_prefix_cache: compute the whole prompt, without prefix-cache hits. None
            means False. With `prompt_logprobs`, the whole prompt is always computed.
        thinking_token_budget: the largest number of tokens of the model's reasoning; at least 0.
            After as many tokens since the one that begins reasoning, those that end it are
            forced. Both come from the option `reasoning_parser`. None or -1 sets no limit.
            Tokens that `structured_outputs`, `allowed_token_ids` or `bad_words` forbid stay
            forbidden.
        extra_args: a dict for custom logits processors and for data of the calling program. An
            engine without such processors ignores it; one with them gets it as JSON of at most
            65,536 characters. Its integers have at most 64 bits.
        trace_decode_token_ids: the tokens of the output, which are not sampled: to compute the
            log-probabilities of a known output, step by step. The output ends with the last of
            them, or after `max_tokens`. Penalties, biases and bans have no effect.
        routed_experts_prompt_start: of how many tokens at the beginning of the prompt
            `CompletionOutput.routed_experts` is left out, such as those of earlier turns. Default
            0. It has an effect on engines with `enable_return_routed_experts` only.

    Raises:
        RequestError: a field is out of its range. The message contains the field, its value
            and the range.
        TypeError: an unknown keyword argument. The message contains the most similar known one.
    """

    __slots__ = ()
    # Programs written for vLLM copy parameters by iterating over one of these.
    __struct_fields__ = _NAMES
    __annotations__ = _Fields.__annotations__

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except TypeError:
            options = without_neutral("SamplingParams", options, _NAMES)
            super().__init__(**options)
        self._normalise(options)
        self._check(options)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in _NAMES)
        return f"SamplingParams({shown})"

    @classmethod
    def from_optional(cls, **options: Any) -> Self:
        """Parameters of which None means the default, but for `max_tokens`, which may be None."""
        given = options.items()
        return cls(**{k: v for k, v in given if v is not None or k == "max_tokens"})

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives whose log-probabilities are returned for each output token;
        -1 for the whole vocabulary, None if no log-probabilities are returned."""
        if self.logprobs is None and self.logprob_token_ids is not None:
            return len(self.logprob_token_ids)
        return self.logprobs

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether the prompt may use prefix-cache hits.

        Prompt log-probabilities need the hidden states of all prompt tokens, and a hit skips
        their computation.
        """
        return not self.scores_prompt and not self.skip_reading_prefix_cache

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are returned."""
        return self.prompt_logprobs is not None or self.prompt_logprob_token_ids is not None

    def clone(self) -> SamplingParams:
        """A deep copy."""
        return copy.deepcopy(self)

    def check(self) -> None:
        """Raise RequestError if a field is out of its range.

        The constructor checks, too. This method finds values that were assigned afterwards.
        """
        self._check(_NAMES)

    def _normalise(self, given: Mapping[str, Any]) -> None:
        """Convert the other accepted forms of the given fields, such as a single stop string."""
        for name in ("stop", "stop_token_ids", "bad_words"):
            if name in given:
                value = given[name]
                is_text = isinstance(value, str) and name != "stop_token_ids"
                value = [value] if is_text else [] if value is None else value
                setattr(self, name, value if name == "stop" else _distinct(value))
        for name in ("logprobs", "prompt_logprobs"):
            if given.get(name) is True:
                setattr(self, name, 1)
        self.seed = None if self.seed == -1 else self.seed
        budget = self.thinking_token_budget
        self.thinking_token_budget = None if budget == -1 else budget
        table = self.prompt_logprob_token_ids
        if table is not None and not isinstance(table, TokenTable):
            self.prompt_logprob_token_ids = TokenTable.of(table) or table
        if given.get("logit_bias") is not None:
            self.logit_bias = _bias_by_id(given["logit_bias"])
        if isinstance(self.structured_outputs, Mapping):
            self.structured_outputs = of_mapping(StructuredOutputsParams, self.structured_outputs)
        if isinstance(self.repetition_detection, Mapping):
            given_detection = self.repetition_detection
            self.repetition_detection = of_mapping(RepetitionDetectionParams, given_detection)
        if is_number(self.temperature) and 0 < self.temperature < LOWEST_TEMPERATURE:
            logger.warning(
                "temperature %s raised to %s, below which sampling overflows",
                self.temperature,
                LOWEST_TEMPERATURE,
            )
            self.temperature = LOWEST_TEMPERATURE

    def _require(self, name: str, valid: bool, allowed: str) -> None:
        if not valid:
            value = getattr(self, name)
            message = f"{name} must be {allowed}, got {_SHORT.repr(value)}"
            raise RequestError(message, parameter=name, value=value)

    def _check(self, names: Iterable[str]) -> None:
        """Check the fields `names`. The constructor passes only the given ones: checking the
        defaults as well would double the cost."""
        for name in names:
            known = RANGES.get(name)
            if known is not None:
                self._require(name, known.allows(getattr(self, name)), known.description)
            else:
                self._check_object(name)
        limit = self.max_tokens
        if limit is not None and self.min_tokens > limit:
            self._require("min_tokens", False, f"less than or equal to max_tokens ({limit})")
        if self.stop and not self.detokenize:
            self._require("stop", False, "empty when detokenize is False")
        if self.logprob_token_ids is not None and self.num_logprobs != len(self.logprob_token_ids):
            count = len(self.logprob_token_ids)
            self._require("logprobs", False, f"None or the number of logprob_token_ids ({count})")
        if self.prompt_logprob_token_ids is not None:
            is_alone = self.prompt_logprobs is None
            self._require("prompt_logprobs", is_alone, "None with prompt_logprob_token_ids")
        elif self.prompt_logprob_start is not None:
            self._require("prompt_logprob_start", False, "None without prompt_logprob_token_ids")
        if self.trace_decode_token_ids is not None:
            self._check_trace()
        if self.n > 1 and self.temperature == 0:
            self._require("n", False, "1 when temperature is 0, since all would be the same")

    def _check_trace(self) -> None:
        why = "with trace_decode_token_ids"
        self._require("n", self.n == 1, f"1 {why}")
        self._require("structured_outputs", self.structured_outputs is None, f"None {why}")
        self._require("stop", not self.stop, f"empty {why}")
        self._require("thinking_token_budget", self.thinking_token_budget is None, f"None {why}")

    def _check_object(self, name: str) -> None:
        kind: type = _OBJECTS[name]
        value = getattr(self, name)
        valid = isinstance(value, kind) or (value is None and name != "output_kind")
        self._require(name, valid, _NAMES_OF_KINDS.get(kind, f"a {kind.__name__}"))


_OBJECTS = {
    "output_kind": RequestOutputKind,
    "structured_outputs": StructuredOutputsParams,
    "repetition_detection": RepetitionDetectionParams,
    "prompt_logprob_token_ids": TokenTable,
}

_NAMES_OF_KINDS: dict[type, str] = {
    TokenTable: "None or rows of token ids, all of one length, with -1 for none",
}


def _distinct(given: Any) -> Any:
    """A list without the repetitions of its values; everything else is returned unchanged, for the
    range check to refuse."""
    try:
        return list(dict.fromkeys(given)) if isinstance(given, list | tuple) else given
    except TypeError:
        return given


def _bias_by_id(given: Any) -> Any:
    """Convert the string keys that JSON objects have to token ids; {} becomes None.

    Everything else is returned unchanged, for the range check to refuse.
    """
    if not isinstance(given, Mapping):
        return given
    by_id = {
        int(token) if isinstance(token, str) and token.isdecimal() else token: bias
        for token, bias in given.items()
    }
    return by_id or None
