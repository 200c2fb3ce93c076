"""What beam search is asked for and what it returns. Names and meaning are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field

from shmllm.errors import RequestError
from shmllm.outputs.logprobs import Logprob
from shmllm.params.ranges import RANGES, Range, is_int, is_number

_FLAG = Range(lambda value: isinstance(value, bool), "True or False")
_COUNT = Range(lambda value: is_int(value) and value >= 1, "a whole number of at least 1")
_RANGES = {
    "beam_width": _COUNT,
    "max_tokens": _COUNT,
    "ignore_eos": _FLAG,
    "temperature": RANGES["temperature"],
    "length_penalty": Range(is_number, "a number"),
    "include_stop_str_in_output": _FLAG,
    "skip_special_tokens": _FLAG,
}


@dataclass(slots=True)
class BeamSearchParams:
    """Parameters of a beam search.

    Args:
        beam_width: sequences that are kept at each step, and returned.
        max_tokens: the most tokens to generate.
        ignore_eos: treat end tokens like others.
        temperature: 0 takes the `2 * beam_width` most likely successors of each sequence into
            account; above 0, one more, drawn at that temperature.
        length_penalty: a sequence's score is the sum of its log-probabilities divided by its
            length, prompt included, to this power. So above 0 favours long ones.
        include_stop_str_in_output: leave the end token at the end of the text. It is always
            the last of `tokens`.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        RequestError: names the field, the value and the range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            value = getattr(self, name)
            if not allowed.allows(value):
                raise RequestError(f"{name} must be {allowed.words}, got {value!r}")


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence.

    Attributes:
        tokens: of prompt and continuation.
        logprobs: for each generated token, the alternatives that were looked at.
        cum_logprob: of the generated tokens.
        text: of prompt and continuation; set when the search is over.
        finish_reason: "stop" at an end token, "length", "abort" or "error".
        stop_reason: None; for code that reads it.
        lora_request: None, likewise.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list, repr=False)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: None = None
    lora_request: None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best sequences of a prompt, best first; as many as `beam_width` if there are."""

    sequences: list[BeamSearchSequence]
