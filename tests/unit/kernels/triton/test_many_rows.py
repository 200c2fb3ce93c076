"""Tests the product of many rows under Triton's interpreter."""

from __future__ import annotations

import random
from typing import Any

import torch
from conformance.many_rows_kernel import ManyRowsConformance, Rows
from conformance.single_row_kernel import ACTIVATIONS
from support import cooperative_interpreter

from shmllm_kernels.gpu import many_rows, many_rows_kernel


class TestManyRows(ManyRowsConformance):
    pass


class AtTheSameTime:
    """Launches a kernel whose programs run in random orders."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self._kernel[grid](
            *args, **options, launch_cooperative_grid=True
        )


def test_programs_in_any_order(draw, monkeypatch) -> None:
    """The bits stay the same, and without the wait for the other parts they do not."""
    rows = Rows(draw, torch.float16, 70, 56, 224, ACTIVATIONS["gated"])
    want = rows.run()
    kernel = AtTheSameTime(many_rows.multiply_many_rows)
    monkeypatch.setattr(many_rows, "multiply_many_rows", kernel)

    def differs(seed: int) -> bool:
        monkeypatch.setattr(cooperative_interpreter, "seeds", random.Random(seed))
        rows.launch()
        return not torch.equal(rows.out, want)

    assert not any(differs(seed) for seed in range(10))
    monkeypatch.setattr(many_rows_kernel, "await_arrivals", lambda meeting: None)
    assert any(differs(seed) for seed in range(10))
