"""Low-rank adapters on a CPU: compared with the reference, and independent of the batch to the last
bit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from shmllm_kernels.cpu import KernelProgram
from shmllm_kernels.cpu.lora import DTYPES, EXPAND, SHRINK, UNIT_ROWS, Segment, entry_words
from shmllm_kernels.reference.lora import add_low_rank

K, COLUMNS, RANKS = 100, 230, 19
PRODUCTS, PRODUCT = 3, 1


@dataclass(frozen=True)
class Adapter:
    """The matrices of one adapter for one product with two projections that are not neighbours."""

    a: Tensor
    bs: list[Tensor]  # [rank, columns]
    places: tuple[tuple[int, int, float], ...]  # first rank, first column, scale

    @classmethod
    def random(cls, kind: str) -> Adapter:
        dtype = getattr(torch, kind)
        bs = [torch.randn(8, 70).to(dtype), torch.randn(11, 97).to(dtype)]
        return cls(torch.randn(RANKS, K).to(dtype), bs, ((0, 5, 0.5), (8, 133, 3.0)))

    def words(self) -> list[int]:
        segments = [
            Segment(b.data_ptr(), first, len(b), column, b.shape[1], scale)
            for b, (first, column, scale) in zip(self.bs, self.places, strict=True)
        ]
        return entry_words(self.a.data_ptr(), RANKS, segments)

    def expected(self, out: Tensor, x: Tensor) -> Tensor:
        out = out.double()
        for b, (first, column, scale) in zip(self.bs, self.places, strict=True):
            columns = slice(column, column + b.shape[1])
            a = self.a[first : first + len(b)].double()
            out[:, columns] = add_low_rank(out[:, columns], x.double(), a, b.double().T, scale)
        return out


def run(
    adapters: list[Adapter | None], rows: list[int], x: Tensor, out: Tensor, num_threads: int = 2
) -> Tensor:
    """Adds the adapters' products to a copy of `out`.

    Args:
        adapters: by place.
        rows: for each row its adapter's place; -1: none.
        x: [rows, K].
        out: [rows, COLUMNS].
        num_threads: the number of threads.
    """
    kind = str(next(a for a in adapters if a).a.dtype).removeprefix("torch.")
    order = np.argsort(rows, kind="stable")
    order = np.ascontiguousarray(order[np.sort(rows) >= 0])
    places, units, first = np.array(rows)[order], [], 0
    for place in range(len(adapters)):
        count = int((places == place).sum())
        for begin in range(0, count, UNIT_ROWS):
            units.append((place, first + begin, min(UNIT_ROWS, count - begin)))
        first += count
    entries = [np.array(a.words(), np.int64) if a else None for a in adapters]
    table = np.zeros((len(adapters), PRODUCTS), np.int64)
    table[:, PRODUCT] = [0 if e is None else e.ctypes.data for e in entries]
    unit_words, num_units = np.array(units, np.int64), np.array([len(units)])
    t, found = torch.full((len(rows), RANKS), float("nan")), out.clone()
    common = [
        num_units.ctypes.data, unit_words.ctypes.data, table.ctypes.data, PRODUCT, PRODUCTS,
        order.ctypes.data,
    ]  # fmt: skip
    program = KernelProgram(num_threads)
    of_t = [t.data_ptr(), 4 * RANKS]
    program.record(SHRINK[kind], [*common, x.data_ptr(), 4 * K, K, *of_t, RANKS])
    program.record(EXPAND[kind], [*common, *of_t, found.data_ptr(), 4 * COLUMNS, COLUMNS])
    program.replay()
    return found


def drawn(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, K), torch.randn(rows, COLUMNS)


@pytest.mark.parametrize("kind", DTYPES)
def test_rows_of_different_adapters_equal_the_reference(kind: str) -> None:
    adapters = [Adapter.random(kind), None, Adapter.random(kind)]
    rows = [2, -1, 0, 1, 0, 2, 2, 0, 0, 0, -1, 2, 0]
    x, out = drawn(len(rows))
    found = run(adapters, rows, x, out)
    for row, place in enumerate(rows):
        adapter = adapters[place] if place >= 0 else None
        if adapter is None:
            assert torch.equal(found[row], out[row])
        else:
            expected = adapter.expected(out[row : row + 1], x[row : row + 1])
            torch.testing.assert_close(
                found[row : row + 1].double(), expected, atol=1e-3, rtol=1e-5
            )


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_bits_do_not_depend_on_the_batch(kind: str, num_threads: int) -> None:
    adapters: list[Adapter | None] = [Adapter.random(kind), Adapter.random(kind)]
    rows = [index % 3 - 1 for index in range(3 * UNIT_ROWS + 7)]
    x, out = drawn(len(rows))
    found = run(adapters, rows, x, out, num_threads)
    for row in (1, 2, 100, len(rows) - 2, len(rows) - 1):
        one = slice(row, row + 1)
        if rows[row] >= 0:
            assert torch.equal(found[one], run(adapters, [rows[row]], x[one], out[one]))


def test_a_b_of_zeros_changes_no_bit() -> None:
    adapter = Adapter.random("float32")
    for b in adapter.bs:
        b.zero_()
    x, out = drawn(5)
    assert torch.equal(run([adapter], [0] * 5, x, out), out)
