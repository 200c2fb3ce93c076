"""Measures whether the tokens of a head, or the heads of a token, should lie side by side in a
block of the KV cache.

The cases are decodes and prompts of the sizes that tiles of attention are searched for, with the
present tiles. This module must not know how a search measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from torch import Tensor

from gpu.attention_case import AttentionCase, AttentionSizes
from gpu.search import Case, Search
from gpu.settings import Settings
from shmllm_kernels.gpu.configs import CACHE_ORDER, CacheOrderConfig

CANDIDATES = tuple(CacheOrderConfig(heads_first) for heads_first in (0, 1))
HEADS = {64: (32, 8, 64), 512: (32, 8, 128)}
"""For each size of the table the heads that are measured: query heads, kv heads, and their size."""
STEPS = ((1, 1, 1024), (64, 1, 1024), (256, 1, 1024), (1, 4096, 4096), (16, 256, 1024))
"""Requests, tokens of each, and context."""
REHEARSED_HEADS, REHEARSED_STEPS = (4, 2, 16), ((2, 1, 40), (1, 20, 20))


class OrderCase:
    """The attention of a step with keys and values in either order."""

    calls = 0.0

    def __init__(self, case: AttentionCase, name: str) -> None:
        self.name = name
        self._cases = [case.with_order(heads_first=bool(each)) for each in (0, 1)]

    def result(self, config: CacheOrderConfig) -> Tensor:
        case = self._of(config)
        case.out.fill_(math.nan)
        case.launches(*case.current())[0]()
        return case.out.float()

    def seconds(self, config: CacheOrderConfig) -> float:
        case = self._of(config)
        return case.seconds(*case.current())

    def _of(self, config: CacheOrderConfig) -> AttentionCase:
        return self._cases[config.heads_first]


def searches(settings: Settings) -> Iterator[Search]:
    for size, heads in HEADS.items():
        own = REHEARSED_HEADS if settings.rehearsal else heads
        yield Search(CACHE_ORDER, size, partial(cases, own), CANDIDATES)


def cases(heads: tuple[int, int, int], settings: Settings) -> list[Case]:
    found: list[Case] = []
    for step in REHEARSED_STEPS if settings.rehearsal else STEPS:
        requests, query, context = step
        name = f"{requests} requests, {query} tokens at {context}, heads of {heads[2]}"
        found.append(OrderCase(AttentionCase(AttentionSizes(*heads, *step), settings), name))
    return found
