"""Chooses the engine of a pool that computes a request.

The router knows what this front end has sent to each engine and what has ended since. It asks no
engine, so a choice sends nothing. This module must not know requests, connections and processes.

A request goes to the engine k with the least

    cost(k) = queued(k) + UNCACHED_WEIGHT * (num_prompt_tokens - cached(k))

in tokens of a prompt. queued(k) is what the request waits for: the prompt tokens that engine k has
to compute for requests in flight without a first token, and COMPLETION_TOKENS for each completion
in flight. cached(k) are the prompt tokens at its beginning that were sent to engine k before, in
full blocks. A prefix therefore draws its requests to one engine until the queue there is longer
than that of another by the prefix, times the weight: affinity without pinning. Of equal costs wins
the engine to which the fewest different blocks were sent, whose cache has the most room.

The numbers come from a simulation; docs/pool.md has its results.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

UNCACHED_WEIGHT = 3
"""What a token costs that is not cached: the request waits for it, and so do those behind it. With
1, equal prompts that are sent at once are computed on every engine."""

COMPLETION_TOKENS = 32
"""What a completion in flight delays others by, in prompt tokens. It is no share of `max_tokens`,
which says little about the length."""


def chain_hashes(token_ids: Sequence[int], block_size: int, salt: Hashable = 0) -> list[int]:
    """The hash of each full block of a prompt. It covers all tokens from the first one on.

    These are hashes of this process, cheaper than the engine's (`core.prefix_cache`). If two blocks
    have the same one, a choice gets worse and no result wrong.

    Args:
        token_ids: the prompt.
        block_size: the number of tokens in a block.
        salt: what requests must have in common to share blocks, such as salt and adapter.
    """
    tokens, parent = tuple(token_ids), hash(salt)
    ends = range(block_size, len(tokens) + 1, block_size)
    return [parent := hash((parent, tokens[end - block_size : end])) for end in ends]


@dataclass(slots=True)
class Placement:
    """The place of a request, and what it adds to the queue there.

    Attributes:
        engine: the index of the engine.
        num_prompt_tokens: prompt tokens that the engine has to compute before the first token; 0
            after that.
        num_completions: the completions that have not ended.
    """

    engine: int
    num_prompt_tokens: int
    num_completions: int


class SentBlocks:
    """The hashes of the blocks of the prompts that were last sent to one engine.

    Two generations of hashes stand for an order of use: when the younger one is full, it becomes
    the older one, which is forgotten. A prompt is added from its first block on. A generation that
    has a block therefore has all blocks before it, and the end of a hit is found by bisection.

    Args:
        num_blocks: the most hashes of a generation: the number of the engine's blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self._most = num_blocks
        self._young: set[int] = set()
        self._old: set[int] = set()

    def __len__(self) -> int:
        """The number of hashes; those in both generations count twice."""
        return len(self._young) + len(self._old)

    def num_hits(self, chain: Sequence[int], most: int) -> int:
        """How many blocks at the beginning of a prompt were sent.

        Args:
            chain: the `chain_hashes` of the prompt.
            most: the number of blocks to look at, at most all of the chain.
        """
        young, old = self._young, self._old
        if not most or (chain[0] not in young and chain[0] not in old):
            return 0
        if chain[most - 1] in young or chain[most - 1] in old:
            return most
        is_new: Callable[[int], bool] = lambda each: each not in young and each not in old  # noqa: E731
        return bisect_left(chain, True, 0, most, key=is_new)

    def add(self, chain: Sequence[int]) -> None:
        """Add the blocks of a prompt, at most a whole generation of them.

        Args:
            chain: the `chain_hashes` of the prompt.
        """
        sent = chain if len(chain) <= self._most else chain[: self._most]
        if not sent or sent[-1] in self._young:
            return  # with all blocks before it
        self._young.update(sent)
        if len(self._young) > self._most:
            self._young.difference_update(sent)
            self._old, self._young = self._young, set(sent)

    def clear(self) -> None:
        """Forget all prompts."""
        self._young, self._old = set(), set()


class Router:
    """
    Args:
        num_blocks: the number of KV blocks of each engine; 0: it caches no prefixes.
        block_size: the number of tokens in a block.
        uncached_weight: what a token costs that is not cached, in queued ones.
        completion_tokens: what a completion in flight counts for, in tokens of a prompt.
    """

    def __init__(
        self,
        num_blocks: Sequence[int],
        block_size: int,
        *,
        uncached_weight: int = UNCACHED_WEIGHT,
        completion_tokens: int = COMPLETION_TOKENS,
    ) -> None:
        self.block_size = block_size
        self._uncached_weight = uncached_weight
        self._completion_tokens = completion_tokens
        self._sent = [SentBlocks(each) for each in num_blocks]
        self._queued = [0] * len(num_blocks)

    def queued(self, engine: int) -> int:
        """The tokens queued at an engine, as in the formula of this module."""
        return self._queued[engine]

    def place(
        self,
        chain: Sequence[int],
        num_tokens: int,
        num_completions: int,
        alive: Iterable[int],
        num_shared: int = 0,
    ) -> Placement:
        """Choose an engine for a prompt, and count the request as sent.

        Args:
            chain: the `chain_hashes` of the prompt; empty if the request reads no cached blocks.
            num_tokens: the number of its tokens.
            num_completions: the number of its completions.
            alive: the indices of the engines to choose from.
            num_shared: the blocks at its beginning that every engine finds in a shared cache.
        """
        size = self.block_size
        most = min(len(chain), (num_tokens - 1) // size)  # the last token is always computed
        shared = min(num_shared, most)
        best, least, uncached = -1, inf, num_tokens
        for engine in alive:
            queued, sent = self._queued[engine], self._sent[engine]
            if queued >= least:  # whatever is cached there
                continue
            missing = num_tokens - size * max(sent.num_hits(chain, most), shared)
            cost = queued + self._uncached_weight * missing
            if cost < least or (cost == least and len(sent) < len(self._sent[best])):
                best, least, uncached = engine, cost, missing
        if best < 0:
            raise ValueError("there is no engine to choose from")
        self._sent[best].add(chain)
        self._queued[best] += uncached + self._completion_tokens * num_completions
        return Placement(best, uncached, num_completions)

    def begun(self, placement: Placement) -> None:
        """Note that a request has its first token: its prompt is computed. Idempotent."""
        self._queued[placement.engine] -= placement.num_prompt_tokens
        placement.num_prompt_tokens = 0

    def ended(self, placement: Placement, num_completions: int = 1) -> None:
        """Note that completions of a request have ended, whatever the reason."""
        self.begun(placement)
        self._queued[placement.engine] -= self._completion_tokens * num_completions
        placement.num_completions -= num_completions

    def forget(self, engine: int) -> None:
        """Forget what was sent to an engine, because it has died. The placements there end with it:
        they must not be passed to `begun` or `ended` any more."""
        self._queued[engine] = 0
        self._sent[engine].clear()

    def clear_cached(self) -> None:
        """Forget all prompts, because the engines' prefix caches were reset. The queues stay."""
        for sent in self._sent:
            sent.clear()
