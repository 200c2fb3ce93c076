"""CPU kernels of several streams, and of sparse activations: compared with the reference, and
independent of the batch."""

from __future__ import annotations

import pytest
import torch
from support.cpu_kernels import run_kernel
from torch import Tensor

from shmllm_kernels.cpu import word_of_float
from shmllm_kernels.cpu.altup import COLUMNS, CORRECT, MATCH_MAGNITUDE, MOST_STREAMS, PREDICT
from shmllm_kernels.cpu.rows import ACTIVATIONS
from shmllm_kernels.cpu.sparse_activation import ACTIVATE_SPARSE
from shmllm_kernels.reference import altup
from shmllm_kernels.reference.activation import activate_sparse

KINDS = ["float32", "float16", "bfloat16"]
SHAPES = [(4, 3, 40), (1, 2, 24), (MOST_STREAMS, 5, 33), (3, 2, COLUMNS + 1), (2, 0, 16)]
FACTOR = 0.5


def draw(*shape: int, kind: str = "float32") -> Tensor:
    return torch.randn(*shape).to(getattr(torch, kind))


def places(streams: Tensor, active: int) -> list[Tensor | int]:
    return [streams, 4 * streams.stride(0), len(streams), streams.shape[2], active]


def predict(streams: Tensor, routed: Tensor, weight: Tensor, active: int, rows: int) -> Tensor:
    out, kind = torch.full(streams.shape[1:], torch.nan), str(weight.dtype).removeprefix("torch.")
    operands = [routed, word_of_float(FACTOR), weight, *places(streams, active), out]
    run_kernel(PREDICT[kind], rows, *operands)
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_streams_are_predicted(shape: tuple[int, int, int], kind: str) -> None:
    count, rows, _ = shape
    streams, routed, weight = draw(*shape), draw(rows, count), draw(count**2, count, kind=kind)
    want = altup.predict(streams, routed, weight.float(), FACTOR)
    out = predict(streams, routed, weight, count - 1, rows)
    torch.testing.assert_close(streams, want)
    assert torch.equal(out, streams[-1])


@pytest.mark.parametrize("has_scale", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_streams_are_corrected(shape: tuple[int, int, int], kind: str, has_scale: bool) -> None:
    (count, rows, width), active = shape, shape[0] // 2
    streams, x, routed = draw(*shape), draw(rows, width), draw(rows, count)
    weight, scale = draw(count, count, kind=kind), draw(width, kind=kind)
    want = altup.correct(streams, x, routed, weight.float(), FACTOR, active)
    operands = [routed, word_of_float(FACTOR), weight, *places(streams, active), x]
    run_kernel(CORRECT[kind], rows, *operands, scale if has_scale else 0)
    torch.testing.assert_close(streams, want)
    assert torch.equal(x, streams[active] * (scale.float() if has_scale else 1.0))


def test_a_row_does_not_depend_on_the_others() -> None:
    streams, routed, weight = draw(4, 9, 700), draw(9, 4), draw(16, 4)
    alone = streams[:, 5:6].clone()
    predict(streams, routed, weight, 0, 9)
    predict(alone, routed[5:6], weight, 0, 1)
    assert torch.equal(alone, streams[:, 5:6])


@pytest.mark.parametrize(("rows", "width"), [(0, 16), (3, 40), (2, 2049)])
def test_magnitudes_are_those_of_other_rows(rows: int, width: int) -> None:
    x, like, out = draw(rows, width), 7 * draw(rows, width), torch.full((rows, width), torch.nan)
    x[:1] *= 1e-4  # below the least mean square
    run_kernel(MATCH_MAGNITUDE, rows, x, like, out, width)
    torch.testing.assert_close(out, altup.match_magnitude(x, like))
    run_kernel(MATCH_MAGNITUDE, rows, x, like, x, width)
    assert torch.equal(x, out)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "width"), [(0, 16), (1, 1), (3, 40), (2, 2049)])
def test_gates_below_the_cut_of_their_row_are_zero(rows: int, width: int, name: str) -> None:
    x = draw(rows, 2 * width) * torch.arange(1.0, rows + 1)[:, None] + 3
    out = torch.full((rows, width), torch.nan)
    run_kernel(ACTIVATE_SPARSE[name], rows, x, out, width, word_of_float(0.8))
    torch.testing.assert_close(out, activate_sparse(x, name, 0.8), rtol=1e-5, atol=1e-4)
    alone = torch.empty(1, width)
    if rows:
        last = x[-1:].clone()
        run_kernel(ACTIVATE_SPARSE[name], 1, last, alone, width, word_of_float(0.8))
        assert torch.equal(alone, out[-1:])
