"""`tokenization_kwargs`: tokenizes and cuts prompts before an LLM gets them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shmllm.errors import RequestError
from shmllm.frontend.front_end import FrontEnd
from shmllm.frontend.given_items import has_items
from shmllm.frontend.prompts import as_list
from shmllm.frontend.text.truncation import AS_MANY_AS_FIT, Side, Truncation
from shmllm.params.unknown_options import reject_unknown_options


@dataclass(frozen=True)
class TokenizationKwargs:
    """The known keys of `tokenization_kwargs`.

    Attributes:
        truncate_prompt_tokens: how many tokens of a prompt remain; -1 means as many as fit, None
            all of them.
        truncation_side: the side that is cut.
        add_special_tokens: whether text gets the tokenizer's special tokens.
    """

    truncate_prompt_tokens: int | None = None
    truncation_side: Side = "left"
    add_special_tokens: bool = True

    def truncation(self) -> Truncation | None:
        """How prompts are cut; None if they are not.

        Raises:
            RequestError: the side is no side.
        """
        kept = self.truncate_prompt_tokens
        truncation = Truncation(AS_MANY_AS_FIT if kept is None else kept, self.truncation_side)
        return None if kept is None else truncation


def tokenize(
    front_end: FrontEnd, prompts: Any, given: Mapping[str, Any] | None, *, min_room: int
) -> Any:
    """Prompts as token ids, according to `tokenization_kwargs`; unchanged without them.

    Args:
        front_end: has the tokenizer and the engine's limits.
        prompts: one prompt or several, as for `LLM.generate`.
        given: the `tokenization_kwargs`.
        min_room: tokens that have to be left for the output; without any, the end of a prompt is
            cut by default, else its beginning.

    Raises:
        RequestError: a value is not allowed, or a prompt consists of embeddings, or has
            items and is to be cut.
        TypeError: an unknown key; names the nearest known one.
    """
    if not given:
        return prompts
    wanted = _read(given, "left" if min_room else "right")
    most = front_end.info.max_model_len - min_room
    return [_tokenize_one(front_end, prompt, wanted, most) for prompt in as_list(prompts)]


def tokenize_chat(front_end: FrontEnd, prompts: Any, given: Mapping[str, Any] | None) -> Any:
    """Prompts of conversations, cut according to `tokenization_kwargs`; unchanged without them.

    Args:
        front_end, prompts, given: as for `tokenize`.

    Raises:
        RequestError, TypeError: as `tokenize`; the former also for further special tokens.
    """
    if given and given.get("add_special_tokens"):
        raise RequestError(
            "a chat template writes the special tokens: leave add_special_tokens out"
        )
    return tokenize(front_end, prompts, given, min_room=1)


def tokenize_for_pooling(
    front_end: FrontEnd, prompts: Any, given: Mapping[str, Any] | None
) -> tuple[Any, dict[str, Any]]:
    """Prompts for `LLM.encode`, and those of its options that `tokenization_kwargs` stand for.

    Args:
        front_end, prompts, given: as for `tokenize`.

    Raises:
        RequestError, TypeError: as `tokenize`.
    """
    given = _without_padding(given or {}, front_end.info.pooling.text_length)
    wanted = _read(given, "right")
    if not wanted.add_special_tokens:
        return tokenize(front_end, prompts, given, min_room=0), {}
    return prompts, _truncation_options(wanted)


def _without_padding(given: Mapping[str, Any], length: int) -> Mapping[str, Any]:
    """The `tokenization_kwargs` without those that ask for the padding that texts have anyway.

    Args:
        given: the `tokenization_kwargs`.
        length: to how many tokens the model's texts are filled; 0: they are not.
    """
    is_usual = given.get("padding") == "max_length" and given.get("max_length", length) == length
    if not length or not is_usual:
        return given
    return {name: each for name, each in given.items() if name not in ("padding", "max_length")}


def of_pairs(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options of `LLM.score` that `tokenization_kwargs` stand for.

    Raises:
        RequestError: a value is not allowed.
        TypeError: an unknown key; names the nearest known one.
    """
    wanted = _read(given or {}, "right")
    if not wanted.add_special_tokens:
        raise RequestError("score always adds the special tokens that separate texts")
    return _truncation_options(wanted)


def _read(given: Mapping[str, Any], side: Side) -> TokenizationKwargs:
    reject_unknown_options("tokenization_kwargs", given, TokenizationKwargs.__dataclass_fields__)
    values = {name: value for name, value in given.items() if value is not None}
    return TokenizationKwargs(**{"truncation_side": side} | values)


def _truncation_options(wanted: TokenizationKwargs) -> dict[str, Any]:
    if wanted.truncate_prompt_tokens is None:
        return {}
    return {
        "truncate_prompt_tokens": wanted.truncate_prompt_tokens,
        "truncation_side": wanted.truncation_side,
    }


def _tokenize_one(front_end: FrontEnd, prompt: Any, wanted: TokenizationKwargs, most: int) -> Any:
    fields = dict(prompt) if isinstance(prompt, Mapping) else {}
    if fields.get("prompt_embeds") is not None:
        raise RequestError("tokenization_kwargs are for text and token ids, not for prompt_embeds")
    if "encoder_prompt" in fields:
        raise RequestError("tokenization_kwargs are for prompts in one part, not encoder_prompt")
    if wanted.truncate_prompt_tokens is not None and has_items(fields):
        raise RequestError("a prompt with images or other items cannot be truncated")
    text = fields.get("prompt") if fields else prompt
    ids = fields.get("prompt_token_ids") if fields else None
    if not isinstance(text, str):
        ids = prompt if not fields else ids
    elif ids is None:
        ids = _encode(front_end, text, wanted, most)
    if not isinstance(ids, list | tuple):
        return prompt  # no valid prompt; the LLM says what is wrong with it
    truncation = wanted.truncation()
    cut = list(ids) if truncation is None else truncation.of_tokens(list(ids), most)
    fields |= {"prompt_token_ids": cut}
    return fields | ({"prompt": text} if isinstance(text, str) else {})


def _encode(front_end: FrontEnd, text: str, wanted: TokenizationKwargs, most: int) -> list[int]:
    truncation = wanted.truncation()
    cut = {} if truncation is None else truncation.of_text(most)
    add = wanted.add_special_tokens
    return front_end.tokenizer.encode_batch([text], add_special_tokens=add, **cut)[0]
