"""FollowedGrammar: the state of a token sequence in a grammar, for front ends that choose tokens.

Engines follow the grammars of ordinary requests (`worker/grammar.py`). This module must not know
what the tokens are chosen by.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from shmllm.errors import RequestError
from shmllm.formats.grammars import compile_grammar, load_grammar_tokenizer
from shmllm.frontend.constraints.structured_outputs import on_a_large_stack


class FollowedGrammar:
    """What has been written of a text that matches a grammar.

    Args:
        matcher: llguidance's matcher, which this object owns.
        num_outputs: the number of tokens, the first ones, that the model can write; a tokenizer may
            have more.
    """

    __slots__ = ("_matcher", "_num_outputs")

    def __init__(self, matcher: Any, num_outputs: int) -> None:
        self._matcher = matcher
        self._num_outputs = num_outputs

    @classmethod
    def begin(
        cls, grammar: str, directory: Path, eos_token_ids: Sequence[int], num_outputs: int
    ) -> FollowedGrammar:
        """The state before the first token.

        Args:
            grammar: a grammar's text, as `grammar_of` returns it.
            directory: the directory of the tokenizer's files.
            eos_token_ids: the tokens that are allowed where the text may end.
            num_outputs: see the class.

        Raises:
            RequestError: the grammar cannot be compiled for the tokenizer.
        """
        tokenizer = _tokenizer(directory, tuple(eos_token_ids))
        try:
            matcher = on_a_large_stack(lambda: compile_grammar(tokenizer, grammar))
        except TimeoutError as error:
            raise RequestError(f"structured_outputs cannot be compiled: {error}") from error
        return cls(matcher, num_outputs)

    @property
    def is_complete(self) -> bool:
        """Whether no token may follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def allowed(self) -> list[int]:
        """Returns the ids of the tokens that may follow, in ascending order; none if the model can
        write none of them, or if the grammar is too ambiguous to go on."""
        words = b"" if self._matcher.is_error() else self._matcher.compute_bitmask()
        if self._matcher.is_error():
            return []
        bits = np.unpackbits(np.frombuffer(words, np.uint8), bitorder="little")
        ids: list[int] = np.flatnonzero(bits[: self._num_outputs]).tolist()
        return ids

    def behind(self, token_id: int) -> FollowedGrammar:
        """Returns the state behind one of the allowed tokens. This object does not change."""
        matcher = self._matcher.deep_copy()
        matcher.consume_token(token_id)
        return FollowedGrammar(matcher, self._num_outputs)


@lru_cache(maxsize=2)
def _tokenizer(directory: Path, eos_token_ids: tuple[int, ...]) -> Any:
    return load_grammar_tokenizer(directory, eos_token_ids)
