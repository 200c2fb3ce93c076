"""Products of steps of few tokens, which kernels compute together with their neighbours.

This module owns which kernel takes which rows and matrix. It must not know what the products are
for.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from shmllm.models.layers import Linear, Norm
from shmllm.models.matrices import Matrix, MixedMatrix, len_of, parts_of
from shmllm.worker.gpu.lora import GpuLora
from shmllm.worker.gpu.pending import Addend
from shmllm.worker.gpu.products import rows_of
from shmllm_kernels.gpu import few_rows, single_row
from shmllm_kernels.gpu.configs import has_dependent_launches
from shmllm_kernels.gpu.row_adapters import RowAdapters
from shmllm_kernels.gpu.row_operands import Activation, AddedNorm, RowNorm


def is_whole(matrix: Matrix) -> bool:
    """Return whether all rows of a matrix have one format."""
    return not isinstance(matrix, MixedMatrix)


class RowProducts:
    """Launches products of up to `few_rows.MAX_ROWS` rows.

    Args:
        device: the device; launches begin before those before them have ended where that can be.
        lora: the adapters of the step; None: there are none.
    """

    def __init__(self, device: torch.device, lora: GpuLora | None = None) -> None:
        self._device = device
        self._is_dependent = has_dependent_launches(device)
        self._lora = lora

    def linear(self, out: Tensor, x: Tensor, linear: Linear) -> None:
        """Compute ``out = x @ weight.T + bias``."""
        self.multiply(out, x, linear)

    def multiply(
        self,
        out: Tensor,
        x: Tensor,
        linear: Linear,
        norm: Norm | None = None,
        activation: Activation | None = None,
        adds: bool = False,
        scale: float = 1.0,
        has_bias: bool = True,
        added: AddedNorm | None = None,
        factors: Tensor | None = None,
    ) -> None:
        """Compute ``norm(x) @ weight.T + bias`` and what follows; see `few_rows.multiply_rows`.

        Args:
            out: [rows, out], or [rows, out / 2] for a gated activation, each row contiguous.
            x: [rows, in], each row contiguous.
            linear: the weights; a launch for each part whose format differs, of which a gated
                activation takes none.
            norm: the norm of the rows, or None.
            activation: the activation of the product, or None.
            adds: whether ``scale`` times the product is added to ``out``.
            scale: that factor.
            has_bias: whether the bias is added, if there is one.
            added: what is added to the rows before, or None.
            factors: [rows, out], what the activation is multiplied by, or None.
        """
        assert is_whole(linear.weight) or activation is None or not activation.is_gated, (
            "one format"
        )
        bias, begin = linear.bias if has_bias else None, 0
        adapters = None if self._lora is None else self._lora.of_rows(linear)
        before = norm_of_rows(norm)
        options = before, activation, adds, scale, self._is_dependent
        is_plain = adapters is None and added is None and (before is None or not before.has_mean)
        for part in parts_of(linear.weight):
            end, weight = begin + len_of(part), rows_of(part)
            own = out if is_whole(linear.weight) else out[:, begin:end]
            of_part = None if bias is None else bias[begin:end]
            of_columns = None if factors is None else factors[:, begin:end]
            if is_plain and len(x) == 1:
                config = single_row.config_of(weight, self._device)
                single_row.multiply_row(
                    own, x, weight, config, of_part, *options, factors=of_columns
                )
            else:
                tile = few_rows.config_of(weight, x.dtype, self._device)
                columns = _columns(adapters, begin, end)
                few_rows.multiply_rows(
                    own, x, weight, tile, of_part, *options, columns, added, of_columns
                )
            begin = end


def norm_of_rows(norm: Norm | None) -> RowNorm | None:
    """Return a norm as kernels take it."""
    if norm is None:
        return None
    spec = norm.spec
    return RowNorm(norm.weight, spec.eps, spec.offset, spec.kind == "layer", norm.bias)


def added_norm(added: Addend, kept: Tensor) -> AddedNorm:
    """Return what is added to rows before a product as kernels take it.

    Args:
        added: what is added, no pair.
        kept: [rows, in], where the sums are written.
    """
    assert added.pair is None, "one norm"
    before = norm_of_rows(added.norm)
    assert before is not None, "there is a norm"
    return AddedNorm(added.x, before, added.scale, kept, added.factor)


def _columns(adapters: RowAdapters | None, begin: int, end: int) -> RowAdapters | None:
    """Return the adapters of some columns of a product."""
    if adapters is None:
        return None
    places = replace(adapters.places, b=adapters.places.b[:, begin:end])
    return replace(adapters, places=places)
