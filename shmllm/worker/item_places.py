"""Where a step's tokens have the embeddings of items.

This module turns the positions in requests that a plan names into indices of the step's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shmllm.core.plan import StepPlan
from shmllm.worker.arrays import LongArray


class ItemPlace(NamedTuple):
    """Neighbouring tokens of a step with embeddings of one item.

    number: identifies the item's embeddings; see `core.plan.Encode`.
    tokens: the tokens, of the step's.
    embeds: their embeddings, of the item's.
    end: the position in the request behind the whole span that they belong to; None: they attend
        to none behind their own.
    """

    number: int
    tokens: slice
    embeds: slice
    end: int | None


def item_places(plan: StepPlan, first_tokens: LongArray) -> Iterator[ItemPlace]:
    """The places of a step.

    Args:
        plan: the step's plan.
        first_tokens: (S,) int64, the index of each request's first token among the step's.
    """
    for use in plan.item_uses:
        start = plan.starts[use.column]
        end, offset = start + plan.counts[use.column], int(first_tokens[use.column]) - start
        num_before = 0
        for first, last in use.spans:
            low, high = max(first, start), min(last, end)
            if low < high:
                tokens = slice(low + offset, high + offset)
                before = num_before - first
                ahead = last if use.looks_ahead else None
                yield ItemPlace(use.number, tokens, slice(low + before, high + before), ahead)
            num_before += last - first


def item_ends(plan: StepPlan, positions: LongArray, first_tokens: LongArray) -> LongArray | None:
    """Return (T,) int64, for each token of a step the position behind the span that it lies in, or
    behind its own; None if no token lies in one.

    Args:
        plan: the step's plan.
        positions: (T,) int64, the position of each token in its request.
        first_tokens: see `item_places`.
    """
    if not plan.item_uses:
        return None
    ends = positions + 1
    for place in item_places(plan, first_tokens):
        if place.end is not None:
            ends[place.tokens] = place.end
    return ends
