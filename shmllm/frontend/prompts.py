"""The forms of prompts that users give, and what they mean.

This module checks the form of a prompt. It must not know tokenizers or engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from shmllm.errors import RequestError
from shmllm.frontend.given_items import GivenItems, given_items, has_items
from shmllm.frontend.items.ready import ReadyItem
from shmllm.frontend.replies.formats import ReplyFormat


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


class MultiModalPrompt(TypedDict, total=False):
    """A prompt with images, sounds or videos, as text or as token ids. The text has the model's
    mark for each item, the ids have the mark or all placeholders.

    `multi_modal_data` has one item or several by modality. "image": PIL images, uint8 arrays or
    tensors of shape (height, width, 3), or encoded bytes. "audio": (samples, rate), samples at the
    model's rate, or encoded bytes. `multi_modal_uuids` names them: a named item is not read to
    compare it with others, and None may be given in its place as long as it is kept.
    `mm_processor_kwargs` changes how they are prepared."""

    prompt: str
    prompt_token_ids: Sequence[int]
    multi_modal_data: Mapping[str, Any]
    multi_modal_uuids: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]
    cache_salt: str
    reply_format: ReplyFormat | None


class EmbedsPrompt(TypedDict, total=False):
    """A prompt as embeddings: a (tokens, hidden) torch tensor or numpy array. `prompt` is its
    text, if known, and is only copied to the output."""

    prompt_embeds: Any
    prompt: str
    cache_salt: str


class EncoderDecoderPrompt(TypedDict, total=False):
    """A prompt of a model with an encoder: `encoder_prompt` is the text that it reads, or has the
    item that it computes and no text; `decoder_prompt` is the text, or the token ids, that the
    output continues."""

    encoder_prompt: str | Sequence[int] | TextPrompt | TokensPrompt | MultiModalPrompt
    decoder_prompt: str | Sequence[int] | TextPrompt | TokensPrompt | None


DictPrompt = TextPrompt | TokensPrompt | EmbedsPrompt | MultiModalPrompt | EncoderDecoderPrompt
Prompt = str | Sequence[int] | DictPrompt


_ENCODER, _DECODER = "encoder_prompt", "decoder_prompt"
_ITEM_KEYS = {"multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"}


_PROMPT_KEYS = {
    "prompt",
    "prompt_token_ids",
    "prompt_embeds",
    "cache_salt",
    "reply_format",
} | _ITEM_KEYS


@dataclass(slots=True)
class ParsedPrompt:
    """A prompt whose form is right.

    Attributes:
        text: its text, if it has one.
        token_ids: its token ids, if they are known.
        cache_salt: see `TextPrompt`.
        embeds: see `EmbedsPrompt`.
        reply_format: see `TokensPrompt`.
        given: its items as the user gave them.
        items: the same, prepared.
        expanded: its text with what stands for the items; empty: it is `text`.
        encoder: the prompt of the encoder, if that is a text; None: the user gave none.
        encoder_token_ids: what the encoder reads.
    """

    text: str | None
    token_ids: list[int] | None
    cache_salt: str
    embeds: Any = None
    reply_format: ReplyFormat | None = None
    given: GivenItems | None = None
    items: list[ReadyItem] = field(default_factory=list)
    expanded: str = ""
    encoder: ParsedPrompt | None = None
    encoder_token_ids: list[int] = field(default_factory=list)


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


def parse_prompt(name: str, prompt: object) -> ParsedPrompt:
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, None, "")
    if isinstance(prompt, Mapping):
        return _parse_both(name, prompt) if _ENCODER in prompt else _parse_mapping(name, prompt)
    if _is_token_ids(prompt) or _is_empty_list(prompt):
        return ParsedPrompt(None, list(prompt), "")  # type: ignore[call-overload]
    raise RequestError(
        f"{name} must be a str, a list of token ids, or a dict with 'prompt' or "
        f"'prompt_token_ids', got {type(prompt).__name__}"
    )


def _parse_both(name: str, prompt: Mapping[str, Any]) -> ParsedPrompt:
    """Parse a prompt in two parts: the decoder's, with the items or the text of the encoder's."""
    unknown = prompt.keys() - {_ENCODER, _DECODER}
    if unknown:
        raise RequestError(
            f"{name} has {_ENCODER!r} and the keys {sorted(map(str, unknown))}; beside it may be "
            f"{_DECODER!r} only"
        )
    encoder, decoder = prompt[_ENCODER], prompt.get(_DECODER)
    if decoder is None or isinstance(decoder, str):
        decoder = {"prompt": decoder or ""}
    elif not isinstance(decoder, Mapping):
        decoder = {"prompt_token_ids": decoder}
    if isinstance(encoder, Mapping) and not encoder:
        raise RequestError(f"{name}: {_ENCODER!r} has neither a text nor 'multi_modal_data'")
    if not isinstance(encoder, Mapping) or not has_items(encoder):
        found = _parse_mapping(f"{name}: {_DECODER!r}", decoder)
        parse = _parse_mapping if isinstance(encoder, Mapping) else parse_prompt
        found.encoder = parse(f"{name}: {_ENCODER!r}", encoder)
        return found
    if encoder.keys() - {"prompt", *_ITEM_KEYS} or encoder.get("prompt"):
        raise RequestError(
            f"{name}: {_ENCODER!r} has 'multi_modal_data', and may have no text then"
        )
    return _parse_mapping(
        name, {**decoder, **{key: encoder[key] for key in encoder.keys() & _ITEM_KEYS}}
    )


def _parse_mapping(name: str, prompt: Mapping[str, Any]) -> ParsedPrompt:
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
    require_unicode(f"{name}: 'cache_salt'", salt or "")
    if salt and "\0" in salt:  # salts of embeddings have one, see `prompt_embeds.salt_with`
        raise RequestError(f"{name}: 'cache_salt' has a NUL character")
    given = given_items(name, prompt) if prompt.keys() & _ITEM_KEYS else None
    if embeds is not None:
        return ParsedPrompt(text, [], salt or "", embeds, given=given)
    token_ids = None if ids is None else list(ids)
    reply_format = prompt.get("reply_format")
    return ParsedPrompt(text, token_ids, salt or "", reply_format=reply_format, given=given)


def require_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} is not valid Unicode: lone surrogate at character {error.start}; remove it, "
            "or decode the source with errors='replace'"
        ) from error
