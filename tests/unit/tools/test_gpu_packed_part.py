"""The part `packed`, with products that torch computes, and with wrong ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu import packed_part
from gpu.settings import REHEARSAL

from shmllm.models.matrices import FORMATS

SHAPE = REHEARSAL.packed_shapes[0]
Spoil = Callable[[torch.Tensor], object]


def compute_with_torch(monkeypatch: pytest.MonkeyPatch, spoil: Spoil) -> None:
    """Replaces the kernel by the product with the values, which is then spoiled."""

    def multiply(out: torch.Tensor, x: torch.Tensor, matrix: Any) -> None:
        out.copy_(x.float() @ matrix.clone().float().t())
        spoil(out)

    monkeypatch.setattr(packed_part, "multiply", multiply)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", FORMATS)
def test_right_products_pass(monkeypatch, kind, dtype):
    compute_with_torch(monkeypatch, lambda out: None)
    assert packed_part.check(replace(REHEARSAL, dtype=dtype), kind, SHAPE) < 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda out: out[-1, -1].fill_(math.nan),
        lambda out: out[-1, out[-1].abs().argmax()].mul_(1.02),
        lambda out: out.copy_(out.roll(1, dims=1)),
    ],
    ids=["not a number", "a wrong scale", "columns in another order"],
)
def test_wrong_products_fail(monkeypatch, spoil, dtype):
    compute_with_torch(monkeypatch, spoil)
    with pytest.raises(AssertionError, match=r"q4_k, 40 x 256, 1 rows: .* times the error"):
        packed_part.check(replace(REHEARSAL, dtype=dtype), "q4_k", SHAPE)


def test_the_values_are_those_of_the_packed_matrix():
    for kind in FORMATS:
        matrix, values = packed_part.draw(REHEARSAL, kind, SHAPE)
        assert torch.equal(matrix.clone(), values)


def test_every_kind_is_timed_beside_torch(monkeypatch):
    compute_with_torch(monkeypatch, lambda out: None)
    baseline = packed_part.time_baseline(REHEARSAL, SHAPE)
    found = packed_part.time_kind(REHEARSAL, "q4_k", SHAPE, baseline)
    assert list(found) == list(baseline) == [str(rows) for rows in REHEARSAL.packed_rows]
    num_bytes = SHAPE[0] * SHAPE[1] // 256 * 144
    for rows, figures in found.items():
        assert figures["times"] == pytest.approx(baseline[rows]["us"] / figures["us"])
        assert 0.9 < figures["bytes_per_s"] * figures["us"] / 1e6 / num_bytes < 1.2
