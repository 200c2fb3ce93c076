"""The tokenizing libraries behind a common interface, TokenizerBackend.

`tokenizers` is used for every tokenizer that it can express. This module must not know requests or
chat templates, nor the files of tokenizers.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import tokenizers

from shmllm.errors import RequestError
from shmllm.formats.tokenizer_files import FAST_FILE, TOKEN_TYPES, load_tokenizer
from shmllm.frontend.text.truncation import Side, remaining

_PARALLELISM = "TOKENIZERS_PARALLELISM"


class TokenizerBackend(Protocol):
    """The methods of a tokenizing library that Tokenizer uses. Unknown ids decode to nothing.

    With a `max_length`, texts that have more tokens, special ones included, are cut on a side; the
    template's special tokens remain. Pairs are cut by the strategy "longest_first", and come as
    token ids and token types, which are empty if the model gets none.

    Attributes:
        byte_level: whether the vocabulary is byte-level, like GPT-2's.
        special_ids: the ids of the tokens that `skip_special_tokens` leaves out.
        added_tokens: the ids of the tokens that are never split, by their texts.
    """

    byte_level: bool
    special_ids: frozenset[int]
    added_tokens: Mapping[str, int]

    def keep_whole(self, markers: Sequence[str]) -> None: ...
    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
    def encode_batch(
        self,
        texts: Sequence[str],
        add_special_tokens: bool,
        max_length: int | None = None,
        side: Side = "right",
    ) -> list[list[int]]: ...
    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], max_length: int | None, side: Side
    ) -> list[tuple[list[int], list[int]]]: ...
    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]: ...
    def num_special_tokens(self, *, is_pair: bool) -> int: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...
    def id_to_token(self, token_id: int) -> str | None: ...
    def token_to_id(self, token: str) -> int | None: ...


class FastBackend:
    """A `tokenizers.Tokenizer` without truncation and padding, even if its file has them.

    Args:
        tokenizer: the tokenizer.
        token_types: whether the model gets the token types that its template gives pairs.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, token_types: bool = True) -> None:
        _allow_forks()
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._token_types = token_types
        self.byte_level = isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel)
        self._read_added_tokens()

    def _read_added_tokens(self) -> None:
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(each for each, token in added.items() if token.special)
        self.added_tokens: Mapping[str, int] = {
            token.content: each for each, token in added.items()
        }

    def keep_whole(self, markers: Sequence[str]) -> None:
        for marker in markers:
            texts = [marker, *marker.split(maxsplit=1)[:1]]
            known = [each for each in texts if self._tokenizer.token_to_id(each) is not None]
            if not known:
                continue
            whole = known[0]
            if self._tokenizer.encode(whole, add_special_tokens=False).tokens != [whole]:
                token = tokenizers.AddedToken(whole, normalized=False, special=True)
                self._tokenizer.add_special_tokens([token])
        if markers:
            self._read_added_tokens()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(
        self,
        texts: Sequence[str],
        add_special_tokens: bool,
        max_length: int | None = None,
        side: Side = "right",
    ) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        # The library's own truncation is a state of the tokenizer, which threads share.
        return [_cut(encoding, max_length, side, encoding.ids) for encoding in encodings]

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], max_length: int | None, side: Side
    ) -> list[tuple[list[int], list[int]]]:
        # `encode_batch_fast` gives the second text type 0 if the tokenizer has no template.
        encodings = self._tokenizer.encode_batch(list(pairs))
        return [
            (
                _cut(encoding, max_length, side, encoding.ids),
                _cut(encoding, max_length, side, encoding.type_ids) if self._token_types else [],
            )
            for encoding in encodings
        ]

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._tokenizer.encode(text)
        return encoding.ids, encoding.offsets

    def num_special_tokens(self, *, is_pair: bool) -> int:
        return self._tokenizer.num_special_tokens_to_add(is_pair)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)


class TransformersBackend:
    """A transformers tokenizer that is not based on a `tokenizers` object."""

    byte_level = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._by_side: dict[Side, Any] = {}
        self._known_ids = frozenset(tokenizer.get_vocab().values())
        self.special_ids = frozenset(tokenizer.all_special_ids)
        self.added_tokens: Mapping[str, int] = dict(tokenizer.get_added_vocab())

    def keep_whole(self, markers: Sequence[str]) -> None:
        """No model with markers has such a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        _require_text(text)
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def encode_batch(
        self,
        texts: Sequence[str],
        add_special_tokens: bool,
        max_length: int | None = None,
        side: Side = "right",
    ) -> list[list[int]]:
        if max_length is None:
            return [self.encode(text, add_special_tokens) for text in texts]
        _require_text(*texts)
        encode = self._cutting(side).encode
        cut = {"truncation": True, "max_length": max_length}
        return [list(encode(text, add_special_tokens=add_special_tokens, **cut)) for text in texts]

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], max_length: int | None, side: Side
    ) -> list[tuple[list[int], list[int]]]:
        for pair in pairs:
            _require_text(*pair)
        tokenizer = self._cutting(side)
        cut = {} if max_length is None else {"truncation": True, "max_length": max_length}
        encoded = [tokenizer(first, second, **cut) for first, second in pairs]
        return [(list(each["input_ids"]), list(each.get(TOKEN_TYPES, ()))) for each in encoded]

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        raise RequestError(
            f"this tokenizer does not say which characters a token stands for: a {FAST_FILE} is "
            "needed, and this model has none"
        )

    def num_special_tokens(self, *, is_pair: bool) -> int:
        number: int = self._tokenizer.num_special_tokens_to_add(pair=is_pair)
        return number

    def _cutting(self, side: Side) -> Any:
        """A copy of the tokenizer that cuts on this side. The side is an attribute, so one for
        both sides would be changed by a thread while another one reads it."""
        if side not in self._by_side:
            tokenizer = copy.copy(self._tokenizer)
            tokenizer.truncation_side = side
            self._by_side[side] = tokenizer
        return self._by_side[side]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(
            [token_id for token_id in ids if token_id in self._known_ids],
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text

    def id_to_token(self, token_id: int) -> str | None:
        if token_id not in self._known_ids:
            return None
        token: str = self._tokenizer.convert_ids_to_tokens(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.get_vocab().get(token)
        return found


class NoBackend:
    """Stands in for a tokenizer with `skip_tokenizer_init`: there is no text."""

    byte_level = False
    special_ids: frozenset[int] = frozenset()
    added_tokens: Mapping[str, int] = MappingProxyType({})

    def keep_whole(self, markers: Sequence[str]) -> None:
        pass

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        raise RequestError(
            "this needs the tokenizer, and the engine was started with "
            "`skip_tokenizer_init=True`: "
            "pass token ids, or start it without that option"
        )

    def encode_batch(
        self,
        texts: Sequence[str],
        add_special_tokens: bool,
        max_length: int | None = None,
        side: Side = "right",
    ) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], max_length: int | None, side: Side
    ) -> list[tuple[list[int], list[int]]]:
        return [(self.encode(first, True), []) for first, _ in pairs]

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        return self.encode(text, True), []

    def num_special_tokens(self, *, is_pair: bool) -> int:
        return 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return ""

    def id_to_token(self, token_id: int) -> str | None:
        return None

    def token_to_id(self, token: str) -> int | None:
        return None


def _require_text(*texts: str) -> None:
    """Raise TypeError or UnicodeError for what is no text, as `tokenizers` does. The packages
    behind transformers' tokenizers raise anything."""
    for text in texts:
        str.encode(text)


def _cut(
    encoding: tokenizers.Encoding, max_length: int | None, side: Side, values: list[int]
) -> list[int]:
    """The values of those tokens that remain."""
    if max_length is None or len(values) <= max_length:
        return values
    return [values[each] for each in remaining(encoding.sequence_ids, max_length, side)]


def load_backend(directory: Path) -> tuple[TokenizerBackend, dict[str, str]]:
    """Load the tokenizer of a model directory.

    Returns:
        The backend, and the special tokens that the model has, by name ("eos_token": "</s>").

    Raises:
        EngineStartError: the directory has no tokenizer files, or they cannot be read.
    """
    loaded = load_tokenizer(directory)
    if isinstance(loaded.tokenizer, tokenizers.Tokenizer):
        backend = FastBackend(loaded.tokenizer, token_types=loaded.has_token_types)
        return backend, loaded.special_tokens
    return TransformersBackend(loaded.tokenizer), loaded.special_tokens


def _allow_forks() -> None:
    """Make `tokenizers` work in forked children of this process, without a warning.

    `tokenizers` encodes batches in a thread pool, which does not exist in a forked child. Without
    TOKENIZERS_PARALLELISM, the child prints a warning; with the value "true", it hangs. So this
    function sets "true" in this process and "false" in its children, unless the user has set the
    variable.
    """
    if _PARALLELISM in os.environ:
        return
    os.environ[_PARALLELISM] = "true"
    os.register_at_fork(after_in_child=lambda: os.environ.update({_PARALLELISM: "false"}))
