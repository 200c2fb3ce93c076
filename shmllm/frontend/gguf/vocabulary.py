"""The vocabulary of a GGUF file, with checked types."""

from __future__ import annotations

from typing import Any

from shmllm.formats.gguf import GgufHeader, shown
from shmllm.formats.pieces import NORMAL

Json = dict[str, Any]

_LONGEST_TOKEN = 4096
NAMED_IDS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # llama.cpp spells it so
    "pad_token": "padding",
    "mask_token": "mask",
    "cls_token": "cls",
}
"""What llama.cpp calls the special tokens of tokenizer_config.json."""


class Vocabulary:
    """The checked vocabulary of a file.

    Attributes:
        tokens: the tokens' texts by id.
        kinds: their types, llama.cpp's numbers.
    """

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self.tokens: list[str] = self.array("tokens", str)
        longest = max(map(len, self.tokens))
        if longest > _LONGEST_TOKEN:
            raise header.error(f"a token of {longest:,} characters; the file is damaged")
        self.kinds: list[int] = [NORMAL] * len(self.tokens)
        if self.find("token_type") is not None:
            self.kinds = self.array("token_type", int)
        if len(self.kinds) != len(self.tokens):
            raise header.error(
                f"{len(self.tokens):,} tokens have {len(self.kinds):,} types; the file is damaged"
            )

    def find(self, name: str) -> Any:
        """The value of tokenizer.ggml.name, or None."""
        return self._header.metadata.get(f"tokenizer.ggml.{name}")

    def array(self, name: str, kind: type) -> list[Any]:
        """The array tokenizer.ggml.name, which must not be empty."""
        values = self.find(name)
        if not isinstance(values, list) or not values or type(values[0]) is not kind:
            found = "" if values is None else f" (but {shown(values)})"
            raise self._header.error(
                f"no tokenizer.ggml.{name}, which its tokenizer needs as an array{found}"
            )
        return values

    def flag(self, name: str, default: bool) -> bool:
        value = self.find(name)
        return default if value is None else bool(value)

    def named(self, name: str) -> str | None:
        """The text of a special token, by its name in tokenizer_config.json."""
        token_id = self.find(f"{NAMED_IDS[name]}_token_id")
        if type(token_id) is not int or not 0 <= token_id < len(self.tokens):
            return None
        return self.tokens[token_id]

    def needed(self, *names: str) -> str:
        """The text of the first special token that the file names, by its name in
        tokenizer_config.json; a name that is none stands for a text of the vocabulary."""
        for name in names:
            found = self.named(name) if name in NAMED_IDS else name
            if found in self.tokens:
                return found
        raise self._header.error(f"no token {names[-1]}, which its tokenizer needs")

    def ids(self) -> dict[str, int]:
        """The ids by text; the first of several tokens with the same text."""
        ids: dict[str, int] = {}
        for token_id, token in enumerate(self.tokens):
            ids.setdefault(token, token_id)
        return ids
