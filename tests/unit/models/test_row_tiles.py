"""Numbers of rows that agree: functions that hide a dependence are found out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shmllm.errors import EngineStartError
from shmllm.models.products import PackedProduct, PlainProduct, fastest_product
from shmllm.models.quantized import Int8Product
from shmllm.models.row_tiles import ROW_COUNTS, RowTiles, find_row_counts, same_bits
from shmllm.models.tiled_activation import tiled_activation
from shmllm.models.tiled_product import TiledProducts, cancelling_factors
from shmllm_kernels import silu_and_mul

ROWS = torch.randn(256 + 69, 8, generator=torch.Generator().manual_seed(3))
DTYPES = [torch.float32, torch.bfloat16]


def test_a_function_of_rows_agrees_with_any_number() -> None:
    assert find_row_counts(lambda x: x * 2, ROWS) == ROW_COUNTS


def test_numbers_that_choose_another_kernel_are_left_out() -> None:
    found = find_row_counts(lambda x: x * (2 if len(x) in (1, 24) else 3), ROWS)
    assert set(ROW_COUNTS) - set(found) == {1, 24}


def test_a_dependence_on_place_or_neighbours_leaves_nothing() -> None:
    assert find_row_counts(lambda x: x + torch.arange(len(x))[:, None] % 2, ROWS) == (1,)
    assert find_row_counts(lambda x: x + x.mean(), ROWS) == (1,)
    counter = iter(range(10**6))
    assert find_row_counts(lambda x: x + next(counter), ROWS) == ()


def test_one_bit_is_a_difference() -> None:
    a = torch.tensor([1.0, 0.0, float("nan")])
    assert same_bits(a, a.clone())
    assert not same_bits(a, torch.tensor([1.0, -0.0, float("nan")]))
    assert not same_bits(a, torch.tensor([1.0 + 2**-23, 0.0, float("nan")]))


@pytest.mark.parametrize("counts", [(1, 2, 4, 8), (4, 16), (16,), (2, 64)])
def test_tiles_call_with_these_numbers_alone(counts: tuple[int, ...]) -> None:
    seen = set()

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.add(len(x))
        return x * 2

    tiles = RowTiles(function, counts)
    for num_rows in range(1, 150):
        assert torch.equal(tiles(ROWS[:num_rows]), ROWS[:num_rows] * 2)
    assert seen <= set(counts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(48, 97), (256, 512), (1537, 64)])
@pytest.mark.parametrize("make", [fastest_product, PlainProduct, Int8Product])
@torch.inference_mode()
def test_rows_of_a_product(make, shape, dtype) -> None:
    """Every number of rows, each row compared with itself alone, on cancelling numbers."""
    rows, weight = cancelling_factors(140, *shape, dtype)
    product = TiledProducts([make])(weight)
    product.derive()
    alone = torch.cat([product(rows[i : i + 1]) for i in range(len(rows))])
    for first, count in [(0, 140), (3, 1), (5, 2), (0, 3), (7, 7), (2, 17), (60, 33), (9, 128)]:
        assert same_bits(product(rows[first : first + count]), alone[first : first + count])
    if make is Int8Product:
        return
    expected = rows.double() @ weight.double()
    scale = float((rows.double().abs() @ weight.double().abs()).max())
    assert float((product(rows).double() - expected).abs().max()) < 1e-5 * scale


def test_the_numbers_tell_kernels_apart_that_add_in_another_order() -> None:
    """Some numbers of rows are added up in two pieces, which bfloat16 hides on others."""

    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        cut = 50 if len(x) in (1, 2, 48) else 0
        pieces = (x[:, :cut], weight[:cut]), (x[:, cut:], weight[cut:])
        return sum(a.float() @ b.float() for a, b in pieces).to(x.dtype)

    for dtype in DTYPES:
        rows, weight = cancelling_factors(256 + 69, 170, 64, dtype)
        found = find_row_counts(lambda x, w=weight: multiply(x, w), rows)
        assert not {1, 2, 48} & set(found)
        assert {16, 24, 64, 256} <= set(found)


def test_a_product_that_never_agrees_is_replaced_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = iter(range(10**6))
    multiply = PackedProduct.__call__
    monkeypatch.setattr(PackedProduct, "__call__", lambda p, x: multiply(p, x) + next(calls))
    product = TiledProducts([PackedProduct, PlainProduct])(torch.randn(64, 32))
    product.derive()
    assert product.derived_bytes == 0
    monkeypatch.setattr(PlainProduct, "__call__", lambda p, x: x @ p._weight + next(calls))
    with pytest.raises(EngineStartError, match=r"deterministic=True.*\(64, 32\)"):
        TiledProducts([PackedProduct, PlainProduct])(torch.randn(64, 32)).derive()


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_the_activation(num_threads: int, dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        tiles = tiled_activation(1376, dtype)
        x = (3 * torch.randn(300, 2 * 1376)).to(dtype)
        alone = torch.cat([silu_and_mul(x[i : i + 1]) for i in range(len(x))])
        for count in (1, 3, 33, 64, 127, 255, 300):
            assert same_bits(tiles(x[:count]), alone[:count])
            assert same_bits(tiles(x[300 - count :]), alone[300 - count :])
    finally:
        torch.set_num_threads(before)


def test_the_activation_is_silu() -> None:
    x = torch.randn(33, 64)
    expected = F.silu(x[:, :32].double()) * x[:, 32:].double()
    torch.testing.assert_close(tiled_activation(32, torch.float32)(x).double(), expected)
