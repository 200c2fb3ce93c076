"""Turns the prompts and parameters that users give into requests for the engine.

Everything is checked before anything is queued. One invalid prompt in a batch of a thousand raises
a RequestError that names it, and none of the others has been started.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, TypeVar

from shmllm.config.info import EngineInfo
from shmllm.errors import RequestError
from shmllm.frontend.prompt_embeds import PLACEHOLDER, check_params, read_embeds, salt_with
from shmllm.frontend.replies.formats import ReplyFormat, ReplyFormats
from shmllm.frontend.sampling_checks import SamplingChecks
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.frontend.text.truncation import Truncation
from shmllm.params.pooling import PoolingParams
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.params.structured_outputs import StructuredOutputsDefaults


class TextPrompt(TypedDict, total=False):
    """A prompt as text. Only requests with the same `cache_salt` share its prefix-cache blocks."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids. `prompt` is its text, if known, and is only copied to the output.
    `reply_format` says how its reply is read; chats set it."""

    prompt_token_ids: Sequence[int]
    prompt: str
    cache_salt: str
    reply_format: ReplyFormat | None


class EmbedsPrompt(TypedDict, total=False):
    """A prompt as embeddings: a (tokens, hidden) torch tensor or numpy array. `prompt` is its
    text, if known, and is only copied to the output."""

    prompt_embeds: Any
    prompt: str
    cache_salt: str


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | EmbedsPrompt
Params = SamplingParams | Sequence[SamplingParams]
AnyParams = TypeVar("AnyParams", SamplingParams, PoolingParams)
Priority = int | Sequence[int] | None
"""The argument `priority`: one number for all prompts, or one for each."""

UNNUMBERED = -1
_PROMPT_KEYS = {"prompt", "prompt_token_ids", "prompt_embeds", "cache_salt", "reply_format"}


@dataclass(slots=True)
class PreparedRequest:
    """A checked and tokenized request that has no number yet.

    Attributes:
        prompt: the text of the prompt; None if only token ids or embeddings were given.
        params: the sampling parameters that the outputs follow, `n` included.
        submitted: the request for the engine. Its `number` is not set yet.
        reply_format: how the reply is read; None if the output is text only.
    """

    prompt: str | None
    params: SamplingParams
    submitted: EngineCoreRequest
    reply_format: ReplyFormat | None = None

    @property
    def prompt_token_ids(self) -> list[int]:
        """The token ids of the prompt; placeholders if it was given as embeddings."""
        return self.submitted.prompt_token_ids  # type: ignore[return-value]

    def message(self, number: int, unseeded: int) -> EngineCoreRequest:
        """The request for the engine.

        Args:
            number: its number.
            unseeded: its seed if its parameters have none.
        """
        seed = unseeded if self.params.seed is None else self.params.seed
        return replace(self.submitted, number=number, seed=seed)

    def with_tokens(self, token_ids: list[int]) -> PreparedRequest:
        """The same request with other prompt tokens."""
        return replace(self, submitted=replace(self.submitted, prompt_token_ids=token_ids))

    def children(self) -> list[PreparedRequest]:
        """One request for each of the `n` completions.

        Only the first one asks for the prompt's log-probabilities, and each has its own seed.
        """
        children = []
        for index in range(self.params.n):
            params = copy.copy(self.params)
            params.n = 1
            if index:
                params.prompt_logprobs = None
            if params.seed is not None:
                params.seed = (params.seed + index + 2**63) % 2**64 - 2**63
            submitted = replace(self.submitted, params=params, is_sibling=index > 0)
            children.append(replace(self, params=params, submitted=submitted))
        return children


@dataclass(slots=True)
class _Parsed:
    text: str | None
    token_ids: list[int] | None
    cache_salt: str
    embeds: Any = None
    reply_format: ReplyFormat | None = None


def _is_token_ids(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and bool(value)
        and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    )


def _is_empty_list(value: object) -> bool:
    return isinstance(value, list | tuple) and not value


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several prompts as a list."""
    if isinstance(prompts, str | Mapping) or _is_token_ids(prompts):
        return [prompts]  # type: ignore[list-item]
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise RequestError(
            "prompts must be a str, a list of token ids, a dict, or a list of these, got "
            f"{type(prompts).__name__}"
        )
    return list(prompts)  # type: ignore[arg-type]


def match_params(
    params: AnyParams | Sequence[AnyParams] | None,
    num_prompts: int,
    default: AnyParams,
    argument: str = "sampling_params",
) -> list[AnyParams]:
    """Return one checked SamplingParams or PoolingParams for each prompt.

    Args:
        params: one for all prompts or one for each; None takes the default.
        num_prompts: the number of prompts.
        default: its class is the class that the others must have.
        argument: what errors call the params.

    Raises:
        RequestError: the list has another length, or an element is of another class or has a
            value that is not allowed.
    """
    expected = type(default)
    if params is None:
        params = default
    if isinstance(params, expected):
        params.check()
        return [params] * num_prompts
    if isinstance(params, str) or not isinstance(params, Sequence):
        raise RequestError(
            f"{argument} must be a {expected.__name__} or a list of them, got "
            f"{type(params).__name__}"
        )
    if len(params) != num_prompts:
        raise RequestError(
            f"{num_prompts} prompts and {len(params)} {argument}: give one {expected.__name__} "
            "for all prompts, or one for each"
        )
    for index, each in enumerate(params):
        if not isinstance(each, expected):
            raise RequestError(
                f"{argument}[{index}] is a {type(each).__name__}, not a {expected.__name__}"
            )
        each.check()
    return list(params)


class InputProcessor:
    """
    Args:
        tokenizer: turns text prompts into token ids.
        info: the limits of the engine.
        structured_outputs: the defaults of structured outputs.
        replies: how the model's replies are read; None finds it out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        info: EngineInfo,
        structured_outputs: StructuredOutputsDefaults | None = None,
        replies: ReplyFormats | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._checks = SamplingChecks(tokenizer, info, structured_outputs, replies)

    def prepare(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        names: Sequence[str] | None = None,
        min_room: int = 1,
        truncation: Truncation | None = None,
    ) -> list[PreparedRequest]:
        """Check all prompts and tokenize those that are text.

        Args:
            prompts: what `as_list` returned.
            params: one for each.
            names: what errors call each; None counts them.
            min_room: tokens that have to be left for the output.
            truncation: how prompts that are too long are cut; None refuses them. Special tokens
                that the tokenizer adds to a text remain.

        Raises:
            RequestError: names the prompt; or the truncation is not allowed.
        """
        if names is None:
            names = [f"prompt {i}" for i in range(len(prompts))]
            names = names if len(names) > 1 else ["the prompt"] * len(names)
        parsed = [_parse(name, prompt) for name, prompt in zip(names, prompts, strict=True)]
        tokenized = self._tokenize(names, parsed, min_room, truncation)
        params = [
            own if item.reply_format is None else item.reply_format.constrain(name, own)
            for name, item, own in zip(names, parsed, params, strict=True)
        ]
        # Most requests of a batch share their parameters; each are checked once.
        checked = {id(own): self._checks.check(own) for own in {id(p): p for p in params}.values()}
        requests = []
        for name, item, own, ids in zip(names, parsed, params, tokenized, strict=True):
            if item.embeds is not None:
                self._take_embeds(name, item, own)
                ids = [PLACEHOLDER] * len(item.embeds)
            self._check_token_ids(name, ids, min_room)
            bad_words, grammar, thinking, extra_args = checked[id(own)]
            submitted = EngineCoreRequest(
                UNNUMBERED,
                ids,
                own,
                item.cache_salt,
                bad_words=bad_words,
                grammar=grammar,
                thinking=thinking,
                extra_args=extra_args,
                embeds=item.embeds,
            )
            requests.append(PreparedRequest(item.text, own, submitted, item.reply_format))
        return requests

    def _take_embeds(self, name: str, item: _Parsed, params: SamplingParams) -> None:
        check_params(name, params)
        item.embeds = read_embeds(name, item.embeds, self._info.hidden_size)
        item.cache_salt = salt_with(item.embeds, item.cache_salt)

    def _tokenize(
        self,
        names: Sequence[str],
        parsed: list[_Parsed],
        min_room: int,
        truncation: Truncation | None,
    ) -> list[list[int]]:
        """The token ids of each prompt; none for embeddings."""
        texts = [p.text or "" for p in parsed if p.token_ids is None]
        if truncation is None:
            encoded = iter(self._encode(texts, names, parsed) if texts else ())
            return [next(encoded) if p.token_ids is None else p.token_ids for p in parsed]
        for name, item in zip(names, parsed, strict=True):
            if item.embeds is not None:
                raise RequestError(f"{name} consists of embeddings, which cannot be truncated")
        most = self._info.max_model_len - min_room
        cut = truncation.of_text(most)
        encoded = iter(self._encode(texts, names, parsed, **cut) if texts else ())
        return [
            next(encoded) if p.token_ids is None else truncation.of_tokens(p.token_ids, most)
            for p in parsed
        ]

    def _encode(
        self, texts: list[str], names: Sequence[str], parsed: list[_Parsed], **cut: Any
    ) -> list[list[int]]:
        try:
            return self._tokenizer.encode_batch(texts, **cut)
        except RequestError:
            for name, item in zip(names, parsed, strict=True):
                _require_unicode(name, item.text or "")
            raise

    def _check_token_ids(self, name: str, ids: list[int], min_room: int) -> None:
        if not ids:
            raise RequestError(
                f"{name} is empty: the model needs at least one token, so the decoder prompt "
                "cannot be empty"
            )
        most = self._info.max_model_len
        if len(ids) > most - min_room:
            raise RequestError(
                f"{name} has {len(ids):,} tokens; max_model_len is {most:,}, so a prompt may have "
                f"at most {most - min_room:,}: the maximum context length is {most} tokens of "
                "prompt and output together. Please reduce the length of the prompt"
                f"{'' if min_room else ', or pass truncate_prompt_tokens'}",
                parameter="input_tokens",
                value=len(ids),
            )
        vocab_size = self._info.vocab_size
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            raise RequestError(
                f"{name} has token id {wrong}; the vocabulary has ids from 0 to {vocab_size - 1}, "
                "so it is out of vocabulary",
                parameter="prompt_token_ids",
                value=wrong,
            )


def _parse(name: str, prompt: object) -> _Parsed:
    if isinstance(prompt, str):
        return _Parsed(prompt, None, "")
    if isinstance(prompt, Mapping):
        return _parse_mapping(name, prompt)
    if _is_token_ids(prompt) or _is_empty_list(prompt):
        return _Parsed(None, list(prompt), "")  # type: ignore[call-overload]
    raise RequestError(
        f"{name} must be a str, a list of token ids, or a dict with 'prompt' or "
        f"'prompt_token_ids', got {type(prompt).__name__}"
    )


def _parse_mapping(name: str, prompt: Mapping[str, Any]) -> _Parsed:
    unknown = prompt.keys() - _PROMPT_KEYS
    if unknown:
        raise RequestError(
            f"{name} has unknown keys {sorted(map(str, unknown))}; known are {sorted(_PROMPT_KEYS)}"
        )
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    embeds = prompt.get("prompt_embeds")
    if text is None and ids is None and embeds is None:
        raise RequestError(f"{name} has neither 'prompt' nor 'prompt_token_ids'")
    if embeds is not None and ids is not None:
        raise RequestError(f"{name} has both 'prompt_embeds' and 'prompt_token_ids'")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"{name}: 'prompt' must be a str, got {type(text).__name__}")
    if ids is not None and not (_is_token_ids(ids) or _is_empty_list(ids)):
        raise RequestError(f"{name}: 'prompt_token_ids' must be a list of whole numbers")
    if salt is not None and not isinstance(salt, str):
        raise RequestError(f"{name}: 'cache_salt' must be a str, got {type(salt).__name__}")
    _require_unicode(f"{name}: 'cache_salt'", salt or "")
    if embeds is not None:
        return _Parsed(text, [], salt or "", embeds)
    token_ids = None if ids is None else list(ids)
    return _Parsed(text, token_ids, salt or "", reply_format=prompt.get("reply_format"))


def _require_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} is not valid Unicode: lone surrogate at character {error.start}; remove it, "
            "or decode the source with errors='replace'"
        ) from error
