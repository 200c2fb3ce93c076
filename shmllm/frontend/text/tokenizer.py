"""Tokenizer: converts text to token ids and back, for one model.

This module owns the checks on the text of users, and the tables of the bytes of each token that
the detokenizer reads. `tokenizer_backend` chooses the library that tokenizes. `chat_template`
renders conversations; this module imports it at the first chat.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shmllm.errors import RequestError
from shmllm.formats.byte_level import BYTE_ALPHABET
from shmllm.formats.tokenizer_files import pads_left
from shmllm.frontend.text.chat_messages import Marks
from shmllm.frontend.text.tokenizer_backend import (
    FastBackend,
    NoBackend,
    TokenizerBackend,
    load_backend,
)
from shmllm.frontend.text.truncation import Side

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class ByteTable(dict[int, bytes]):
    """A dict from token ids to the bytes of the token, filled at the first use of each id.

    Unknown ids and skipped ids have no bytes.
    """

    def __init__(self, backend: TokenizerBackend, skipped_ids: frozenset[int]) -> None:
        super().__init__()
        self._backend = backend
        self._skipped_ids = skipped_ids

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped_ids else self._backend.id_to_token(token_id)
        content = self[token_id] = _bytes_of(token or "")
        return content


def _bytes_of(token: str) -> bytes:
    try:
        return bytes([BYTE_ALPHABET[character] for character in token])
    except KeyError:
        # An added token is stored as plain text. The decoder outputs it unchanged if one of its
        # characters is outside the alphabet.
        return token.encode()


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """The tokens of two texts that a model reads together.

    Attributes:
        ids: the token ids, with the special tokens of the tokenizer's template for pairs.
        second_segment: the index of the first token of token type 1, which all tokens behind it
            have, too; 0 if all have type 0, or if transformers gives the model no types.
    """

    ids: list[int]
    second_segment: int


class Tokenizer:
    """The tokenizer of a model.

    Args:
        backend: the tokenizing library.
        special_tokens: the texts of special tokens by name ("bos_token", "eos_token", ...).
        directory: the model directory, with the chat templates; None without one.
        chat_template: the source of the default chat template, in place of the model's.

    Attributes:
        special_tokens: the same; chat templates may use them as variables.
    """

    def __init__(
        self,
        backend: TokenizerBackend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        directory: Path | None = None,
        chat_template: str | None = None,
    ) -> None:
        self._backend = backend
        self._directory = directory
        self._default_template = chat_template
        self._chat_templates: dict[str, str] | None = None
        self._byte_tables: tuple[ByteTable, ByteTable] | None = None
        if backend.byte_level:
            self._byte_tables = (
                ByteTable(backend, frozenset()),
                ByteTable(backend, backend.special_ids),
            )
        self.special_tokens = dict(special_tokens or {})

    @property
    def is_fast(self) -> bool:
        """Whether it has, or can be converted to, a tokenizer.json, which grammars need."""
        return isinstance(self._backend, FastBackend)

    @classmethod
    def from_directory(cls, path: Path, chat_template: str | None = None) -> Tokenizer:
        """Load the tokenizer of a model directory.

        Args:
            path: the directory.
            chat_template: as for the constructor.

        Raises:
            EngineStartError: the directory has no tokenizer files, or they cannot be read.
        """
        backend, special_tokens = load_backend(path)
        return cls(
            backend, special_tokens=special_tokens, directory=path, chat_template=chat_template
        )

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """The ids of the tokens that are never split, such as "<think>", by their texts."""
        return self._backend.added_tokens

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of the special tokens."""
        return self._backend.special_ids

    @property
    def plain_added_ids(self) -> list[int]:
        """The ids of those of them that are no special tokens."""
        special = self._backend.special_ids
        return [each for each in self._backend.added_tokens.values() if each not in special]

    def keep_whole(self, markers: Sequence[str]) -> None:
        """Encode each of these texts as one token from now on, or else its first word, if the
        vocabulary has it."""
        self._backend.keep_whole(markers)

    def check_exists(self) -> None:
        """Raise RequestError if `skip_tokenizer_init` left the tokenizer out."""
        if isinstance(self._backend, NoBackend):
            self._backend.encode("", False)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text, without truncation or padding.

        Raises:
            RequestError: `text` is not a str, or cannot be encoded as UTF-8.
        """
        try:
            return self._backend.encode(text, add_special_tokens)
        except (TypeError, UnicodeError) as error:
            raise _text_error(text, "text", error) from error

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        max_length: int | None = None,
        side: Side = "right",
    ) -> list[list[int]]:
        """The token ids of several texts, computed on all cores if the library supports it.

        Args:
            texts: the texts.
            add_special_tokens: whether each gets the special tokens of the tokenizer's template.
            max_length: the number of tokens, special ones included, to which longer texts are
                cut; the special tokens remain. None cuts nothing.
            side: the side that is cut.

        Raises:
            RequestError: a text is not a str, or cannot be encoded as UTF-8; the message contains
                its position. Or there are more special tokens than may remain.
        """
        if max_length is not None:
            self._check_room(max_length, add_special_tokens, is_pair=False)
        try:
            return self._backend.encode_batch(texts, add_special_tokens, max_length, side)
        except (TypeError, UnicodeError) as error:
            _blame_text({f"text {index}": text for index, text in enumerate(texts)}, error)
            raise

    def filled(self, ids: list[int], length: int, default: int) -> list[int]:
        """The token ids of a text with as much padding as transformers' processor writes.

        Args:
            ids: the token ids.
            length: how many there are at least.
            default: the padding token of a tokenizer that does not name one.
        """
        named = self.special_tokens.get("pad_token")
        found = None if named is None else self._backend.token_to_id(named)
        padding = [default if found is None else found] * (length - len(ids))
        return padding + ids if self._pads_left else ids + padding

    @cached_property
    def _pads_left(self) -> bool:
        return self._directory is not None and pads_left(self._directory)

    def encode_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        max_length: int | None = None,
        side: Side = "right",
    ) -> list[EncodedPair]:
        """The tokens of pairs of texts, with the special tokens and the token types of the
        tokenizer's template for pairs.

        Args:
            pairs: the pairs.
            max_length: the number of tokens, special ones included, to which longer pairs are cut;
                the special tokens remain. The longer text is cut first, until both are equally
                long ("longest_first" of transformers). None cuts nothing.
            side: the side of each text that is cut.

        Raises:
            RequestError: as for `encode_batch`.
        """
        if max_length is not None:
            self._check_room(max_length, add_special_tokens=True, is_pair=True)
        try:
            encoded = self._backend.encode_pairs(pairs, max_length, side)
        except (TypeError, UnicodeError) as error:
            named = enumerate(pairs)
            texts = {f"text {i} of pair {n}": t for n, pair in named for i, t in enumerate(pair)}
            _blame_text(texts, error)
            raise
        return [EncodedPair(ids, types.index(1) if 1 in types else 0) for ids, types in encoded]

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The token ids of a text, and of each token the half-open range of characters of the text
        that it stands for; (0, 0) for special tokens.

        Raises:
            RequestError: `text` is not a str, or cannot be encoded as UTF-8; or the tokenizing
                library does not know ranges.
        """
        try:
            return self._backend.encode_offsets(text)
        except (TypeError, UnicodeError) as error:
            raise _text_error(text, "text", error) from error

    def _check_room(self, max_length: int, add_special_tokens: bool, *, is_pair: bool) -> None:
        needed = self._backend.num_special_tokens(is_pair=is_pair) if add_special_tokens else 0
        if max_length < max(needed, 1):
            raise RequestError(
                f"a {'pair' if is_pair else 'text'} cannot be cut to {max_length} tokens: the "
                f"tokenizer adds {needed} special tokens; keep at least {max(needed, 1)}",
                parameter="truncate_prompt_tokens",
                value=max_length,
            )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids. Unknown ids add nothing."""
        return self._backend.decode(ids, skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it ("Ġthe", "▁the"); None for unknown ids."""
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it; None: there is none."""
        return self._backend.token_to_id(token)

    def byte_table(self, *, skip_special_tokens: bool) -> ByteTable | None:
        """The bytes of each token of a byte-level vocabulary; None for other vocabularies.

        For a byte-level vocabulary, `decode` is equivalent to joining the bytes of the tokens
        and decoding them as UTF-8 with errors="replace".
        """
        return self._byte_tables[skip_special_tokens] if self._byte_tables else None

    def chat_template(self, wanted: str | None = None, *, has_tools: bool = False) -> str:
        """The source of a chat template.

        Args:
            wanted: the source itself, or the name of one of the model's templates; None chooses
                the default that the tokenizer was made with, or else the model's.
            has_tools: whether the conversation has tools.

        Raises:
            RequestError: there is none, or it cannot be read.
        """
        self.check_exists()
        if wanted is None and self._default_template is not None:
            return self._default_template
        from shmllm.frontend.text.chat_template import load_templates, select_template

        if self._chat_templates is None:
            self._chat_templates = load_templates(self._directory) if self._directory else {}
        return select_template(self._chat_templates, wanted, has_tools=has_tools)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        """Render a conversation as a prompt text, with the model's chat template.

        The text contains the special tokens: encode it with add_special_tokens=False.

        Args:
            messages: dicts with `role` and `content`. The content is a str or a list of
                {"type": "text", "text": ...} parts.
            add_generation_prompt: add the beginning of an assistant message at the end; the
                default.
            continue_final_message: end the prompt directly after the text of the last message,
                which the model then continues.
            chat_template: the source of a template, or the name of one of the model's
                templates; None uses the default, as `chat_template` does.
            tools: the JSON schemas of tools.
            chat_template_content_format: the form in which the template gets contents: "string",
                "openai" for lists of parts, or "auto" for lists if the template reads them.
            **options: these, and further variables of the template.

        Raises:
            RequestError: the messages are malformed, no template exists, or it fails.
        """
        return self.render_chat(messages, options)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        marks: Marks | None = None,
    ) -> str:
        """Render a conversation, which may have images, sounds and videos.

        Args:
            messages: as in `apply_chat_template`.
            options: the keyword arguments of `apply_chat_template`, and further variables of the
                template.
            marks: what stands for an item, a part of `ITEM_PARTS`, where the template takes texts
                only, by modality; None: there are no items.

        Raises:
            RequestError: as `apply_chat_template`.
        """
        variables = dict(options)
        tools, wanted = variables.pop("tools", None), variables.pop("chat_template", None)
        source = self.chat_template(wanted, has_tools=tools is not None)
        from shmllm.frontend.text.chat_template import render_chat

        return render_chat(
            source,
            messages,
            add_generation_prompt=variables.pop("add_generation_prompt", True),
            continue_final_message=variables.pop("continue_final_message", False),
            tools=tools,
            content_format=variables.pop("chat_template_content_format", "auto"),
            variables=self.special_tokens | variables,
            marks=marks,
        )


def _blame_text(texts: Mapping[str, object], cause: Exception) -> None:
    """Raise RequestError if one of these texts, by their names, is why tokenizing failed."""
    for name, text in texts.items():
        if not isinstance(text, str) or _LONE_SURROGATE.search(text):
            raise _text_error(text, name, cause) from cause


def _text_error(text: object, what: str, cause: Exception) -> RequestError:
    if not isinstance(text, str):
        return RequestError(f"{what} to tokenize must be a str, got {type(text).__name__}")
    surrogate = _LONE_SURROGATE.search(text)
    if surrogate is None:
        return RequestError(f"{what} cannot be tokenized: {cause}")
    return RequestError(
        f"{what} is not valid Unicode: lone surrogate {surrogate.group()!a} at character "
        f"{surrogate.start()}; remove it, or decode the source with errors='replace'"
    )
