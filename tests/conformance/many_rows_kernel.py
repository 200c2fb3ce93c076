"""The tests of the product of many rows: it equals the single operations, however many programs
compute it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conformance.single_row_kernel import ACTIVATIONS, tolerances
from support.kernel_helpers import assert_close, poisoned
from support.variants import diagonal

from shmllm_kernels.gpu.many_rows import (
    LEAST_ROWS,
    MOST_ROWS,
    ManyRowsScratch,
    multiply_rows,
    num_programs,
    takes,
)
from shmllm_kernels.gpu.row_configs import ManyRowsConfig, many_rows_config
from shmllm_kernels.reference.activation import activate

SMALL = ManyRowsConfig(64, 32, 32, 4, 2, 1, 0)
PROCESSORS = 5
"""So many programs that most tiles of the tests are divided among several."""


class Rows:
    """The random inputs of one launch."""

    def __init__(self, draw, dtype, rows, n, k, activation=None, has_bias=False):
        self.device, self.activation = draw.device, activation
        self.x = draw.normal(rows, k + 16, dtype=dtype)[:, :k]
        height = 2 * n if activation is not None and activation.is_gated else n
        self.weight = draw.normal(height, k + 8, dtype=dtype, scale=k**-0.5)[:, :k]
        self.bias = draw.normal(height, dtype=dtype) if has_bias else None
        self.out = poisoned(rows, n + 2, dtype=dtype, device=draw.device)[:, :n]

    def launch(self, config=SMALL, processors=PROCESSORS):
        """Return the scratch memory."""
        scratch = ManyRowsScratch.allocate(config, processors, self.device)
        scratch.sums.fill_(float("nan"))
        multiply_rows(
            self.out, self.x, self.weight, config, scratch, processors, self.bias, self.activation
        )
        return scratch

    def run(self, config=SMALL, processors=PROCESSORS):
        assert not self.launch(config, processors).counters.any()
        return self.out.clone()

    def want(self):
        product = self.x.double() @ self.weight.double().T
        if self.bias is not None:
            product += self.bias.double()
        product = product.to(self.x.dtype)
        if self.activation is None:
            return product
        return activate(product, self.activation.name, self.activation.is_gated)


class ManyRowsConformance:
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("has_bias", [False, True])
    def test_equals_the_single_operations(self, draw, dtype, activation, has_bias):
        rows = Rows(draw, dtype, 70, 40, 96, ACTIVATIONS[activation], has_bias)
        assert_close(rows.run(), rows.want(), *tolerances(dtype))

    @pytest.mark.parametrize(
        ("num_rows", "shape"),
        diagonal((0, 1, 64, 65, 150), [(1, 64), (32, 72), (33, 200), (100, 8), (0, 16)]),
    )
    def test_sizes(self, draw, dtype, num_rows, shape):
        rows = Rows(draw, dtype, num_rows, *shape)
        assert_close(rows.run(), rows.want(), *tolerances(dtype))

    @pytest.mark.parametrize("activation", ["none", "gated"])
    @pytest.mark.parametrize("processors", [1, 2, 3, 7, 11, 64])
    def test_any_number_of_programs(self, draw, dtype, activation, processors):
        """A program computes many tiles, or a few iterations of one; a tile has many programs."""
        rows = Rows(draw, dtype, 70, 56, 224, ACTIVATIONS[activation])
        found = rows.run(processors=processors)
        assert_close(found, rows.want(), *tolerances(dtype))
        assert torch.equal(found, rows.run(processors=processors))

    @pytest.mark.parametrize("n", [4096, 28_672])
    @pytest.mark.parametrize("activation", ["none", "gated"])
    def test_the_configs_of_production(self, draw, dtype, n, activation):
        if dtype is torch.float32:
            pytest.skip("no engine launches it in float32, which uses no tensor cores")
        config = replace(many_rows_config(n, "sm90"), num_stages=2)
        rows = Rows(draw, dtype, 136, 320, 320, ACTIVATIONS[activation])
        assert_close(rows.run(config), rows.want(), *tolerances(dtype))

    def test_a_row_depends_on_no_other(self, draw, dtype):
        rows = Rows(draw, dtype, 70, 40, 96)
        found = rows.run()
        rows.x[3:] = draw.normal(67, 96, dtype=dtype)
        assert torch.equal(rows.run()[:3], found[:3])

    def test_what_the_kernel_reads(self, draw, dtype):
        x = draw.normal(4, 40, dtype=dtype)
        assert takes(x, x)
        assert takes(x[:, 16:], x)
        assert not takes(x[:, 1:], x)
        assert not takes(x, x[:, ::2])
        assert not takes(draw.normal(4, 33, dtype=dtype), x)

    @pytest.mark.parametrize(
        ("config", "sizes", "want"),
        [
            ((128, 256), (256, 14_336, 4096, True), 132),  # 224 tiles
            ((128, 128), (256, 4096, 14_336, False), 128),  # two for each of 64 tiles
            ((128, 128), (256, 6144, 4096, False), 132),  # one for each of 96 would be too few
            ((128, 256), (256, 8192, 2048, True), 128),  # one for each tile
            ((128, 128), (256, 64, 128, False), 4),  # iterations
        ],
    )
    def test_programs_of_production(self, config, sizes, want):
        """On 132 multiprocessors; rows, columns, elements, and whether it is gated."""
        tile = ManyRowsConfig(*config, 64, 8, 4, 1, 0)
        assert LEAST_ROWS <= sizes[0] <= MOST_ROWS
        assert num_programs(tile, *sizes, 132) == want
