"""The tests of the product of one row with its neighbours: it equals the single operations."""

from __future__ import annotations

import pytest
import torch
from conformance.packed_kernels import KINDS, drawn, rows_of, values_of, whole_rows
from support.kernel_helpers import assert_close, poisoned
from support.variants import diagonal

from shmllm_kernels.gpu.row_configs import SingleRowConfig
from shmllm_kernels.gpu.row_operands import Activation, RowNorm
from shmllm_kernels.gpu.single_row import config_of, multiply_row
from shmllm_kernels.reference.activation import activate

EPS = 1e-5
SMALL = SingleRowConfig(4, 32, 4)
ACTIVATIONS = {
    "none": None,
    "gated": Activation("silu", True),
    "alone": Activation("relu_squared", False),
}


def tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """Return the absolute and the relative tolerance: an intermediate result may be rounded to the
    next number of the dtype."""
    return {
        torch.float32: (1e-5, 1e-5),
        torch.float16: (4e-3, 4e-3),
        torch.bfloat16: (3e-2, 3e-2),
    }[dtype]


class Row:
    """The random inputs of one launch."""

    def __init__(self, draw, dtype, n, k, activation=None, norm_offset=None, has_bias=False):
        self.x = draw.normal(1, k, dtype=dtype)
        self.activation = activation
        height = 2 * n if activation is not None and activation.is_gated else n
        self.weight = draw.normal(height, k + 3, dtype=dtype, scale=k**-0.5)[:, :k]
        self.bias = draw.normal(height, dtype=dtype) if has_bias else None
        self.norm = None
        if norm_offset is not None:
            self.norm = RowNorm(draw.normal(k, dtype=dtype), EPS, norm_offset)
        self.out = poisoned(1, n + 2, dtype=dtype, device=draw.device)[:, :n]

    def run(self, config=SMALL, **options):
        operands = self.bias, self.norm, self.activation
        multiply_row(self.out, self.x, self.weight, config, *operands, **options)
        return self.out

    def want(self):
        x = self.x.double()
        if self.norm is not None:
            x /= (x.square().mean() + self.norm.eps).sqrt()
            x *= self.norm.weight.double() + self.norm.offset
        product = x @ self.weight.double().T
        if self.bias is not None:
            product += self.bias
        product = product.to(self.x.dtype)
        if self.activation is None:
            return product
        return activate(product, self.activation.name, self.activation.is_gated)


class PackedRow(Row):
    """A row whose matrix is packed."""

    def __init__(self, draw, dtype, kind, n, k, *options):
        k = whole_rows(kind, k)
        super().__init__(draw, dtype, n, k, *options)
        matrix = drawn(draw, kind, len(self.weight), k, dtype=dtype)
        self.weight, self.packed = values_of(matrix), rows_of(matrix)

    def run(self, **options):
        operands = self.bias, self.norm, self.activation
        multiply_row(
            self.out,
            self.x,
            self.packed,
            config_of(self.packed, self.x.device),
            *operands,
            **options,
        )
        return self.out


class PackedRowConformance:
    @pytest.mark.parametrize(
        ("kind", "options"),
        diagonal(
            KINDS,
            [(None, None, False), (ACTIVATIONS["gated"], 0.0, True), (ACTIVATIONS["alone"], 1.0)],
        ),
    )
    def test_equals_the_product_with_the_values(self, draw, dtype, kind, options):
        row = PackedRow(draw, dtype, kind, 9, 1300, *options)
        assert_close(row.run(), row.want(), *tolerances(dtype))

    @pytest.mark.parametrize(("n", "k"), [(1, 64), (4, 1024), (5, 100), (3, 2112), (0, 64)])
    def test_sizes(self, draw, dtype, n, k):
        row = PackedRow(draw, dtype, "int4", n, k, None, 0.0)
        assert_close(row.run(), row.want(), *tolerances(dtype))

    def test_the_sum_with_the_residual_stream(self, draw, dtype):
        row = PackedRow(draw, dtype, "q8_0", 9, 128)
        stream = draw.normal(1, 9, dtype=dtype)
        row.out.copy_(stream)
        got = row.run(adds=True, scale=0.25)
        wanted = (stream.float() + 0.25 * row.want().float()).to(dtype)
        assert_close(got, wanted, *tolerances(dtype))

    def test_what_the_activation_is_multiplied_by(self, draw, dtype):
        row = PackedRow(draw, dtype, "q8_0", 9, 128, ACTIVATIONS["alone"], 0.0)
        factors = draw.normal(1, 30, dtype=dtype)[:, 20:29]
        want = row.want() * factors
        assert_close(row.run(factors=factors), want, *tolerances(dtype))


class SingleRowConformance:
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_what_the_activation_is_multiplied_by(self, draw, dtype, activation):
        row = Row(draw, dtype, 21, 100, ACTIVATIONS[activation], 0.0)
        factors = draw.normal(1, 64, dtype=dtype)[:, 20:41]
        want = row.want() * factors
        assert_close(row.run(factors=factors), want, *tolerances(dtype))

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("norm_offset", [None, 0.0, 1.0])
    @pytest.mark.parametrize("has_bias", [False, True])
    def test_equals_the_single_operations(self, draw, dtype, activation, norm_offset, has_bias):
        row = Row(draw, dtype, 21, 48, ACTIVATIONS[activation], norm_offset, has_bias)
        assert_close(row.run(), row.want(), *tolerances(dtype))

    @pytest.mark.parametrize(
        ("n", "k"), [(1, 64), (16, 64), (7, 100), (5, 33), (4, 32), (9, 7), (0, 16)]
    )
    def test_sizes(self, draw, dtype, n, k):
        row = Row(draw, dtype, n, k, norm_offset=0.0)
        assert_close(row.run(), row.want(), *tolerances(dtype))

    @pytest.mark.parametrize("k", [2048, 4096, 8192, 14_336])
    @pytest.mark.parametrize("activation", ["none", "gated"])
    def test_the_configs_of_production(self, draw, dtype, k, activation):
        row = Row(draw, dtype, 8, k, ACTIVATIONS[activation], norm_offset=0.0)
        assert_close(row.run(config_of(row.weight, draw.device)), row.want(), *tolerances(dtype))

    @pytest.mark.parametrize("scale", [1.0, 0.25])
    def test_the_sum_with_the_residual_stream(self, draw, dtype, scale):
        row = Row(draw, dtype, 21, 48)
        stream = draw.normal(1, 21, dtype=dtype)
        row.out.copy_(stream)
        got = row.run(adds=True, scale=scale)
        wanted = (stream.float() + scale * row.want().float()).to(dtype)
        assert_close(got, wanted, *tolerances(dtype))

    def test_what_lies_beside_the_row_stays(self, draw, dtype):
        row = Row(draw, dtype, 21, 48)
        row.run()
        assert row.out._base is not None
        assert row.out._base[:, 21:].isnan().all()
