"""Tests paged attention under Triton's interpreter."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from conformance.attention_kernels import AttentionConformance, Case, Launch
from conformance.attention_tiles import AttentionTilesConformance
from support.variants import slow
from triton.runtime.interpreter import interpreter_builder


class TestAttention(AttentionConformance):
    pass


class TestAttentionTiles(AttentionTilesConformance):
    """In float32 the tiles are small, and interpreting them takes minutes."""

    @pytest.fixture(
        params=[torch.float16, slow(torch.float32)],
        ids=["f16", "f32"],
    )
    def dtype(self, request: pytest.FixtureRequest) -> torch.dtype:
        kind: torch.dtype = request.param
        return kind


@pytest.fixture
def products(monkeypatch) -> Counter[tuple[int, ...]]:
    """The number of matrix products of each program, by its reversed index."""
    found: Counter[tuple[int, ...]] = Counter()
    matmul = np.matmul

    def counted(*arguments, **options):
        found[tuple(reversed(interpreter_builder.grid_idx))] += 1
        return matmul(*arguments, **options)

    monkeypatch.setattr(np, "matmul", counted)
    return found


def test_the_programs_with_the_most_keys_are_launched_first(draw, products) -> None:
    """A GPU launches programs in the order of their indices, the first index fastest."""
    Launch(draw, torch.float32, Case(((100, 120),), heads=4, kv_heads=2)).check()
    work = [products[place] for place in sorted(products)]
    assert work[0] > work[-1]
    assert work == sorted(work, reverse=True)


def test_a_local_layer_computes_only_its_tiles(draw, products) -> None:
    """The 16 tokens of a program attend to 24 keys, which lie in three tiles of 16 at most."""
    case = Case(((200, 200),), heads=1, kv_heads=1, window=5, ends=4)
    Launch(draw, torch.float32, case).check()
    assert len(products) == 13
    assert max(products.values()) == 2 * 3
