"""Makes the texts of `tools/bench_embed.py`: random words, with known numbers of tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import click
from tokenizers import Tokenizer

FEWEST_LETTERS = 3
BLOCK = 128
"""The texts of a block of `sample_rows`; as many as the largest batch of a peer."""


def single_token_words(tokenizer: Tokenizer) -> list[str]:
    """The words of the vocabulary that are one token each, also behind another word; sorted.

    Args:
        tokenizer: without truncation and padding.
    """
    pieces = {piece.lstrip("\u0120\u2581").lower() for piece in tokenizer.get_vocab()}
    words = sorted(
        piece
        for piece in pieces
        if piece.isascii() and piece.isalpha() and len(piece) >= FEWEST_LETTERS
    )
    num_special = len(tokenizer.encode("").ids)
    alone, twice = (
        tokenizer.encode_batch(texts) for texts in (words, [f"{word} {word}" for word in words])
    )
    return [
        word
        for word, one, two in zip(words, alone, twice, strict=True)
        if (len(one.ids), len(two.ids)) == (num_special + 1, num_special + 2)
    ]


def make_texts(
    tokenizer: Tokenizer, count: int, lengths: tuple[int, int], seed: int
) -> tuple[list[str], list[int]]:
    """Random texts, and the number of tokens of each.

    Args:
        tokenizer: without truncation and padding.
        count: how many texts.
        lengths: the fewest and the most tokens of a text, special ones included; all lengths
            between them are equally likely.
        seed: of the random numbers.

    Raises:
        click.ClickException: the vocabulary has no words, or words that become other tokens when
            they are joined.
    """
    rng = random.Random(seed)
    words = single_token_words(tokenizer)
    if not words:
        raise click.ClickException("the tokenizer has no words of one token")
    wanted = [rng.randint(*lengths) for _ in range(count)]
    num_special = len(tokenizer.encode("").ids)
    texts = [" ".join(rng.choices(words, k=length - num_special)) for length in wanted]
    if [len(encoding.ids) for encoding in tokenizer.encode_batch(texts)] != wanted:
        raise click.ClickException("the tokenizer joins words: texts have other lengths than asked")
    return texts, wanted


def sample_rows(lengths: Sequence[int]) -> list[int]:
    """The numbers of a quarter of the texts, to choose settings with.

    The texts are ordered by length, and every fourth block of them is taken, so that batches of
    neighbouring lengths need as little padding as with all texts.

    Args:
        lengths: the tokens of each text.
    """
    ordered = sorted(range(len(lengths)), key=lambda row: lengths[row])
    return [row for i, row in enumerate(ordered) if i // BLOCK % 4 == 1 or len(ordered) <= BLOCK]
