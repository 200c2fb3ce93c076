"""Turns the prompts and parameters that users give into requests for the engine.

Everything is checked before anything is queued. One invalid prompt in a batch of a thousand raises
a RequestError that names it, and none of the others has been started.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from shmllm.config.info import EngineInfo
from shmllm.errors import RequestError
from shmllm.frontend.encoder_texts import EncoderTexts, ids_of_decoder
from shmllm.frontend.prompt_embeds import PLACEHOLDER, check_params, read_embeds, salt_with
from shmllm.frontend.prompt_items import PromptItems
from shmllm.frontend.prompts import ParsedPrompt, Prompt, parse_prompt, require_unicode
from shmllm.frontend.replies.formats import ReplyFormat, ReplyFormats
from shmllm.frontend.sampling_checks import SamplingChecks
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.frontend.text.truncation import Truncation
from shmllm.frontend.token_checks import check_starts, check_token_ids
from shmllm.params.items import Item
from shmllm.params.pooling import PoolingParams
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.params.structured_outputs import StructuredOutputsDefaults

Params = SamplingParams | Sequence[SamplingParams]
AnyParams = TypeVar("AnyParams", SamplingParams, PoolingParams)
Priority = int | Sequence[int] | None
"""The argument `priority`: one number for all prompts, or one for each."""

UNNUMBERED = -1


@dataclass(slots=True)
class PreparedRequest:
    """A checked and tokenized request that has no number yet.

    Attributes:
        prompt: the text of the prompt; None if only token ids or embeddings were given.
        params: the sampling parameters that the outputs follow, `n` included.
        submitted: the request for the engine. Its `number` is not set yet.
        reply_format: how the reply is read; None if the output is text only.
        encoder_prompt: the text that the encoder reads; None if there is none.
    """

    prompt: str | None
    params: SamplingParams
    submitted: EngineCoreRequest
    reply_format: ReplyFormat | None = None
    encoder_prompt: str | None = None

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

    def continued(self, token_ids: list[int], params: SamplingParams) -> PreparedRequest:
        """The same request with tokens behind its prompt, and with parameters that are checked and
        have no constraints to encode."""
        submitted = replace(self.submitted, prompt_token_ids=token_ids, params=params, grammar="")
        return replace(self, params=params, submitted=submitted)

    def children(self) -> list[PreparedRequest]:
        """One request for each of the `n` completions.

        Only the first one asks for the prompt's log-probabilities, and each has its own seed.
        """
        children = []
        for index in range(self.params.n):
            params = copy.copy(self.params)
            params.n = 1
            if index:
                params.prompt_logprobs = params.prompt_logprob_token_ids = None
                params.prompt_logprob_start = None
            if params.seed is not None:
                params.seed = (params.seed + index + 2**63) % 2**64 - 2**63
            submitted = replace(self.submitted, params=params, is_sibling=index > 0)
            children.append(replace(self, params=params, submitted=submitted))
        return children


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
        items: prepares items; None: as the model's files say.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        info: EngineInfo,
        structured_outputs: StructuredOutputsDefaults | None = None,
        replies: ReplyFormats | None = None,
        items: PromptItems | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._items = items or PromptItems(info)
        self._encoder_texts = EncoderTexts(tokenizer, info) if info.items.has_encoder_text else None
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
        parsed = [parse_prompt(name, prompt) for name, prompt in zip(names, prompts, strict=True)]
        if self._encoder_texts is not None:
            self._encoder_texts.divide(names, parsed, truncation)
            truncation = None
        for name, item in zip(names, parsed, strict=True):
            if item.encoder is not None and self._encoder_texts is None:
                raise RequestError(
                    f"{name} has a text for an encoder, and the model has none that reads text"
                )
            self._items.check_given(name, item.given)
            if item.given is not None:
                self._prepare_items(name, item, truncation)
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
            items: tuple[Item, ...] = ()
            if item.items:
                ids = self._expanded_ids(name, item, ids)
                items = self._items.items(name, ids, item.items)
            check_token_ids(name, ids, self._info, min_room)
            check_starts(name, ids, own)
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
                items=items,
                encoder_token_ids=item.encoder_token_ids,
            )
            encoder = None if item.encoder is None else item.encoder.text
            requests.append(PreparedRequest(item.text, own, submitted, item.reply_format, encoder))
        return requests

    def _prepare_items(self, name: str, item: ParsedPrompt, truncation: Truncation | None) -> None:
        """Prepare the items of a prompt, and write their placeholders into its text."""
        if truncation is not None:
            raise RequestError(f"{name} has images or other items, so it cannot be truncated")
        if item.embeds is not None:
            raise RequestError(f"{name} has both 'prompt_embeds' and 'multi_modal_data'")
        assert item.given is not None, "the prompt has items"
        item.items = self._items.ready(name, item.given)
        if self._info.items.decoder_prompt:
            require_unicode(name, item.text or "")
            item.token_ids = ids_of_decoder(item, self._info.items.decoder_prompt, self._tokenizer)
        if (alone := self._items.alone(name, item.items)) is not None:
            if item.text or not self._tokenizer.special_ids.issuperset(item.token_ids or ()):
                raise RequestError(
                    f"{name} has an image and a text, and the model makes a vector of either: "
                    "leave the text of the prompt empty"
                )
            item.token_ids = alone
        if item.token_ids is None:
            text = item.text or ""
            complete = self._items.complete(text, item.items)
            expanded = self._items.expand_text(name, complete or text, item.items)
            if complete is None:
                item.expanded = expanded
            else:
                item.token_ids = self._tokenizer.encode(expanded, add_special_tokens=False)

    def _expanded_ids(self, name: str, item: ParsedPrompt, ids: list[int]) -> list[int]:
        if item.token_ids is None:
            return ids
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        return self._items.expand_ids(name, ids, item.items, encode)

    def _take_embeds(self, name: str, item: ParsedPrompt, params: SamplingParams) -> None:
        check_params(name, params)
        item.embeds = read_embeds(name, item.embeds, self._info.embeds_width)
        item.cache_salt = salt_with(item.embeds, item.cache_salt)

    def _tokenize(
        self,
        names: Sequence[str],
        parsed: list[ParsedPrompt],
        min_room: int,
        truncation: Truncation | None,
    ) -> list[list[int]]:
        """The token ids of each prompt; none for embeddings."""
        texts = [p.expanded or p.text or "" for p in parsed if p.token_ids is None]
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
        self, texts: list[str], names: Sequence[str], parsed: list[ParsedPrompt], **cut: Any
    ) -> list[list[int]]:
        if self._items.num_encoded:  # special tokens say what becomes of the item, and end no text
            cut["add_special_tokens"] = False
        length, padding = self._info.pooling.text_length, self._info.pooling.padding_token
        try:
            encoded = self._tokenizer.encode_batch(texts, **cut)
            return [self._tokenizer.filled(ids, length, padding) for ids in encoded]
        except RequestError:
            for name, item in zip(names, parsed, strict=True):
                require_unicode(name, item.text or "")
            raise
