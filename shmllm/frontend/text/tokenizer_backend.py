"""The tokenizing libraries behind a common interface, TokenizerBackend.

`tokenizers` is used for every model directory with a tokenizer.json. Other directories need
transformers, which takes seconds to import; this module imports it only for them. It must not
know requests or chat templates.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import tokenizers

from shmllm.errors import EngineStartError, RequestError
from shmllm.frontend.model_files import one_line, read_json_object

FAST_FILE = "tokenizer.json"
FALLBACK_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "tokenizer.tiktoken")
_NAMED_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_PARALLELISM = "TOKENIZERS_PARALLELISM"


class TokenizerBackend(Protocol):
    """The methods of a tokenizing library that Tokenizer uses. Unknown ids decode to nothing.

    Attributes:
        byte_level: whether the vocabulary is byte-level, like GPT-2's.
        special_ids: the ids of the tokens that `skip_special_tokens` leaves out.
        added_tokens: the ids of the tokens that are never split, by their texts.
    """

    byte_level: bool
    special_ids: frozenset[int]
    added_tokens: Mapping[str, int]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...
    def id_to_token(self, token_id: int) -> str | None: ...


class FastBackend:
    """A `tokenizers.Tokenizer` without truncation and padding, even if its file has them."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        _allow_forks()
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.byte_level = isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(each for each, token in added.items() if token.special)
        self.added_tokens: Mapping[str, int] = {
            token.content: each for each, token in added.items()
        }

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)


class TransformersBackend:
    """A transformers tokenizer that is not based on a `tokenizers` object."""

    byte_level = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known_ids = frozenset(tokenizer.get_vocab().values())
        self.special_ids = frozenset(tokenizer.all_special_ids)
        self.added_tokens: Mapping[str, int] = dict(tokenizer.get_added_vocab())

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]

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


class NoBackend:
    """Stands in for a tokenizer with `skip_tokenizer_init`: there is no text."""

    byte_level = False
    special_ids: frozenset[int] = frozenset()
    added_tokens: Mapping[str, int] = MappingProxyType({})

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        raise RequestError(
            "this needs the tokenizer, and the engine was started with "
            "`skip_tokenizer_init=True`: "
            "pass token ids, or start it without that option"
        )

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return ""

    def id_to_token(self, token_id: int) -> str | None:
        return None


def load_backend(directory: Path) -> tuple[TokenizerBackend, dict[str, str]]:
    """Load the tokenizer of a model directory.

    Returns:
        The backend, and the special tokens that the model has, by name ("eos_token": "</s>").

    Raises:
        EngineStartError: the directory has no tokenizer files, or they cannot be read.
    """
    path = directory / FAST_FILE
    if path.is_file():
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise EngineStartError(f"cannot read {path}: {one_line(error)}") from error
        return FastBackend(tokenizer), _named_special_tokens(directory)
    if any((directory / name).is_file() for name in FALLBACK_FILES):
        return _load_with_transformers(directory)
    raise EngineStartError(
        f"no tokenizer in {directory}: looked for {FAST_FILE}, {', '.join(FALLBACK_FILES)}; "
        "copy them there from the model that the weights were trained from"
    )


def _load_with_transformers(directory: Path) -> tuple[TokenizerBackend, dict[str, str]]:
    try:
        transformers = importlib.import_module("transformers")
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True
        )
        inner = getattr(tokenizer, "backend_tokenizer", None)
        names = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    except Exception as error:
        raise EngineStartError(
            f"{directory} has no {FAST_FILE}, and transformers cannot load its tokenizer either "
            f"({type(error).__name__}: {one_line(error)})"
        ) from error
    if isinstance(inner, tokenizers.Tokenizer):
        return FastBackend(inner), names
    return TransformersBackend(tokenizer), names


def _named_special_tokens(directory: Path) -> dict[str, str]:
    config = read_json_object(directory / "tokenizer_config.json")
    named = read_json_object(directory / "special_tokens_map.json")
    named = {name: named.get(name) for name in _NAMED_SPECIAL_TOKENS}
    named |= {name: config[name] for name in _NAMED_SPECIAL_TOKENS if name in config}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        extra = config.get(key)
        if isinstance(extra, dict):
            named |= extra
    # A token is either its text, or an object with the text under "content".
    texts = {n: t.get("content") if isinstance(t, dict) else t for n, t in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


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
