"""Which queries of a step attend together, in one call per layer.

A step's tokens are cut into spans: queries that attend to one context. Spans of about equal
shape form a group. Decodes are padded to the longest context of their power of two; longer
spans join only others of exactly their shape. Where contexts lie in slabs, a group's rows
form one range, so that keys and values are a view; a row inside of it that is no member is
computed for nothing. Otherwise the group has the numbers of the blocks to gather.

Owns spans and groups. Knows no keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from shmllm.core.plan import PADDING_BLOCK_ID
from shmllm.worker.arrays import LongArray
from shmllm.worker.batch import InputBatch, StepInputs

MAX_QUERY_ROWS = 64
"""Queries of a span. Shorter ones see less of the future, which is computed and masked, and
cost more calls."""

PADDED_QUERY_ROWS = 16
"""Spans of at most this many queries may be padded to each other's length."""

SMALLEST_CONTEXT_BUCKET = 256
WASTED_TOKENS = 512
"""Context that is read for rows that are no members rather than begin another call."""


class CallShapes(Protocol):
    """What shapes attention calls may have.

    Attributes:
        longest_query: tokens of one span.
        always_masked: whether a call that hides nothing needs a mask, too.
    """

    @property
    def longest_query(self) -> int: ...

    @property
    def always_masked(self) -> bool: ...

    def padded_query(self, count: int) -> int:
        """Queries to compute for `count` of them, at most `longest_query`."""

    def padded_context(self, length: int) -> int:
        """Keys to attend to for a context of `length` tokens."""


class AnyShapes:
    """Calls as large as what they compute."""

    longest_query = MAX_QUERY_ROWS
    always_masked = False

    def padded_query(self, count: int) -> int:
        return count

    def padded_context(self, length: int) -> int:
        return length


@dataclass(frozen=True, slots=True)
class Spans:
    """
    Attributes:
        index: (N,) which of the step's spans each is.
        rows: (N,) its row.
        first_tokens: (N,) its first query among the step's tokens.
        counts: (N,) its queries.
        contexts: (N,) what its last query sees, itself included.
    """

    index: LongArray
    rows: LongArray
    first_tokens: LongArray
    counts: LongArray
    contexts: LongArray

    def __getitem__(self, chosen: npt.NDArray[np.generic]) -> Spans:
        return Spans(
            self.index[chosen],
            self.rows[chosen],
            self.first_tokens[chosen],
            self.counts[chosen],
            self.contexts[chosen],
        )

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(slots=True)
class Group:
    """Spans of one attention call, G places of Q queries.

    Attributes:
        spans: the members, in the order of rows.
        places: (N,) the place of each.
        is_slab: whether contexts are a range of slabs; else blocks are gathered.
        size: G.
        query_len: Q.
        tokens: the step's tokens that are this group's queries, if these lie there in order.
        query_tokens: (G * Q,) which token each query is; padding repeats one.
        output_tokens: (n,) tokens whose outputs this group computes.
        output_queries: (n,) where among the G * Q queries they are.

    What grows from step to step while the same rows decode (`see`):
        context: keys and values of each place.
        block_ids: (G * B,) the blocks of each context, if they are gathered.
        masks: window -> what hides keys, as the attention call takes it.
    """

    spans: Spans
    places: LongArray
    is_slab: bool
    size: int
    query_len: int
    tokens: slice | None
    query_tokens: torch.Tensor
    output_tokens: torch.Tensor
    output_queries: torch.Tensor
    context: int = 0
    block_ids: torch.Tensor | None = None
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)

    @property
    def first_row(self) -> int:
        return int(self.spans.rows[0])

    def see(self, contexts: LongArray, batch: InputBatch, shapes: CallShapes) -> None:
        """Take in what each member's last query sees by now."""
        self.context = shapes.padded_context(int(contexts.max()))
        if not self.is_slab:
            num_blocks = -(-self.context // batch.block_size)
            table = batch.block_table[self.spans.rows, :num_blocks]
            width = table.shape[1]
            is_held = np.arange(width) * batch.block_size < contexts[:, None]
            ids = np.full((len(table), num_blocks), PADDING_BLOCK_ID, np.int64)
            ids[:, :width] = np.where(is_held, table, PADDING_BLOCK_ID)
            self.block_ids = torch.from_numpy(ids.ravel())

    def positions(self, contexts: LongArray) -> LongArray:
        """(G, Q) of each query in its sequence; (1, Q) if all places have the same."""
        counts, within = self.spans.counts, np.arange(self.query_len)
        starts = contexts - counts
        if (starts == starts[0]).all() and (counts == self.query_len).all():
            return starts[:1, None] + within
        positions = np.zeros((self.size, self.query_len), np.int64)
        positions[self.places] = starts[:, None] + np.minimum(within, counts[:, None] - 1)
        return positions


def cut_spans(inputs: StepInputs, longest: int = MAX_QUERY_ROWS) -> Spans:
    """Each request's tokens of this step, in pieces of at most `longest`."""
    rows, firsts = inputs.rows, inputs.first_tokens
    counts, contexts = inputs.counts, inputs.context_lens
    if counts.max(initial=0) <= longest:
        return Spans(np.arange(len(rows)), rows, firsts, counts, contexts)
    pieces = -(-counts // longest)
    index = np.repeat(np.arange(len(rows)), pieces)
    before = np.arange(len(index)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offsets = before * longest
    sizes = np.minimum(counts[index] - offsets, longest)
    return Spans(
        np.arange(len(index)),
        rows[index],
        firsts[index] + offsets,
        sizes,
        contexts[index] - counts[index] + offsets + sizes,
    )


def context_limits(contexts: LongArray) -> LongArray:
    """The longest contexts that may be padded to each other's length with these."""
    limits: LongArray = 1 << _bit_length(np.maximum(contexts, SMALLEST_CONTEXT_BUCKET) - 1)
    return limits


def make_groups(spans: Spans, is_slab: bool, shapes: CallShapes) -> list[Group]:
    """All groups of these spans, which lie in slabs or do not, in calls of such shapes."""
    alike = _by_shape(spans)
    parts = (part for each in alike for part in _in_ranges(each)) if is_slab else alike
    return [_make_group(part, is_slab, shapes) for part in parts]


def _by_shape(spans: Spans) -> Iterator[Spans]:
    """Spans that are alike, each in the order of rows."""
    is_short = spans.counts <= PADDED_QUERY_ROWS
    queries = np.where(is_short, _bit_length(spans.counts - 1), spans.counts)
    contexts = np.where(is_short, context_limits(spans.contexts), spans.contexts)
    keys = queries << 40 | contexts
    for key in np.unique(keys):
        alike = np.flatnonzero(keys == key)
        yield spans[alike[np.argsort(spans.rows[alike], kind="stable")]]


def _bit_length(numbers: LongArray) -> LongArray:
    exponents: LongArray = np.frexp(numbers.astype(np.float64))[1].astype(np.int64)
    return exponents


def _in_ranges(spans: Spans) -> Iterator[Spans]:
    """Cut where the rows between two members would cost more than another call."""
    distances = np.diff(spans.rows)
    wasted = (distances - 1) * int(spans.contexts.max()) * int(spans.counts.max())
    # Equal rows are two spans of one request, of which a range has one at a time.
    cuts = np.flatnonzero((wasted > WASTED_TOKENS) | (distances == 0)) + 1
    for chosen in np.split(np.arange(len(spans)), cuts):
        yield spans[chosen]


def _make_group(spans: Spans, is_slab: bool, shapes: CallShapes) -> Group:
    first_row = int(spans.rows[0])
    size = int(spans.rows[-1]) - first_row + 1 if is_slab else len(spans)
    query_len = shapes.padded_query(int(spans.counts.max()))
    places = spans.rows - first_row if is_slab else np.arange(size)
    within = np.arange(query_len)
    is_query = within < spans.counts[:, None]
    tokens = np.full((size, query_len), spans.first_tokens[0])
    tokens[places] = spans.first_tokens[:, None] + np.where(is_query, within, 0)
    queries = places[:, None] * query_len + within
    begin = int(tokens[0, 0])
    order = np.arange(begin, begin + tokens.size)
    is_in_order = len(spans) == size and bool((tokens.ravel() == order).all())
    return Group(
        spans=spans,
        places=places,
        is_slab=is_slab,
        size=size,
        query_len=query_len,
        tokens=slice(begin, begin + tokens.size) if is_in_order else None,
        query_tokens=torch.from_numpy(tokens.ravel()),
        output_tokens=torch.from_numpy(tokens[places][is_query]),
        output_queries=torch.from_numpy(queries[is_query]),
    )
