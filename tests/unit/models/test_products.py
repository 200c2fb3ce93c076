"""Ways of multiplying with a weight: equal to torch's own, and what they derive."""

from __future__ import annotations

import pytest
import torch

from shmllm.models import products
from shmllm.models.products import PackedProduct, PlainProduct, fastest_product

SHAPES = [(48, 80), (97, 33), (256, 512), (640, 1000)]


def matrices(shape: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """One as [in, out] and one as the transpose of [out, in]."""
    torch.manual_seed(3)
    weight = torch.randn(shape).to(dtype)
    return [weight, weight.t().contiguous().t()]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 64, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fastest_product_is_the_product(
    shape: tuple[int, int], rows: int, dtype: torch.dtype
) -> None:
    x = torch.randn(rows, shape[0]).to(dtype)
    for weight in matrices(shape, dtype):
        product = fastest_product(weight)
        product.derive()
        expected = x.double() @ weight.double()
        found = product(x)
        assert found.dtype is dtype
        assert found.shape == (rows, shape[1])
        tolerance = 1e-5 if dtype is torch.float32 else 1e-2
        scale = float(expected.abs().max())
        assert float((found.double() - expected).abs().max()) < tolerance * scale


def test_a_pack_is_made_again_of_the_weight_as_it_is_now() -> None:
    weight = torch.randn(640, 1000)
    product = PackedProduct(weight)
    assert product.derived_bytes == 0
    product.derive()
    assert product.derived_bytes == weight.nbytes
    weight.neg_()
    product.derive()
    x = torch.randn(16, 640)
    torch.testing.assert_close(product(x), x @ weight, rtol=1e-4, atol=1e-3)
    product.drop()
    assert product.derived_bytes == 0


def test_a_pack_that_gives_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(640, 1000)
    product = PackedProduct(weight)
    multiply = product._multiply
    monkeypatch.setattr(product, "_multiply", lambda *args: multiply(*args) + 1)
    product.derive()
    assert product.derived_bytes == 0
    x = torch.randn(16, 640)
    assert torch.equal(product(x), x @ weight)


def test_weights_that_are_not_finite_are_packed_too() -> None:
    weight = torch.randn(640, 1000)
    weight[3] = torch.nan
    product = PackedProduct(weight)
    product.derive()
    assert product.derived_bytes == weight.nbytes


def test_what_cannot_be_packed_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(fastest_product(torch.randn(8, 8).half()), PlainProduct)
    monkeypatch.setattr(products.torch._C, "_has_mkldnn", False)
    assert isinstance(fastest_product(torch.randn(8, 8)), PlainProduct)
