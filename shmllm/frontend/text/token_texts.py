"""TokenTexts: the texts of single tokens, for the alternatives in log-probabilities.

This module must not know the incremental detokenization of outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

from shmllm.frontend.text.detokenizer import REPLACEMENT, common_length
from shmllm.frontend.text.tokenizer import Tokenizer

BLANK = "\u2581"
"""The character for a space in SentencePiece vocabularies."""


class TokenTexts:
    """Returns the texts of single tokens.

    Args:
        tokenizer: the model's tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, before: Sequence[int], token: int) -> str:
        """The text that a token adds; special tokens have their text, too.

        If the bytes of the token end inside a character, the text is empty. The token that
        completes a character has the whole character as its text.

        Args:
            before: a few tokens before it.
            token: the token id.
        """
        text = self._alone(token)
        return self._complete(before, token) if _is_cut(text) else text

    def _alone(self, token: int) -> str:
        text = self._known.get(token)
        if text is None:
            text = self._decode([token])
            spelling = self._tokenizer.id_to_token(token) or ""
            # The decoders of these vocabularies drop the space in front of the first token.
            num_blanks = len(spelling) - len(spelling.lstrip(BLANK))
            if num_blanks:
                text = " " * num_blanks + text.lstrip(" ")
            self._known[token] = text
        return text

    def _complete(self, before: Sequence[int], token: int) -> str:
        for size in range(1, len(before) + 1):
            context = [*before[-size:]]
            whole = self._decode([*context, token])
            if _is_cut(whole):
                continue
            while context and self._alone(context[-1]).endswith(REPLACEMENT):
                context.pop()
            return whole[common_length(whole, self._decode(context)) :]
        return ""

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _is_cut(text: str) -> bool:
    """Whether a text may end inside a character, whose first bytes some tokenizers leave out."""
    return not text or text.endswith(REPLACEMENT)
