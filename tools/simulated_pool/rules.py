"""Rules that choose an engine.

This module must not know when requests arrive.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from shmllm.client.routing import Placement, Router
from simulated_pool.engine import Engine, Limits
from simulated_pool.loads import Request


class Rule(Protocol):
    """Chooses engines, and learns what becomes of the requests."""

    def choose(self, request: Request) -> int:
        """The index of the engine that gets a request."""

    def has_first(self, request: Request) -> None:
        """A completion of the request has its first token."""

    def has_ended(self, request: Request) -> None:
        """A completion of the request has all tokens."""


class Simple:
    """A rule that learns nothing."""

    def has_first(self, request: Request) -> None:
        pass

    def has_ended(self, request: Request) -> None:
        pass


class Random(Simple):
    """Any engine, with equal chances."""

    def __init__(self, engines: Sequence[Engine], limits: Limits) -> None:
        self._draw = random.Random(0)
        self._count = len(engines)

    def choose(self, request: Request) -> int:
        return self._draw.randrange(self._count)


class LeastRequests(Simple):
    """vLLM's: the engine with the least `waiting * 4 + running` requests, the first one of several
    (`DPLBAsyncMPClient`). The counts are exact; vLLM's are up to 100 ms old."""

    def __init__(self, engines: Sequence[Engine], limits: Limits) -> None:
        self._engines = engines

    def choose(self, request: Request) -> int:
        scores = [4 * len(each.waiting) + len(each.running) for each in self._engines]
        return scores.index(min(scores))


class ConsistentHash(Simple):
    """A place on a ring, by the first blocks of the prompt; each engine owns many arcs of it."""

    NUM_BLOCKS = 4
    NUM_ARCS = 100

    def __init__(self, engines: Sequence[Engine], limits: Limits) -> None:
        draw = random.Random(0)
        self._ring = sorted(
            (draw.getrandbits(62), engine)
            for engine in range(len(engines))
            for _ in range(self.NUM_ARCS)
        )

    def choose(self, request: Request) -> int:
        first = request.chain[: self.NUM_BLOCKS] or request.prompt
        place = random.Random(hash(tuple(first))).getrandbits(62)
        return self._ring[bisect(self._ring, (place, 0)) % len(self._ring)][1]


class Ours:
    """shmllm's: the least cost of `shmllm.client.routing`."""

    def __init__(self, engines: Sequence[Engine], limits: Limits, **weights: int) -> None:
        num_blocks = [limits.num_blocks] * len(engines)
        self._router = Router(num_blocks, limits.block_size, **weights)
        self._engines = range(len(engines))
        self._placed: dict[Request, Placement] = {}

    def choose(self, request: Request) -> int:
        placement = self._router.place(
            request.chain, len(request.prompt), len(request.hashes), self._engines
        )
        self._placed[request] = placement
        return placement.engine

    def has_first(self, request: Request) -> None:
        self._router.begun(self._placed[request])

    def has_ended(self, request: Request) -> None:
        placement = self._placed[request]
        self._router.ended(placement)
        if not placement.num_completions:
            del self._placed[request]


class PromptsStay(Ours):
    """A variant: the tokens of a prompt stay in the queue until the first completion has ended."""

    def has_first(self, request: Request) -> None:
        pass


class Make(Protocol):
    """Makes a rule for engines."""

    def __call__(self, engines: Sequence[Engine], limits: Limits) -> Rule: ...


RULES: dict[str, Make] = {
    "shmllm": Ours,
    "vllm": LeastRequests,
    "random": Random,
    "hashing": ConsistentHash,
}
VARIANTS: dict[str, Make] = {
    "shmllm": Ours,
    "prompts stay": PromptsStay,
    **{f"uncached x {each}": partial(Ours, uncached_weight=each) for each in (1, 2, 6)},
    **{f"completion {each}": partial(Ours, completion_tokens=each) for each in (0, 128)},
}
