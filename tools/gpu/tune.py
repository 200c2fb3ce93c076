"""Searches for tile sizes of paged attention: decodes with whole and with split contexts, and
prompts, for each head size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from gpu.attention_case import AttentionCase, AttentionSizes
from gpu.search import Search
from gpu.settings import Settings
from shmllm_kernels.gpu.configs import DECODE, PREFILL, SPLIT_DECODE, AttentionConfig

HEADS = {64: (32, 8), 128: (32, 8), 256: (16, 8), 512: (16, 2)}
TABLES = {"decode": DECODE, "split_decode": SPLIT_DECODE, "prefill": PREFILL}
STEPS = {  # requests, query, context
    "decode": ((64, 1, 1024), (256, 1, 1024)),
    "split_decode": ((1, 1, 1024), (8, 1, 1024), (4, 1, 16_384)),
    "prefill": ((1, 4096, 4096), (16, 256, 1024), (1, 64, 32_768)),
}
STAGES = (3, 5, 7)
"""Buffers for one, two and three tiles, since keys are loaded by a table's entries."""
DECODED = (64, 128)
"""The heads whose decodes of many requests are searched for by `tune_decodes`."""
LIMITED = [
    AttentionConfig(16, *each, max_registers=most)
    for each in ((64, 4, 3), (64, 2, 3), (32, 4, 3), (32, 2, 3), (64, 2, 5))
    for most in (96, 128)
]
"""Programs that are only many on a multiprocessor if their threads have few registers."""
REHEARSED_HEADS = {64: (4, 2)}
REHEARSED_STEPS = {
    "decode": ((2, 1, 40),),
    "split_decode": ((1, 1, 40),),
    "prefill": ((1, 20, 20),),
}


@dataclass(frozen=True)
class AttentionTrial:
    """A case of `search` with the number of splits that the engine would choose."""

    case: AttentionCase
    name: str
    calls: float = 0.0

    def result(self, config: AttentionConfig) -> Tensor:
        self.case.out.fill_(math.nan)
        self.case.launches(config, self.case.current()[1])[0]()
        return self.case.out.float()

    def seconds(self, config: AttentionConfig) -> float:
        return self.case.seconds(config, self.case.current()[1])


def searches(settings: Settings) -> Iterator[Search]:
    """Yields all searches but those of `tune_decodes`."""
    for dim in REHEARSED_HEADS if settings.rehearsal else HEADS:
        for kind in TABLES:
            if kind != "decode" or dim not in DECODED:
                yield search_of(settings, kind, dim)


def search_of(settings: Settings, kind: str, dim: int) -> Search:
    found = partial(cases, kind=kind, dim=dim)
    return Search(TABLES[kind], dim, found, candidates(settings, kind, dim))


def candidates(settings: Settings, kind: str, dim: int) -> list[AttentionConfig]:
    """Returns the tile sizes to measure."""
    if settings.rehearsal:
        return [AttentionConfig(16, tile, 4, 1) for tile in (16, 32)]
    tiles = (32, 64, 128) if dim < 256 else (16, 32, 64)
    if kind != "prefill":
        sizes = itertools.product(tiles, (2, 4, 8), STAGES)
        free = [AttentionConfig(16, *each) for each in sizes]
        return free + (LIMITED if kind == "decode" and dim in DECODED else [])
    rows = (64, 128) if dim < 512 else (16, 64)
    found = itertools.product(rows, tiles, (4, 8), STAGES)
    return [AttentionConfig(*each) for each in found]


def cases(settings: Settings, kind: str, dim: int) -> list[AttentionTrial]:
    """Returns the steps on which the candidates are measured."""
    heads, kv_heads = (REHEARSED_HEADS if settings.rehearsal else HEADS)[dim]
    found = []
    for step in (REHEARSED_STEPS if settings.rehearsal else STEPS)[kind]:
        sizes = AttentionSizes(heads, kv_heads, dim, *step)
        requests, query, context = step
        name = f"{requests} requests, {query} tokens at {context}"
        found.append(AttentionTrial(AttentionCase(sizes, settings), name))
    return found
