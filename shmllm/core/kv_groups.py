"""Groups of layers that keep the same positions of a request in the KV cache.

Layers differ in what they still read of the past: all of it, a window, the current chunk, or a
state. A group has a rule for that, and a block table of its own. Groups of attention layers take
their blocks from one pool: a block has some buffers, each with the keys and values of a layer, or
of several layers with smaller heads, and a block of any group has the same size, because the layers
are divided into groups of the same number of buffers (the last group of a rule may have fewer; its
last buffers stay unused). Layers with a state form one group, whose blocks come from a pool of
their own: such a block has one state of each layer, and stands for as many tokens as there are from
one kept state to the next.

This module owns the rules, the division into groups, and the formulas for the blocks that a request
may need. It must not know requests, blocks or a device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

SIMILAR_COUNTS = 1.5
"""If the most frequent rule has at most this many times the buffers of the rarest, a group of each
rule holds all its layers: padding then takes less memory than more groups would."""


class KVRule(Protocol):
    """What layers still read of a request's past. Rules are equal if they keep the same.

    Attributes:
        most_kept: the largest number of positions before a token that the rule keeps; None: all.
        interval: the number of tokens of a block that holds states; None: blocks hold keys and
            values, of as many tokens as the cache's `block_size`.
    """

    @property
    def most_kept(self) -> int | None: ...

    @property
    def interval(self) -> int | None: ...

    def first_kept(self, num_tokens: int) -> int:
        """The first position that tokens from position `num_tokens` on still read. It never
        decreases as `num_tokens` grows; `num_tokens` itself means that they read none before."""


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Every token reads all tokens before it."""

    interval = None

    @property
    def most_kept(self) -> int | None:
        return None

    def first_kept(self, num_tokens: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """A token reads the last `window` positions, its own included."""

    window: int
    interval = None

    @property
    def most_kept(self) -> int | None:
        return self.window - 1

    def first_kept(self, num_tokens: int) -> int:
        return max(num_tokens - self.window + 1, 0)


@dataclass(frozen=True, slots=True)
class ChunkedLocal:
    """A token reads the positions of its own chunk; chunks have `size` positions."""

    size: int
    interval = None

    @property
    def most_kept(self) -> int | None:
        return self.size - 1

    def first_kept(self, num_tokens: int) -> int:
        return num_tokens // self.size * self.size


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """A token reads the state after the token before it, which is in that token's block, and writes
    the state after itself to its own block. A full block therefore has the state after its last
    token, from which any request with the same tokens can go on.

    Attributes:
        interval: the number of tokens of a block, a multiple of the cache's `block_size`.
    """

    interval: int

    @property
    def most_kept(self) -> int | None:
        return 1

    def first_kept(self, num_tokens: int) -> int:
        return max(num_tokens - 1, 0)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with one rule and one block table.

    Attributes:
        rule: what the layers keep.
        layers: the indices of the layers. Layer `layers[i]` uses buffer `i // per_buffer` of each
            block.
        per_buffer: the number of layers whose keys and values fit into a buffer.
    """

    rule: KVRule
    layers: tuple[int, ...] = ()
    per_buffer: int = 1

    @property
    def num_buffers(self) -> int:
        """The number of buffers that the layers use."""
        return -(-len(self.layers) // self.per_buffer)


ONE_GROUP = (KVGroup(FullAttention()),)
"""The groups of a cache that keeps all positions of all layers."""


def group_layers(
    rules: Sequence[Sequence[KVRule]],
    layer_bytes: Sequence[int] | None = None,
    followers: Collection[int] = (),
) -> tuple[KVGroup, ...]:
    """Divide layers into groups. Those with attention have at most the same number of buffers.

    That number is the number of buffers of the rarest rule of attention, so that only the last
    group of another rule has unused ones; or that of the most frequent rule if both are similar.

    Args:
        rules: the rules of each layer, at most one for its keys and values and one for its state.
        layer_bytes: the keys and values of a block in each layer with attention; None: they are
            equal. Layers of different sizes are in different groups.
        followers: layers that read the slots which the layer before them, of their rule and size,
            has found or reads, too: both are in one group.

    Returns:
        The groups. Those that keep everything come first: they limit a prefix-cache hit most. The
        group of states is the last one.
    """
    sizes = [1] * len(rules) if layer_bytes is None else layer_bytes
    attention: dict[tuple[KVRule, int], list[int]] = {}
    states: dict[KVRule, list[int]] = {}
    for layer, rule in ((layer, rule) for layer, own in enumerate(rules) for rule in own):
        if rule.interval is None:
            attention.setdefault((rule, sizes[layer]), []).append(layer)
        else:
            states.setdefault(rule, []).append(layer)
    largest = max((size for _, size in attention), default=1)
    every = [
        KVGroup(rule, tuple(layers), largest // size) for (rule, size), layers in attention.items()
    ]
    every.sort(key=lambda group: group.rule.most_kept is not None)
    counts = [group.num_buffers for group in every] or [1]
    count = max(counts) if max(counts) <= SIMILAR_COUNTS * min(counts) else min(counts)
    runs = [replace(group, layers=run) for group in every for run in _runs(group, followers)]
    count = max([count, *(run.num_buffers for run in runs)])
    groups = [
        replace(group, layers=layers)
        for group in every
        for layers in _joined(_runs(group, followers), count * group.per_buffer)
    ]
    return (*groups, *(KVGroup(rule, tuple(members)) for rule, members in states.items()))


def _runs(group: KVGroup, followers: Collection[int]) -> list[tuple[int, ...]]:
    """The layers of a group in parts that cannot be divided."""
    begins = [i for i, layer in enumerate(group.layers) if not i or layer not in followers]
    return [group.layers[i:j] for i, j in pairwise([*begins, len(group.layers)])]


def _joined(runs: Iterable[tuple[int, ...]], most: int) -> list[tuple[int, ...]]:
    """Parts of at most so many layers, of as many runs as fit."""
    parts: list[tuple[int, ...]] = []
    for run in runs:
        if parts and len(parts[-1]) + len(run) <= most:
            parts[-1] += run
        else:
            parts.append(run)
    return parts


def buffers_per_block(groups: Sequence[KVGroup]) -> int:
    """The number of buffers of a block of keys and values."""
    return max((group.num_buffers for group in groups if group.rule.interval is None), default=0)


def most_blocks(
    groups: Sequence[KVGroup], num_tokens: int, max_step_tokens: int, block_size: int
) -> int:
    """The most blocks of keys and values that a request of `num_tokens` tokens holds at any time.

    A step that computes n tokens from position p on needs the blocks from `first_kept(p)` to
    p + n, and at most one more because neither end is the beginning of a block.

    Args:
        groups: the groups of the cache.
        num_tokens: the request's prompt and output together.
        max_step_tokens: the most tokens of one request that a step computes.
        block_size: the number of tokens in a block.
    """
    return sum(
        most_held(group.rule, num_tokens, max_step_tokens, block_size)
        for group in groups
        if group.rule.interval is None
    )


def most_states(groups: Sequence[KVGroup], num_tokens: int, max_step_tokens: int) -> int:
    """The most blocks of states that a request of `num_tokens` tokens holds at any time, as
    `most_blocks`."""
    return sum(
        most_held(group.rule, num_tokens, max_step_tokens, group.rule.interval)
        for group in groups
        if group.rule.interval is not None
    )


def most_held(rule: KVRule, num_tokens: int, max_step_tokens: int, block_size: int) -> int:
    """The most blocks that one group with this rule holds; see `most_blocks`."""
    blocks = -(-num_tokens // block_size)
    if rule.most_kept is None:
        return blocks
    return min(blocks, -(-(rule.most_kept + max_step_tokens) // block_size) + 1)
