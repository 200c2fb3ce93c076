"""Truncation: which tokens of a text that is too long remain.

The special tokens of a template ([CLS], [SEP], an end of text) always remain; the texts between
them are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from shmllm.errors import RequestError

Side = Literal["left", "right"]
"""The side that is cut."""

AS_MANY_AS_FIT = -1


@dataclass(frozen=True, slots=True)
class Truncation:
    """How prompts that are too long are cut, in the terms of vLLM.

    Attributes:
        truncate_prompt_tokens: how many tokens of a prompt remain, special ones included; -1
            means as many as fit.
        truncation_side: the side that is cut.

    Raises:
        RequestError: it is no side.
    """

    truncate_prompt_tokens: int = AS_MANY_AS_FIT
    truncation_side: Side = "right"

    def __post_init__(self) -> None:
        side = self.truncation_side
        if side not in get_args(Side):
            raise RequestError(
                f"truncation_side must be 'left' or 'right', got {side!r}",
                parameter="truncation_side",
                value=side,
            )

    def max_length(self, most: int) -> int:
        """The number of tokens that remain, of which at most `most` fit.

        Raises:
            RequestError: more tokens are to remain than fit, or the number is not allowed.
        """
        kept = self.truncate_prompt_tokens
        if type(kept) is not int or not (kept == AS_MANY_AS_FIT or 1 <= kept <= most):
            raise RequestError(
                f"truncate_prompt_tokens must be -1 or a whole number from 1 to {most}, got "
                f"{kept!r}",
                parameter="truncate_prompt_tokens",
                value=kept,
            )
        return most if kept == AS_MANY_AS_FIT else kept

    def of_text(self, most: int) -> dict[str, Any]:
        """The arguments of `Tokenizer.encode_batch` that cut text. Errors as in `max_length`."""
        return {"max_length": self.max_length(most), "side": self.truncation_side}

    def of_tokens(self, token_ids: list[int], most: int) -> list[int]:
        """The tokens of a prompt of token ids that remain. Errors as in `max_length`."""
        kept = self.max_length(most)
        return token_ids[-kept:] if self.truncation_side == "left" else token_ids[:kept]


def remaining(sequences: Sequence[int | None], max_length: int, side: Side) -> list[int]:
    """The positions that remain of the tokens of one text or of a pair.

    Args:
        sequences: for each token 0 or 1 for the text that it belongs to, None for special tokens.
        max_length: how many tokens remain; there are at most so many special ones.
        side: the side of each text that is cut.
    """
    lengths = sequences.count(0), sequences.count(1)
    kept = longest_first(*lengths, max_length - sequences.count(None))
    positions, seen = [], [0, 0]
    for position, sequence in enumerate(sequences):
        if sequence is not None:
            index = seen[sequence]
            seen[sequence] += 1
            from_end = lengths[sequence] - index - 1
            if (index if side == "right" else from_end) >= kept[sequence]:
                continue
        positions.append(position)
    return positions


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts remain if the longer one is cut until both are equally long,
    then both. The source is `truncate_encodings` of the library tokenizers (utils/truncation.rs).

    Args:
        first: the number of tokens of the first text.
        second: the number of tokens of the second text.
        room: how many tokens remain of both together.
    """
    if first + second <= room:
        return first, second
    fewer = min(first, second, room // 2)
    return (fewer, room - fewer) if first <= second else (room - fewer, fewer)
