"""ThinkingBudget: `thinking_token_budget` with the tokens that begin and end reasoning."""

from __future__ import annotations

from typing import NamedTuple


class ThinkingBudget(NamedTuple):
    """How many tokens the reasoning of a request may have.

    Attributes:
        limit: the number of tokens after `begin` from which on `end` is forced.
        begin: the token ids that begin reasoning; at least one.
        end: the token ids that are forced to end it; at least one.
        closes: the token ids by which the model ends it, also those that are forced; at least one.
    """

    limit: int
    begin: tuple[int, ...]
    end: tuple[int, ...]
    closes: tuple[int, ...]
