"""Searches for tile sizes of products of some rows: with the experts of a mixture, and with packed
weights.

All candidates of an entry have the rows of the present one: pairs are sorted into blocks of these,
whatever the weights are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gpu.clock import seconds_each
from gpu.packed_part import draw
from gpu.search import Case, Search
from gpu.settings import Settings
from shmllm_kernels.gpu.configs import (
    LARGEST_BLOCK,
    PACKED_PRODUCT,
    PRODUCT,
    SMALLEST_BLOCK,
    ProductConfig,
    has_dependent_launches,
)
from shmllm_kernels.gpu.experts import down, gate_and_up
from shmllm_kernels.gpu.packings import PackedRows
from shmllm_kernels.gpu.pairs import SortedPairs, sort_pairs
from shmllm_kernels.gpu.products import linear

MIXTURE = (128, 8, 2048, 768)
"""Experts, experts of a token, hidden size and width of an expert: Qwen3-30B-A3B."""
KIND = "int4"
STEPS: dict[int, tuple[int, ...]] = {16: (8, 64, 256), 64: (1024,), 128: (2048, 8192)}
"""By the rows of an expert that an entry serves, tokens of measured steps: 16 for each row."""
ROWS: dict[int, tuple[int, ...]] = {16: (2, 8, 16), 64: (32, 64), 128: (128, 1024)}
"""By the rows that an entry serves, rows of measured products with packed weights."""
REHEARSED_MIXTURE = (4, 2, 64, 32)
REHEARSED = {16: (3,)}


@dataclass(frozen=True)
class MixtureCase:
    """Both products of a mixture's experts with the rows of one step.

    Attributes:
        x: [tokens, hidden].
        ids: [tokens, top_k] int32.
        pairs: for any size of blocks.
        gate_up, last: the weights of the experts.
        activated, out: what is written, [pairs, inner] and [pairs, hidden].
        rounds: how often a measurement is repeated.
    """

    name: str
    x: Tensor
    ids: Tensor
    pairs: SortedPairs
    gate_up: Tensor
    last: Tensor
    activated: Tensor
    out: Tensor
    rounds: int
    calls: float = 0.0

    @classmethod
    def make(cls, settings: Settings, tokens: int) -> MixtureCase:
        experts, top_k, hidden, inner = REHEARSED_MIXTURE if settings.rehearsal else MIXTURE
        device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)

        def random(*shape: int) -> Tensor:
            found = torch.empty(shape, device=device, dtype=dtype)
            return found.normal_(std=shape[-1] ** -0.5)

        choices = torch.rand(tokens, experts, device=device).topk(top_k).indices
        count = tokens * top_k

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, device=device, dtype=torch.int32)

        pairs = SortedPairs.allocate(count, experts, SMALLEST_BLOCK, LARGEST_BLOCK, integers)
        return cls(
            f"{tokens} tokens",
            random(tokens, hidden),
            choices.to(torch.int32).contiguous(),
            pairs,
            random(experts, 2 * inner, hidden),
            random(experts, hidden, inner),
            random(count, inner),
            random(count, hidden),
            settings.rounds,
        )

    def result(self, config: ProductConfig) -> Tensor:
        sort_pairs(self.pairs, self.ids, len(self.last), config.block_m)
        self._launch(config)
        return self.out.float()

    def seconds(self, config: ProductConfig) -> float:
        sort_pairs(self.pairs, self.ids, len(self.last), config.block_m)
        return seconds_each([partial(self._launch, config)] * 2, self.x.device, self.rounds)

    def _launch(self, config: ProductConfig) -> None:
        top_k = self.ids.shape[1]
        is_dependent = has_dependent_launches(self.x.device)
        gate_and_up(
            self.activated, self.x, self.gate_up, None, "silu", top_k, self.pairs, config,
            is_dependent=is_dependent,
        )  # fmt: skip
        down(
            self.out, self.activated, self.last, None, top_k, self.pairs, config,
            is_dependent=is_dependent,
        )  # fmt: skip


class PackedCase:
    """A product of some rows with each of some packed matrices.

    Args:
        settings: the sizes.
        shape: columns and elements of a row.
        rows: the number of rows.
    """

    calls = 0.0

    def __init__(self, settings: Settings, shape: tuple[int, int], rows: int) -> None:
        columns, k = shape
        self.name = f"{columns} x {k}, {rows} rows"
        one, _ = draw(settings, KIND, shape)
        num_bytes = one.integers.nbytes + one.scales.nbytes
        self._weights = [
            PackedRows.of(KIND, one.integers.clone(), one.scales.clone(), k)
            for _ in range(max(2, -(-settings.rotated_bytes // num_bytes)))
        ]
        device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
        self._x = torch.randn(rows, k, device=device).to(dtype)
        self._out, self._rounds = self._x.new_empty(rows, columns), settings.rounds

    def result(self, config: ProductConfig) -> Tensor:
        self._works(config)[0]()
        return self._out.float()

    def seconds(self, config: ProductConfig) -> float:
        return seconds_each(self._works(config), self._x.device, self._rounds)

    def _works(self, config: ProductConfig) -> list[Callable[[], object]]:
        return [
            partial(linear, self._out, self._x, weight, None, config) for weight in self._weights
        ]


def searches(settings: Settings) -> Iterator[Search]:
    for rows in REHEARSED if settings.rehearsal else STEPS:
        yield Search(PRODUCT, rows, partial(mixtures, rows=rows), candidates(settings, rows))
    for rows in REHEARSED if settings.rehearsal else ROWS:
        tried = packed_candidates(settings, rows)
        yield Search(PACKED_PRODUCT, rows, partial(packed_products, rows=rows), tried)


def candidates(settings: Settings, block_m: int) -> list[ProductConfig]:
    """Returns the tile sizes to measure for blocks of so many rows."""
    if settings.rehearsal:
        return [ProductConfig(block_m, 32, depth, 4, 1) for depth in (32, 64)]
    if block_m == 16:
        found = itertools.product((32, 64, 128), (64, 128, 256), (4,), (3, 4, 5))
    else:
        found = itertools.product((64, 128, 256), (32, 64, 128), (4, 8), (3, 4))
    return [ProductConfig(block_m, *each) for each in found]


def packed_candidates(settings: Settings, block_m: int) -> list[ProductConfig]:
    """Returns the tile sizes to measure for packed weights: whole runs of 64 elements."""
    if settings.rehearsal:
        return [ProductConfig(block_m, 32, depth, 4, 1) for depth in (64, 128)]
    if block_m == 16:
        found = itertools.product((16, 32, 64), (128, 256), (2, 4), (3, 4, 5))
    else:
        found = itertools.product((32, 64, 128), (64, 128), (4, 8), (2, 3, 4))
    return [ProductConfig(block_m, *each) for each in found]


def mixtures(settings: Settings, rows: int) -> list[Case]:
    steps = REHEARSED if settings.rehearsal else STEPS
    return [MixtureCase.make(settings, tokens) for tokens in steps[rows]]


def packed_products(settings: Settings, rows: int) -> list[Case]:
    counts = (REHEARSED if settings.rehearsal else ROWS)[rows]
    shapes = settings.packed_shapes
    return [PackedCase(settings, shape, count) for shape in shapes for count in counts]
