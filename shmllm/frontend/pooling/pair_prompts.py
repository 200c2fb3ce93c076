"""The prompts of cross-encoders, which read a query and a document together.

A tokenizer's template for pairs joins them. Models that are asked in words, such as rerankers made
of chat models, get them one behind the other, or as a chat template puts them. Models that see
images have a template of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shmllm.config.pooling import PoolingInfo
from shmllm.errors import RequestError
from shmllm.frontend.given_items import DATA, GivenItem, given_items
from shmllm.frontend.prompts import Prompt
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.frontend.text.truncation import Truncation
from shmllm.params.items import Modality

_LIMITS = ("max_tokens_per_query", "max_tokens_per_doc")
_TEMPLATE_KWARGS = "chat_template_kwargs"
_RESERVED = {"chat_template", "tools", "tokenize"}


@dataclass(frozen=True, slots=True)
class PairOptions:
    """How pairs of texts become prompts.

    Attributes:
        truncation: how pairs that are too long are cut; None leaves them.
        chat_template: a template, or the name of one, that gets a message of the role "query" and
            one of the role "document"; None takes none.
        max_tokens_per_query, max_tokens_per_doc: how many tokens of each text remain; 0 keeps all.
        template_kwargs: further variables of the template.
    """

    truncation: Truncation | None = None
    chat_template: str | None = None
    max_tokens_per_query: int = 0
    max_tokens_per_doc: int = 0
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        truncation: Truncation | None,
        chat_template: str | None,
        extra: Mapping[str, Any] | None,
        max_model_len: int,
    ) -> PairOptions:
        """The options of a call.

        Args:
            truncation, chat_template: see above.
            extra: the `extra_kwargs` of its parameters.
            max_model_len: the engine's.

        Raises:
            RequestError: `extra` has an unknown key, or a value that is not allowed.
        """
        extra = extra or {}
        known = (*_LIMITS, _TEMPLATE_KWARGS)
        if unknown := [name for name in extra if name not in known]:
            raise RequestError(f"extra_kwargs has {unknown[0]!r}; score takes {', '.join(known)}")
        query, document = (_limit(name, extra.get(name, 0), max_model_len) for name in _LIMITS)
        variables = extra.get(_TEMPLATE_KWARGS) or {}
        if reserved := _RESERVED & variables.keys():
            raise RequestError(
                "chat_template_kwargs contains reserved keys that conflict with fixed scorer "
                f"arguments: {reserved}"
            )
        return cls(truncation, chat_template, query, document, variables)


def _limit(name: str, value: Any, max_model_len: int) -> int:
    if type(value) is not int or value < 0:
        raise RequestError(f"{name} must be a non-negative integer, got {value!r}")
    if value >= max_model_len:
        raise RequestError(f"{name} ({value}) must be less than max_model_len ({max_model_len}).")
    return value


@dataclass(frozen=True, slots=True)
class PairPrompt:
    """The prompt of a pair.

    Attributes:
        prompt: its tokens, or its text.
        second_segment: where the tokens of the document begin, if they have another type; else 0.
    """

    prompt: Prompt
    second_segment: int = 0


def cut_texts(tokenizer: Tokenizer, data: Sequence[Prompt], most: int) -> list[Prompt]:
    """Cut texts that have more than `most` tokens, special tokens not counted, behind the last of
    these; 0 cuts nothing. Prompts that are not text stay as they are."""
    if not most:
        return [*data]
    return [_cut(tokenizer, each, most) if isinstance(each, str) else each for each in data]


def _cut(tokenizer: Tokenizer, text: str, most: int) -> str:
    """A shorter text may have more tokens than were left of it, so this may take several turns."""
    while text:
        offsets = [each for each in tokenizer.encode_offsets(text)[1] if each != (0, 0)]
        if len(offsets) <= most:
            break
        end = min(offsets[most - 1][1], offsets[most][0])
        text = text[: min(end, len(text) - 1)]
    return text


def make_pairs(
    tokenizer: Tokenizer,
    info: PoolingInfo,
    queries: Sequence[Prompt],
    documents: Sequence[Prompt],
    options: PairOptions,
    max_model_len: int,
    mark_of: Callable[[Modality], str] | None = None,
) -> list[PairPrompt]:
    """Make the prompts of pairs.

    Args:
        tokenizer: the model's.
        info: what the model computes of prompts.
        queries: a text for each document.
        documents: the texts.
        options: how they become prompts.
        max_model_len: the engine's.
        mark_of: returns what stands for an item in a text; None: no model with a template of its
            own is asked.

    Raises:
        RequestError: something is no text, or cannot be made a prompt.
    """
    if info.pair_template and options.chat_template is None:
        assert mark_of is not None, "the model may see items"
        most = None if options.truncation is None else options.truncation.max_length(max_model_len)
        return [
            PairPrompt(_of_template(tokenizer, info, pair, index, mark_of, options, most))
            for index, pair in enumerate(zip(queries, documents, strict=True))
        ]
    pairs = [
        (_text(f"query {index}", query), _text(f"document {index}", document))
        for index, (query, document) in enumerate(zip(queries, documents, strict=True))
    ]
    if options.chat_template is not None:
        return [PairPrompt(_render(tokenizer, *pair, options)) for pair in pairs]
    if not info.separates_pairs:
        return [PairPrompt(first + second) for first, second in pairs]
    cut = options.truncation
    encoded = tokenizer.encode_pairs(pairs, **({} if cut is None else cut.of_text(max_model_len)))
    return [
        PairPrompt({"prompt_token_ids": each.ids}, each.second_segment * info.token_types)
        for each in encoded
    ]


def _of_template(
    tokenizer: Tokenizer,
    info: PoolingInfo,
    pair: tuple[Prompt, Prompt],
    index: int,
    mark_of: Callable[[Modality], str],
    options: PairOptions,
    most: int | None,
) -> Prompt:
    """The prompt of a pair by the model's own template, with the items of both.

    Args:
        most: how many tokens remain, with those behind the template; None: all.
    """
    texts, given = {}, {}
    for name, each in zip(("query", "document"), pair, strict=True):
        texts[name], given[name] = _with_marks(f"{name} {index}", each, mark_of)
    ids = tokenizer.encode(info.pair_template.format(**texts))
    if most is not None and options.truncation is not None:
        room = most - len(info.pair_end)
        is_left = options.truncation.truncation_side == "left"
        ids = (ids[-room:] if is_left else ids[:room]) if room > 0 else []
    found: Any = {"prompt_token_ids": [*ids, *info.pair_end]}
    items: dict[Modality, list[Any]] = {}
    for name in sorted(given, key=lambda each: info.pair_template.index(f"{{{each}}}")):
        for item in given[name]:
            items.setdefault(item.modality, []).append(item.value)
    return found | ({DATA: items} if items else {})  # type: ignore[no-any-return]


def _with_marks(
    name: str, data: Any, mark_of: Callable[[Modality], str]
) -> tuple[str, Sequence[GivenItem]]:
    """The text of a prompt, with marks in front if it has none, and its items."""
    if not isinstance(data, Mapping) or data.keys() <= {"prompt"}:
        return _text(name, data), ()
    text, given = data.get("prompt") or "", given_items(name, data)
    if data.keys() - {"prompt", DATA} or not isinstance(text, str) or given is None:
        raise RequestError(f"{name} must be a text, or have 'prompt' and {DATA!r}; got {data!r}")
    marks = [mark_of(item.modality) for item in given.items]
    return (text if marks[0] in text else "".join(marks) + text), given.items


def _render(tokenizer: Tokenizer, query: str, document: str, options: PairOptions) -> str:
    messages = [
        {"role": "query", "content": query},
        {"role": "document", "content": document},
    ]
    return tokenizer.apply_chat_template(
        messages,
        chat_template=options.chat_template,
        add_generation_prompt=False,
        **options.template_kwargs,
    )


def _text(name: str, data: Any) -> str:
    text = data.get("prompt") if isinstance(data, Mapping) and len(data) == 1 else data
    if isinstance(text, str):
        return text
    raise RequestError(
        f"{name} must be a text: this model reads a query and a document together, and the "
        f"tokenizer joins them; got {data!r}"
    )
