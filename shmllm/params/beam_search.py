"""BeamSearchParams: the parameters of `LLM.beam_search`, with vLLM's names and meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shmllm.errors import RequestError
from shmllm.params.ranges import RANGES, Range, is_int, is_number
from shmllm.params.structured_outputs import StructuredOutputsParams
from shmllm.params.unknown_options import of_mapping

_FLAG = Range(lambda value: isinstance(value, bool), "True or False")
_COUNT = Range(lambda value: is_int(value) and value >= 1, "a whole number of at least 1")
_RANGES = {
    "beam_width": RANGES["n"],
    "max_tokens": _COUNT,
    "ignore_eos": _FLAG,
    "temperature": RANGES["temperature"],
    "length_penalty": Range(is_number, "a number"),
    "include_stop_str_in_output": _FLAG,
    "structured_outputs": Range(
        lambda value: value is None or isinstance(value, StructuredOutputsParams),
        "None, a StructuredOutputsParams or a dict of its fields",
    ),
    "skip_special_tokens": _FLAG,
    "allowed_token_ids": RANGES["allowed_token_ids"],
}


@dataclass(slots=True)
class BeamSearchParams:
    """Parameters of a beam search.

    Args:
        beam_width: the number of sequences that each step keeps and that the search returns;
            1 to 16384. The engine's `max_logprobs` must be at least `2 * beam_width`.
        max_tokens: the largest number of tokens to generate; at least 1.
        ignore_eos: continue sequences after an end-of-sequence token.
        temperature: from 0 to 2. At 0, each sequence is extended by its `2 * beam_width` most
            likely tokens; above 0, also by one token that is sampled at this temperature.
        length_penalty: the exponent p in the score of a sequence: the sum of the
            log-probabilities of its generated tokens, divided by (number of generated tokens, an
            end-of-sequence token included) ** p. Values above 0 favour long sequences.
        include_stop_str_in_output: keep the text of the end-of-sequence token in `text`. Its
            id is always in `tokens`.
        structured_outputs: what each sequence has to match, or a dict of its fields. Scores stay
            those of all tokens: the log-probabilities of the allowed ones do not grow.
        skip_special_tokens: leave special tokens out of `text`.
        allowed_token_ids: the only tokens that may be generated; None means all.

    Raises:
        RequestError: a field is out of its range. The message contains the field, its value
            and the range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    allowed_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.structured_outputs, Mapping):
            self.structured_outputs = of_mapping(StructuredOutputsParams, self.structured_outputs)
        for name, allowed in _RANGES.items():
            value = getattr(self, name)
            if not allowed.allows(value):
                raise RequestError(f"{name} must be {allowed.description}, got {value!r}")
