"""The tests of the kernels that read packed weights: values equal those of the matrices' `clone`,
bit for bit, and products equal those of the values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conformance.attention_kernels import product_of_single_rows
from conformance.expert_kernels import SMALL, placed, routed, tolerances
from support import packed_matrices
from support.kernel_helpers import Draw, assert_close, poisoned
from support.variants import diagonal, slow

from shmllm.models.matrices import FORMATS
from shmllm.models.quantized import QuantizedMatrix
from shmllm_kernels.gpu.configs import ProductConfig, packed_config
from shmllm_kernels.gpu.expert_sums import WeightedSum, combine
from shmllm_kernels.gpu.experts import down, gate_and_up
from shmllm_kernels.gpu.packings import PACKINGS, PackedRows
from shmllm_kernels.gpu.pairs import sort_pairs
from shmllm_kernels.gpu.products import linear
from shmllm_kernels.gpu.row_copies import TableShare, embed
from shmllm_kernels.reference import moe as plain
from shmllm_kernels.reference.step import LearnedRows
from shmllm_kernels.reference.step import embed as plain_embed

ONE_RUN, TWO_RUNS = ProductConfig(16, 32, 64, 4, 2), ProductConfig(32, 16, 128, 4, 2)
KINDS = tuple(FORMATS)
USUAL = ("int8", *packed_matrices.USUAL)
SHAPES = [(1, 1, 1, ONE_RUN), (3, 40, 65, ONE_RUN), (33, 17, 200, TWO_RUNS), (5, 33, 512, TWO_RUNS)]
"""Rows, columns, the elements of a row, and tile sizes."""


def whole_rows(kind: str, width: int) -> int:
    """The width in whole records of parameters."""
    is_record = PACKINGS[kind].stored in ("k", "k2", "k6", "k8")
    return -(-width // 256) * 256 if is_record else width


def drawn(draw: Draw, kind: str, *shape: int, dtype: torch.dtype) -> QuantizedMatrix:
    """A matrix of random codes, with parameters of random values."""
    matrix = FORMATS[kind].make(shape, dtype, lambda size, kind: torch.zeros(size, dtype=kind))
    matrix.copy_(draw.normal(*shape, dtype=dtype, scale=shape[-1] ** -0.5).cpu())
    codes = matrix.integers.view(torch.uint8)
    codes.copy_(draw.integers(0, 256, *codes.shape, dtype=torch.uint8))
    if kind == "fp8":
        codes[codes % 128 == 127] = 0  # no number
    return matrix.of_parts(matrix.integers.to(draw.device), matrix.scales.to(draw.device))


def rows_of(matrix: QuantizedMatrix) -> PackedRows:
    return PackedRows.of(matrix.kind, matrix.integers, matrix.scales, matrix.shape[-1])


def values_of(matrix: QuantizedMatrix) -> torch.Tensor:
    """The values, decoded by torch on the host."""
    moved = matrix.of_parts(matrix.integers.cpu(), matrix.scales.cpu())
    return moved.clone().to(matrix.device)


def unpacked(matrix: QuantizedMatrix) -> torch.Tensor:
    """The values as a product reads them: rows of an identity matrix choose one each."""
    columns, k = matrix.shape
    out = poisoned(k, columns, dtype=matrix.dtype, device=matrix.device)
    identity = torch.eye(k, dtype=matrix.dtype, device=matrix.device)
    linear(out, identity, rows_of(matrix), None, TWO_RUNS)
    return out.t()


class PackedKernelsConformance:
    def test_every_format_of_a_checkpoint_has_a_row(self):
        assert PACKINGS.keys() == FORMATS.keys()

    @pytest.mark.parametrize("kind", [kind if kind in USUAL else slow(kind) for kind in KINDS])
    def test_a_product_reads_the_values(self, draw, dtype, kind):
        matrix = drawn(draw, kind, 21, whole_rows(kind, 200), dtype=dtype)
        assert torch.equal(unpacked(matrix), values_of(matrix))

    @pytest.mark.parametrize(("kind", "shape"), diagonal(KINDS, SHAPES))
    def test_linear(self, draw, dtype, kind, shape):
        rows, columns, k, config = shape
        k = whole_rows(kind, k)
        matrix = drawn(draw, kind, columns, k, dtype=dtype)
        bias = draw.normal(columns, dtype=dtype) if rows % 2 else None
        wide = draw.normal(rows, k + 3, dtype=dtype)
        wide[:, k:] = torch.nan
        x = wide[:, :k]
        out = poisoned(rows, columns + 2, dtype=dtype, device=draw.device)
        linear(out[:, :columns], x, rows_of(matrix), bias, config)
        values = values_of(matrix).double()
        want = x.double() @ values.t() + (0 if bias is None else bias.double())
        error = x.double().abs() @ values.t().abs() * (1e-6 if dtype is torch.float32 else 1e-5)
        error += want.abs() * torch.finfo(dtype).eps
        assert ((out[:, :columns].double() - want).abs() <= error).all()
        assert out[:, columns:].isnan().all()

    def test_linear_with_the_tables_tile_sizes(self, draw, dtype):
        matrix = drawn(draw, "q4_k", 130, 512, dtype=dtype)
        x = draw.normal(130, 512, dtype=dtype)
        want = x.double() @ values_of(matrix).double().t()
        for rows in (0, 1, 20, 130):
            out = poisoned(rows, 130, dtype=dtype, device=draw.device)
            linear(out, x[:rows], rows_of(matrix), None, packed_config(x.device, rows, dtype))
            assert_close(out, want[:rows].to(dtype), *tolerances(dtype))

    @pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
    def test_all_codes_and_powers(self, draw, dtype, kind):
        matrix = drawn(draw, kind, 256, 64, dtype=dtype)
        every = torch.arange(256).to(torch.uint8)
        if kind == "fp8":
            matrix.integers[0].copy_(every[64:128])
            matrix.integers[1].copy_(every[192:])
        else:
            matrix.scales[:, 0].copy_(every)
            matrix.integers[:, :16].copy_(every[:16] * 17)
        got = torch.empty(256, 64, dtype=dtype, device=draw.device)
        ids = torch.arange(256, device=draw.device)
        embed(got, rows_of(matrix), ids, ids)
        torch.testing.assert_close(got, values_of(matrix), rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize(("kind", "width"), diagonal(KINDS, [64, 200, 1300]))
    def test_embed(self, draw, dtype, kind, width):
        width = whole_rows(kind, width)
        matrix = drawn(draw, kind, 9, width, dtype=dtype)
        last, ids = draw.integers(0, 9, 4), torch.tensor([3, -1, 8, -2, 12, -5, 0])
        ids = ids.to(draw.device)
        before = draw.normal(7, width, dtype=dtype)
        learned = [
            LearnedRows(draw.normal(rows, width, dtype=dtype), draw.integers(0, rows, 7))
            for rows in (20, 2)
        ]
        for scale, added in ((1.0, []), (1.7, learned[:1]), (1.0, learned)):
            out, want = before.clone(), before.clone()
            embed(out, rows_of(matrix), ids, last, scale, added)
            plain_embed(want, values_of(matrix), ids, last, scale, added)
            assert torch.equal(out, want)
        share, moved = TableShare(4, keeps=False), torch.where(ids >= 0, ids + 4, ids)
        out, want = before.clone(), torch.zeros_like(before)
        embed(out, rows_of(matrix), moved, last + 4, share=share)
        plain_embed(want, values_of(matrix), ids, last)
        assert torch.equal(out, want)

    @pytest.mark.parametrize(
        "kind",
        [kind if kind in ("int8", "q5_1", "q6_k", "mxfp4") else slow(kind) for kind in KINDS],
    )
    def test_experts(self, draw, dtype, kind):
        tokens, experts, top_k, has_bias = 5, 4, 2, PACKINGS[kind].form == "scaled"
        hidden, inner = whole_rows(kind, 72), whole_rows(kind, 40)
        x = draw.normal(tokens, hidden, dtype=dtype)
        ids, weights = routed(
            draw.normal(tokens, experts), top_k, plain.Choice(divides_by_all=True)
        )
        gate_up = drawn(draw, kind, experts, 2 * inner, hidden, dtype=dtype)
        last = drawn(draw, kind, experts, hidden, inner, dtype=dtype)
        biases = [None, None]
        if has_bias:
            biases = [draw.normal(*each.shape[:2], dtype=dtype) for each in (gate_up, last)]
        pairs = placed(tokens, top_k, experts, draw.device)
        sort_pairs(pairs, ids, experts, ONE_RUN.block_m)
        activated = poisoned(tokens * top_k, inner, dtype=dtype, device=draw.device)
        gate_and_up(activated, x, rows_of(gate_up), biases[0], "silu", top_k, pairs, ONE_RUN)
        rows = poisoned(tokens * top_k, hidden, dtype=dtype, device=draw.device)
        down(rows, activated, rows_of(last), biases[1], top_k, pairs, ONE_RUN)
        out = poisoned(tokens, hidden, dtype=dtype, device=draw.device)
        combine(WeightedSum(out, weights), rows)
        want = plain.experts(
            x.double(), ids.long(), weights.double(), values_of(gate_up).double(),
            values_of(last).double(), *(None if b is None else b.double() for b in biases), "silu",
        )  # fmt: skip
        atol, rtol = tolerances(dtype)
        assert_close(out, want.to(dtype), atol * float(want.abs().max()), rtol)

    def test_a_rows_bits_do_not_depend_on_the_batch(self, draw, dtype, monkeypatch):
        monkeypatch.setattr(np, "matmul", product_of_single_rows)
        matrix = drawn(draw, "q5_k", 24, 512, dtype=dtype)
        x = draw.normal(40, 512, dtype=dtype)

        def run(some: torch.Tensor, config: ProductConfig) -> torch.Tensor:
            out = poisoned(len(some), 24, dtype=dtype, device=draw.device)
            linear(out, x[some], rows_of(matrix), None, config)
            return out

        some = torch.tensor([3, 17, 18, 39], device=draw.device)
        every = torch.arange(40, device=draw.device)
        config = packed_config(every.device, 0, dtype)
        assert torch.equal(run(every, config)[some], run(some, config))

    def test_wrong_arguments_are_refused(self, draw, dtype):
        rows = rows_of(drawn(draw, "int4", 8, 64, dtype=dtype))
        x, out = draw.normal(2, 64, dtype=dtype), torch.empty(2, 8, dtype=dtype)
        out = out.to(draw.device)
        with pytest.raises(AssertionError, match="a row of k"):
            linear(out, x[:, :32], rows, None, ONE_RUN)
        with pytest.raises(AssertionError, match="one dtype"):
            linear(out.double(), x, rows, None, ONE_RUN)
        with pytest.raises(AssertionError, match="bias"):
            linear(out, x, rows, x[0], ONE_RUN)
        with pytest.raises(AssertionError, match="whole runs"):
            linear(out, x, rows, None, SMALL)
