"""The tests of the kernels of low-rank adapters: they equal `reference`."""

from __future__ import annotations

import pytest
import torch
from support.kernel_helpers import assert_close, poisoned
from torch import Tensor

from shmllm_kernels.gpu.lora import UNIT_ROWS, LoraPlaces, StepUnits, add_adapters
from shmllm_kernels.reference.lora import add_low_rank

PLACES = 3


def units_of(rows: list[int], device: torch.device, max_rows: int) -> StepUnits:
    """The units of a step.

    Args:
        rows: for each row its adapter's place; -1: none.
        device: of the tensors.
        max_rows: their size.
    """
    step = StepUnits.allocate(PLACES, max_rows, device)
    order = sorted((row for row, place in enumerate(rows) if place >= 0), key=rows.__getitem__)
    units, first = [], 0
    for place in range(PLACES):
        count = rows.count(place)
        for begin in range(0, count, UNIT_ROWS):
            units.append((place, first + begin, min(UNIT_ROWS, count - begin)))
        first += count
    if units:
        step.units[: len(units)] = torch.tensor(units, dtype=torch.int32)
        step.order[: len(order)] = torch.tensor(order, dtype=torch.int32)
    step.num_units[0] = len(units)
    return step


def tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """Return the absolute and the relative tolerance: what two roundings change."""
    return {
        torch.float32: (1e-4, 1e-5),
        torch.float16: (3e-2, 3e-3),
        torch.bfloat16: (2e-1, 2e-2),
    }[dtype]


class LoraConformance:
    """The rows of a step have adapters at places, or none."""

    @staticmethod
    def drawn(draw, dtype: torch.dtype, ranks: int, k: int, columns: int) -> LoraPlaces:
        a = draw.normal(PLACES, ranks, k, dtype=dtype, scale=k**-0.5)
        b = draw.normal(PLACES, columns, ranks, dtype=dtype)
        scales = torch.rand(PLACES, ranks, device=draw.device) + 0.5
        is_used = torch.tensor([1, 0, 1], dtype=torch.int32, device=draw.device)
        return LoraPlaces(a, b, scales, is_used)

    @staticmethod
    def expected(out: Tensor, x: Tensor, places: LoraPlaces, rows: list[int]) -> Tensor:
        want = out.clone()
        for row, place in enumerate(rows):
            if place in (0, 2):
                one = slice(row, row + 1)
                a = places.a[place].float() * places.scales[place][:, None]
                total = add_low_rank(
                    out[one].float(), x[one].float(), a, places.b[place].float(), 1
                )
                want[one] = total.to(out.dtype)
        return want

    @pytest.mark.parametrize(
        ("ranks", "k", "columns"), [(16, 64, 128), (24, 100, 130), (3, 48, 20), (48, 128, 300)]
    )
    def test_rows_of_several_adapters_and_of_none(self, draw, dtype, ranks, k, columns):
        rows = [2, -1, 0, 1, 0, *[2] * (UNIT_ROWS + 1), 0, -1]
        places = self.drawn(draw, dtype, ranks, k, columns)
        x, out = (
            draw.normal(len(rows), k, dtype=dtype),
            draw.normal(len(rows), columns, dtype=dtype),
        )
        want = self.expected(out, x, places, rows)
        t = poisoned(len(rows), ranks, dtype=dtype, device=draw.device)
        step = units_of(rows, draw.device, len(rows))
        before = out.clone()
        add_adapters(out, x, t, places, step)
        assert_close(out, want, *tolerances(dtype))
        for row, place in enumerate(rows):
            if place not in (0, 2):
                assert torch.equal(out[row], before[row])

    def test_a_router_s_logits_may_be_float32(self, draw, dtype):
        rows = [0, -1, 2, 0]
        places = self.drawn(draw, dtype, 16, 64, 24)
        x, out = draw.normal(4, 64, dtype=dtype), draw.normal(4, 24)
        want = self.expected(out, x, places, rows)
        t = poisoned(4, 16, dtype=dtype, device=draw.device)
        add_adapters(out, x, t, places, units_of(rows, draw.device, 4))
        assert_close(out, want, *tolerances(dtype))

    def test_a_step_without_adapters_changes_nothing(self, draw, dtype):
        places = self.drawn(draw, dtype, 16, 64, 96)
        x, out = draw.normal(5, 64, dtype=dtype), draw.normal(5, 96, dtype=dtype)
        before = out.clone()
        t = poisoned(5, 16, dtype=dtype, device=draw.device)
        add_adapters(out, x, t, places, units_of([-1] * 5, draw.device, 8))
        assert torch.equal(out, before)

    def test_bits_do_not_depend_on_the_other_rows(self, draw, dtype):
        rows = [0, 2, 0, 2, 2, 0]
        places = self.drawn(draw, dtype, 32, 96, 64)
        x, out = draw.normal(6, 96, dtype=dtype), draw.normal(6, 64, dtype=dtype)
        alone = [out[row : row + 1].clone() for row in range(6)]
        t = poisoned(6, 32, dtype=dtype, device=draw.device)
        add_adapters(out, x, t, places, units_of(rows, draw.device, 6))
        for row, place in enumerate(rows):
            step = units_of([place], draw.device, 1)
            add_adapters(alone[row], x[row : row + 1], t, places, step)
            assert torch.equal(alone[row][0], out[row])

    def test_wrong_arguments_are_refused(self, draw, dtype):
        places = self.drawn(draw, dtype, 16, 64, 96)
        x, out, t = (draw.normal(4, width, dtype=dtype) for width in (64, 96, 16))
        step = units_of([0] * 4, draw.device, 4)
        for wrong in ((out[:, :90], x, t), (out, x[:, :60], t), (out, x, t[:3])):
            with pytest.raises(AssertionError):
                add_adapters(*wrong, places, step)
