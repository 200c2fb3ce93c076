"""What the kernel of the attention of decodes takes: pointers, strides and numbers in groups."""

from __future__ import annotations

from typing import Any, NamedTuple


class LayerHeads(NamedTuple):
    """What attention reads and writes in a layer: pointers.

    Attributes:
        out: the result.
        heads: query and key heads of the new tokens, or query heads.
        new_values: the value heads of the new tokens, in the rows of `heads`.
        key_cache, value_cache: the cache.
        table: the block table.
        slots: where the new keys and values are written.
        cos, sin: the angles of the new tokens.
        query_weight, key_weight: the weights of norms of heads.
        sinks: a logit for each query head.
    """

    out: Any
    heads: Any
    new_values: Any
    key_cache: Any
    value_cache: Any
    table: Any
    slots: Any
    cos: Any
    sin: Any
    query_weight: Any
    key_weight: Any
    sinks: Any


class HeadStrides(NamedTuple):
    """The elements from a token, a block, a kv head or a request to the next one; `table_head` is
    from the blocks of a kv head to those of the next, 0 if all have the same."""

    out: Any
    heads: Any
    cos: Any
    sin: Any
    block: Any
    token: Any
    kv_head: Any
    table: Any
    table_head: Any


class HeadNumbers(NamedTuple):
    """The scale and the cap of scores, as `attention.scales_of` returns them, and what norms of
    heads add to the mean square and to their weights."""

    scale: Any
    cap: Any
    eps: Any
    offset: Any


class PartMemory(NamedTuple):
    """The scratch memory of split contexts: pointers to sums, to statistics, and to a counter for
    each request and kv head."""

    sums: Any
    stats: Any
    counters: Any


class Step(NamedTuple):
    """Pointers to what a step has of each request: `query_starts` and `context_lens`."""

    starts: Any
    contexts: Any


class Part(NamedTuple):
    """What a program computes: a part of a request's context, for one kv head.

    Attributes:
        request, kv_head, split: the request, the kv head and the number of the part.
        token: the request's first new token.
        query_len: the number of new tokens.
        position: the position of the first one.
        keys_begin: the first key that it attends to.
        lowest, highest: the first tile of keys, and the one behind the last.
        num_parts: the number of parts that have keys: at least one.
        is_idle: whether there is nothing to compute.
    """

    request: Any
    kv_head: Any
    split: Any
    token: Any
    query_len: Any
    position: Any
    keys_begin: Any
    lowest: Any
    highest: Any
    num_parts: Any
    is_idle: Any
