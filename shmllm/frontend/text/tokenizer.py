"""Text to token ids and back, for one model.

Owns the checks on text that comes from users and the per-token byte tables that the
detokenizer reads. Which library tokenizes is tokenizer_backend's business; how chat
templates render is chat_template's, imported at the first chat.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shmllm.errors import RequestError
from shmllm.frontend.text.tokenizer_backend import FAST_FILE, TokenizerBackend, load_backend

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def _byte_alphabet() -> dict[str, int]:
    """Characters of byte-level vocabularies and the byte that each stands for.

    Printable Latin-1 bytes stand for themselves, the others for 256, 257, ... in order
    (GPT-2's table, which every byte-level BPE uses).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + position): byte for position, byte in enumerate(shifted)}


_BYTE_ALPHABET = _byte_alphabet()


class ByteTable(dict[int, bytes]):
    """Token id to the bytes it stands for, filled at first use. Unknown ids are empty."""

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
        return bytes([_BYTE_ALPHABET[character] for character in token])
    except KeyError:
        # An added token is stored as plain text; the decoder takes it as it is when any of
        # its characters is outside the alphabet.
        return token.encode()


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        vocab_size: number of tokens, added ones included. The model's own vocabulary may be
            padded beyond it.
        special_token_ids: ids that `skip_special_tokens` leaves out.
        special_tokens: text of the named ones, by name ("bos_token", "eos_token", ...).
        eos_token_id: id of the end-of-sequence token, None if the model names none.
        bos_token_id: id of the beginning-of-sequence token, None if the model names none.
    """

    def __init__(
        self,
        backend: TokenizerBackend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        self._backend = backend
        self._directory = directory
        self._chat_templates: dict[str, str] | None = None
        self._byte_tables: tuple[ByteTable, ByteTable] | None = None
        if backend.byte_level:
            self._byte_tables = (
                ByteTable(backend, frozenset()),
                ByteTable(backend, backend.special_ids),
            )
        self.special_tokens = dict(special_tokens or {})
        self.vocab_size = backend.vocab_size
        self.special_token_ids = backend.special_ids
        self.eos_token_id = self._named_id("eos_token")
        self.bos_token_id = self._named_id("bos_token")

    @property
    def file(self) -> Path | None:
        """Its tokenizer.json, which holding outputs to a grammar needs; None without one."""
        file = self._directory / FAST_FILE if self._directory is not None else None
        return file if file is not None and file.is_file() else None

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Load the tokenizer of a model directory.

        Raises:
            EngineStartError: no tokenizer files there, or files that cannot be read.
        """
        backend, special_tokens = load_backend(path)
        return cls(backend, special_tokens=special_tokens, directory=path)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, never truncated or padded.

        Raises:
            RequestError: not a str, or not encodable as UTF-8.
        """
        try:
            return self._backend.encode(text, add_special_tokens)
        except (TypeError, UnicodeError) as error:
            raise _text_error(text, "text", error) from error

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of many texts, on all cores where the library can.

        Raises:
            RequestError: one of them is not a str or not encodable; says which.
        """
        try:
            return self._backend.encode_batch(texts, add_special_tokens)
        except (TypeError, UnicodeError) as error:
            for position, text in enumerate(texts):
                if not isinstance(text, str) or _LONE_SURROGATE.search(text):
                    raise _text_error(text, f"text {position}", error) from error
            raise

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids that no token has contribute nothing."""
        return self._backend.decode(ids, skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token ("Ġthe", "▁the"), None for unknown ids."""
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's own spelling, None if there is none."""
        return self._backend.token_to_id(token)

    def byte_table(self, *, skip_special_tokens: bool) -> ByteTable | None:
        """Token id to bytes, for byte-level vocabularies; None for all others.

        Joining the entries of a sequence and decoding them as UTF-8 (errors replaced) is what
        `decode` does for these.
        """
        return self._byte_tables[skip_special_tokens] if self._byte_tables else None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Write a conversation as the prompt text that the model was trained on.

        The text already holds the special tokens: encode it with add_special_tokens=False.

        Args:
            messages: dicts with `role` and `content`; content is a str or a list of
                {"type": "text", "text": ...} parts.
            add_generation_prompt: end with the opening of an assistant message.
            continue_final_message: end inside the last message, for the model to go on with.
            chat_template: template source, or the name of one of the model's templates.
            tools: JSON schemas of tools.
            **kwargs: further variables for the template.

        Raises:
            RequestError: malformed messages, no template, or a template that fails.
        """
        from shmllm.frontend.text.chat_template import load_templates, render_chat, select_template

        if self._chat_templates is None:
            self._chat_templates = load_templates(self._directory) if self._directory else {}
        return render_chat(
            select_template(self._chat_templates, chat_template, has_tools=tools is not None),
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables=self.special_tokens | kwargs,
        )

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


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
