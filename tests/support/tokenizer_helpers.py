"""Reads the vocabulary of a Tokenizer, which tests need and the front end does not."""

from __future__ import annotations

from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.frontend.text.tokenizer_backend import FastBackend


def token_id_of(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token, in the vocabulary's spelling."""
    assert isinstance(tokenizer._backend, FastBackend)
    token_id = tokenizer._backend._tokenizer.token_to_id(token)
    assert token_id is not None, f"the vocabulary has no token {token!r}"
    return token_id


def vocab_size_of(tokenizer: Tokenizer) -> int:
    """The number of tokens, including added ones."""
    assert isinstance(tokenizer._backend, FastBackend)
    return tokenizer._backend._tokenizer.get_vocab_size(with_added_tokens=True)
