"""SamplingChecks: checks sampling parameters against the limits of one engine and its tokenizer.

This module also converts bad words to token ids and structured outputs to grammars.
`SamplingParams` checks itself what does not depend on the engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from shmllm.config.info import EngineInfo
from shmllm.errors import RequestError
from shmllm.formats.tokenizer_files import FAST_FILE
from shmllm.frontend.constraints.structured_outputs import grammar_of
from shmllm.frontend.replies.formats import ReplyFormats
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.params.ranges import MOST_EXTRA_CHARACTERS
from shmllm.params.sampling import SamplingParams, TokenSequences
from shmllm.params.structured_outputs import StructuredOutputsDefaults, StructuredOutputsParams
from shmllm.params.thinking import ThinkingBudget

WHOLE_VOCABULARY = -1


class EncodedConstraints(NamedTuple):
    """The constraints of the sampling parameters in the form that the engine uses.

    Attributes:
        bad_words: token sequences that the output must not contain.
        grammar: the grammar that the output must match, as text; empty without one.
        thinking: the limit of the reasoning; None without one.
        extra_args: the arguments of custom logits processors as JSON; empty if there are none.
    """

    bad_words: TokenSequences = ()
    grammar: str = ""
    thinking: ThinkingBudget | None = None
    extra_args: str = ""


class SamplingChecks:
    """Checks the sampling parameters of requests for one engine.

    Args:
        tokenizer: the tokenizer of the model.
        info: the engine's info, with its vocabulary size and `max_logprobs`.
        structured_outputs: the defaults of structured outputs; None means that there are none.
        replies: how the model's replies are read; None finds it out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        info: EngineInfo,
        structured_outputs: StructuredOutputsDefaults | None = None,
        replies: ReplyFormats | None = None,
    ) -> None:
        self._replies = replies or ReplyFormats(tokenizer)
        self._structured_outputs = structured_outputs or StructuredOutputsDefaults()
        self._tokenizer = tokenizer
        self._vocab_size, self._num_outputs = info.vocab_size, info.num_outputs
        self._max_logprobs = info.max_logprobs
        self._has_processors = bool(info.logits_processors)
        self._returns_masks = info.sampling_masks

    def check(self, params: SamplingParams) -> EncodedConstraints:
        """Check the parameters and encode their constraints.

        Raises:
            RequestError: a field exceeds the limits of the engine. The message contains the
                field, its value and the limit.
        """
        self._require_known("stop_token_ids", params.stop_token_ids)
        self._require_known("allowed_token_ids", params.allowed_token_ids or ())
        self._require_written(params.allowed_token_ids)
        self._require_known("logit_bias", params.logit_bias or ())
        self._require_known("logprob_token_ids", params.logprob_token_ids or ())
        self._require_known("trace_decode_token_ids", params.trace_decode_token_ids or ())
        if params.logprob_token_ids is None:
            self._require_few("logprobs", params.logprobs)
        self._require_few("prompt_logprobs", params.prompt_logprobs)
        table = params.prompt_logprob_token_ids
        if table is not None:
            self._require_known("prompt_logprob_token_ids", table.ids)
            self._require_few("prompt_logprob_token_ids", table.width, " in each row")
        self._require_bounded(params)
        if params.stop or params.structured_outputs:
            self._tokenizer.check_exists()
        return EncodedConstraints(
            self._bad_words(params.bad_words) if params.bad_words else (),
            self._grammar(params.structured_outputs) if params.structured_outputs else "",
            self._thinking(params.thinking_token_budget),
            _as_json(params.extra_args) if params.extra_args and self._has_processors else "",
        )

    def _thinking(self, limit: int | None) -> ThinkingBudget | None:
        if limit is None:
            return None
        self._tokenizer.check_exists()
        budget = self._replies.thinking(limit)
        self._require_known("the tokens of thinking_token_budget", budget.begin + budget.end)
        return budget

    def _require_known(self, name: str, token_ids: Iterable[int]) -> None:
        highest = max(token_ids, default=0)
        if highest >= self._vocab_size:
            raise RequestError(
                f"{name} has {highest}; the vocabulary has ids from 0 to {self._vocab_size - 1}, "
                "so it is out of vocabulary",
                parameter=name,
                value=highest,
            )

    def _require_written(self, allowed: Sequence[int] | None) -> None:
        if not allowed or self._num_outputs is None or min(allowed) < self._num_outputs:
            return
        raise RequestError(
            f"allowed_token_ids has no id below {self._num_outputs}; the model has no logits for "
            "others, so it could write none of these",
            parameter="allowed_token_ids",
            value=min(allowed),
        )

    def _require_few(self, name: str, count: int | None, where: str = "") -> None:
        if count is None:
            return
        wanted = self._vocab_size if count == WHOLE_VOCABULARY else count
        if wanted > self._max_logprobs:
            raise RequestError(
                f"{name}={count}{where} asks for {wanted:,} tokens at each position; the engine's "
                f"max_logprobs is {self._max_logprobs:,}: start it with a larger one, or with -1",
                parameter=name,
                value=count,
            )

    def _require_bounded(self, params: SamplingParams) -> None:
        if self._returns_masks and not params.is_greedy and params.top_k <= 0:
            raise RequestError(
                "the engine has return_sampling_mask, so a request needs a top_k above 0, which "
                "bounds the tokens of its masks",
                parameter="top_k",
                value=params.top_k,
            )

    def _bad_words(self, words: Iterable[str]) -> TokenSequences:
        """The token sequences of the words.

        A word has different tokens at the beginning of a text and after a space. As in vLLM,
        the second sequence is added only if it has as many tokens as the first one and begins
        with a different token.
        """
        sequences: list[tuple[int, ...]] = []
        for word in words:
            bare = self._encode(word.lstrip())
            if not bare:
                raise RequestError(f"bad_words has {word!r}, which has no tokens")
            behind_blank = self._encode(" " + word.lstrip())
            sequences.append(bare)
            if len(behind_blank) == len(bare) and behind_blank[0] != bare[0]:
                sequences.append(behind_blank)
        return tuple(dict.fromkeys(sequences))

    def _grammar(self, params: StructuredOutputsParams) -> str:
        self._tokenizer.check_exists()
        if not self._tokenizer.is_fast:
            raise RequestError(
                f"structured_outputs need a {FAST_FILE}, or a tokenizer that can be converted to "
                "one; this model has neither"
            )
        tokens, plain = self._tokenizer.added_tokens, self._tokenizer.plain_added_ids
        return grammar_of(self._structured_outputs.complete(params), tokens, plain)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def _list_of_set(value: object) -> list[Any]:
    """What stands for a value that JSON has not; vLLM's programs pass sets of token ids."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"it has a {type(value).__name__}")


def _as_json(arguments: Mapping[str, Any]) -> str:
    """The extra arguments as JSON, sets as lists.

    Raises:
        RequestError: JSON cannot hold a value, or the text is too long.
    """
    try:
        text = json.dumps(dict(arguments), default=_list_of_set)
    except (TypeError, ValueError, RecursionError) as problem:
        raise RequestError(
            f"extra_args cannot be sent to the engine as JSON: {problem}", parameter="extra_args"
        ) from problem
    if len(text) > MOST_EXTRA_CHARACTERS:
        raise RequestError(
            f"extra_args have {len(text):,} characters as JSON; at most "
            f"{MOST_EXTRA_CHARACTERS:,} are sent to the engine",
            parameter="extra_args",
        )
    return text
