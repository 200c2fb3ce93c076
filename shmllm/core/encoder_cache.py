"""Which embeddings of items the runner has: a cache of a bounded number of embeddings.

An item is encoded in the step that computes the first of its tokens that is not computed yet, and
its embeddings stay until others need the room, least recently used first. A step keeps what it
uses, and nothing is held from one step to the next: an item that was evicted while a request is in
the middle of it is encoded again. Whatever other requests do, the first one of a step finds the
whole cache free, so no order of requests can stop all of them.

Steps run in the order in which they are planned, so an entry may be reused by the next plan.

This module must not know how items are encoded, nor what they contain.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from shmllm.config.items import ItemInfo
from shmllm.core.plan import Encode, EncodedPrefix, ItemUse, StepPlan
from shmllm.core.request import Request
from shmllm.params.items import Item, items_between


@dataclass(slots=True)
class _Entry:
    """The embeddings of one item.

    Attributes:
        number: what the runner calls them.
        size: how many there are.
        last_step: the last step that uses them.
    """

    number: int
    size: int
    last_step: int


class EncoderCache:
    """
    Args:
        capacity: the most embeddings that are kept, and that a step uses; those of the largest
            item at least.
        cuts_spans: whether a step may compute a part of a span. In models whose images are attended
            to both ways it must not.

    Attributes:
        num_used: how many embeddings are kept.
        num_hits, num_encoded: how many items were found and encoded.
    """

    def __init__(self, capacity: int, cuts_spans: bool = True) -> None:
        self.capacity = capacity
        self.cuts_spans = cuts_spans
        self.num_used = self.num_hits = self.num_encoded = 0
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._forgotten: list[int] = []
        self._num_made = 0
        self._step = -1
        self._num_pinned = 0

    @classmethod
    def of(cls, items: ItemInfo) -> EncoderCache:
        """That of an engine which says so of its items."""
        return cls(items.most_embeds, cuts_spans=not items.longest_span)

    def cut(self, request: Request, start: int, count: int, step: int) -> int:
        """How many of a request's tokens a step can compute. Changes nothing that lasts.

        Args:
            request: the request.
            start: the position of the first token.
            count: how many tokens there is room for otherwise.
            step: the number of the step.

        Returns:
            At most `count`; 0: its next token belongs to an item that has no room in this step.
        """
        if not request.items:
            return count
        self._begin(step)
        end, num_pinned, seen = start + count, self._num_pinned, set()
        for item in items_between(request.items, start, end):
            if self._is_pinned(item) or item.identity in seen:
                continue
            seen.add(item.identity)
            num_pinned += item.num_embeds
            if num_pinned > self.capacity:
                end = max(item.start, start)
                break
        return self._before_cut_spans(request, start, end) - start

    def _before_cut_spans(self, request: Request, start: int, end: int) -> int:
        """The last position at most `end` at which no span is cut."""
        if not self.cuts_spans:
            for item in items_between(request.items, start, end):
                for first, last in item.spans if item.looks_ahead else ():
                    if first < end < last:
                        return max(first, start)
        return end

    def use(self, request: Request, start: int, count: int, plan: StepPlan) -> None:
        """Plan the embeddings of a request's tokens, which `cut` has found room for.

        Args:
            request: the request, which gets the plan's next column.
            start: the position of its first token.
            count: how many tokens the step computes.
            plan: gets what the runner encodes, forgets and uses.
        """
        if not request.items:
            return
        found = list(items_between(request.items, start, start + count))
        for item, number in zip(found, self._numbers(found, plan), strict=True):
            use = ItemUse(len(plan.requests), number, item.spans, item.looks_ahead)
            plan.item_uses.append(use)

    def use_prefix(self, request: Request, start: int, plan: StepPlan) -> None:
        """Plan the keys and values of the positions that an encoder computes of a request that is
        admitted, which `cut` has found room for.

        Args:
            request: the request, which has its row and its blocks.
            start: the first position that its blocks do not have yet.
            plan: gets what the runner encodes, forgets and writes.
        """
        if request.num_encoded and start < request.items[0].end:
            (number,) = self._numbers(request.items, plan)
            plan.prefixes.append(EncodedPrefix(request.row, number, start))

    def _numbers(self, items: Sequence[Item], plan: StepPlan) -> list[int]:
        """Plan to encode the items that are not here. Returns the numbers of all."""
        self._begin(plan.step)
        for item in items:  # first: making room for one must not evict another one
            entry = self._entries.get(item.identity)
            if entry is not None:
                self._pin(item, entry)
        numbers = []
        for item in items:
            entry = self._entries.get(item.identity)
            if entry is None:
                entry = self._make(item, plan)
                self._pin(item, entry)
            else:
                self.num_hits += 1
            numbers.append(entry.number)
        plan.forgotten += self._forgotten
        self._forgotten.clear()
        return numbers

    def reset(self) -> None:
        """Forget all embeddings: they were computed with other weights."""
        self._forgotten += [entry.number for entry in self._entries.values()]
        self._entries.clear()
        self.num_used = self._num_pinned = 0

    @property
    def counters(self) -> dict[str, int]:
        """For statistics: how many items chunks of prompts needed, and how many were there."""
        return {"item_queries": self.num_hits + self.num_encoded, "item_hits": self.num_hits}

    def check_integrity(self) -> None:
        """Raise AssertionError if the counts are inconsistent."""
        sizes = [entry.size for entry in self._entries.values()]
        assert sum(sizes) == self.num_used <= self.capacity, "embeddings leaked"

    def _begin(self, step: int) -> None:
        if step != self._step:
            self._step, self._num_pinned = step, 0

    def _is_pinned(self, item: Item) -> bool:
        entry = self._entries.get(item.identity)
        return entry is not None and entry.last_step == self._step

    def _pin(self, item: Item, entry: _Entry) -> None:
        if entry.last_step != self._step:
            entry.last_step = self._step
            self._num_pinned += entry.size
        self._entries.move_to_end(item.identity)

    def _make(self, item: Item, plan: StepPlan) -> _Entry:
        size = item.num_embeds
        while self.num_used + size > self.capacity:
            _, oldest = self._entries.popitem(last=False)
            assert oldest.last_step != self._step, "the step has no room for the item"
            self.num_used -= oldest.size
            self._forgotten.append(oldest.number)
        self._num_made += 1
        entry = self._entries[item.identity] = _Entry(self._num_made, size, -1)
        self.num_used += size
        self.num_encoded += 1
        plan.encodes.append(Encode(entry.number, item))
        return entry
