"""Matrix products on a CPU: which kernel computes one, and what its activations are rounded to."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shmllm.models.experts import MoE
from shmllm.models.matrices import Matrix, WholeMatrix, len_of, parts_of
from shmllm.models.mlp import MLP
from shmllm.models.quantized import QuantizedMatrix
from shmllm.worker.cpu.product_kernels import MULTIPLY, ROUND, ROUNDING, Kinds, row_bytes
from shmllm_kernels.cpu import KernelProgram, expert_tiles, gated_tiles
from shmllm_kernels.cpu.arithmetic import HAS_BFLOAT16
from shmllm_kernels.cpu.group_products import X_KINDS
from shmllm_kernels.cpu.tile_rounding import BLOCK_ROWS, TILED, tiled


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name, by which kernels are chosen."""
    return str(dtype).removeprefix("torch.")


def kind_of(weight: Matrix) -> str:
    """Return the name of the weight's dtype."""
    return dtype_name(weight.dtype)


class Projection(Protocol):
    """What a product multiplies with and adds.

    Attributes:
        weight: [out, in].
        bias: [out] or None.
    """

    @property
    def weight(self) -> Matrix: ...

    @property
    def bias(self) -> Tensor | None: ...


class _Rounded(NamedTuple):
    """Activations that were rounded last.

    num_rows, source: the addresses of their number, and of the activations in float32.
    kind: the first of `Kinds`.
    address, stride: the rounded rows.
    end: the number of kernels that the program had then. After further kernels `source` may be
        another one's, unless they are products.
    """

    num_rows: int
    source: int
    kind: str
    address: int
    stride: int
    end: int


class Products:
    """Records matrix products in a kernel program.

    Args:
        program: the program to record in.
        rounded: memory for the rounded activations of any product, bytes; None: no product rounds
            them.
        activation_dtype: what products round activations to, if there is a kernel for their
            weights.
        uses_tiles: whether products of rounded activations use AMX, but for experts.
    """

    def __init__(
        self,
        program: KernelProgram,
        rounded: Tensor | None,
        activation_dtype: str = "float32",
        uses_tiles: bool = False,
    ) -> None:
        self._uses_tiles = uses_tiles
        self._kernels = program
        self._rounded = rounded
        self._activation_dtype = activation_dtype
        self._latest: _Rounded | None = None

    def kinds(self, weight: WholeMatrix, is_exact: bool = False, is_grouped: bool = False) -> Kinds:
        """Return the kinds of a product.

        Args:
            weight: the matrix.
            is_exact: whether activations must stay float32.
            is_grouped: whether it is a product of experts, or with a matrix for each head. Their
                activations are not rounded to integers here: each has to know its largest.
        """
        dtype = kind_of(weight)
        stored = weight.kind if isinstance(weight, QuantizedMatrix) else dtype
        wanted = [] if is_exact else self._wanted(stored, is_grouped)
        possible = (each for each in wanted if (each, stored, dtype) in MULTIPLY)
        return next(possible, "float32"), stored, dtype

    def _wanted(self, stored: str, is_grouped: bool) -> list[str]:
        """Return the kinds of activations for weights of a kind, the best first."""
        dtype = self._activation_dtype
        is_integer, in_tiles = dtype in ("int8", "int16"), self._uses_tiles and not is_grouped
        by_groups = None if dtype == "int16" and in_tiles else X_KINDS.get((dtype, stored))
        kinds = [] if is_integer and is_grouped else [by_groups or dtype]
        if dtype == "int16" and HAS_BFLOAT16:
            kinds.append("bfloat16")
        return [name for kind in kinds for name in (tiled(kind), kind)] if in_tiles else kinds

    def activations(self, num_rows: int, x: Tensor, kind: str) -> tuple[int, int]:
        """Record the rounding of activations, unless they stay float32.

        Args:
            num_rows: the address of an int64, the number of rows.
            x: [rows, in] float32.
            kind: the kind of the result: the first of `kinds`.

        Returns:
            The address of the rows that a product reads, which the next call overwrites, and their
            stride in bytes. Only the product of as many rows can read those in tiles.
        """
        if kind == "float32":
            return x.data_ptr(), 4 * x.shape[1]
        latest = self._latest_still_valid()
        if latest is not None and latest[:3] == (num_rows, x.data_ptr(), kind):
            return latest.address, latest.stride
        assert self._rounded is not None, "`kinds` says so"
        stride, rows = row_bytes(x.shape[1], kind), len(x)
        if kind in TILED:
            rows = -(-rows // BLOCK_ROWS) * BLOCK_ROWS
        assert rows * stride <= self._rounded.nbytes, "the memory is for fewer activations"
        address = self._rounded.data_ptr()
        if not self._round_with_last(num_rows, x, kind, address, stride):
            operands = [num_rows, x.data_ptr(), address, x.shape[1], stride]
            self._kernels.record(ROUND[kind], operands, label="round")
        self._keep(num_rows, x, kind, address, stride)
        return address, stride

    def _round_with_last(
        self, num_rows: int, x: Tensor, kind: str, address: int, stride: int
    ) -> bool:
        """Let the kernel that was recorded last round the activations, if they are its result."""
        if self._kernels.last is None or (self._kernels.last[0], kind) not in ROUNDING:
            return False
        last, operands = self._kernels.last
        joined, index = ROUNDING[last, kind]
        if (operands[0], operands[index]) != (num_rows, x.data_ptr()):
            return False
        self._kernels.replace_last(joined, [*operands, address, stride])
        return True

    def _latest_still_valid(self) -> _Rounded | None:
        latest = self._latest
        return latest if latest is not None and latest.end == len(self._kernels) else None

    def _keep(self, num_rows: int, x: Tensor, kind: str, address: int, stride: int) -> None:
        end = len(self._kernels)
        self._latest = _Rounded(num_rows, x.data_ptr(), kind, address, stride, end)

    def joins(self, mlp: MLP) -> bool:
        """Return whether `record_gate_and_up` has a kernel for an MLP: by tiles, for both of its
        products, without a bias."""
        spec, (weight, *others) = mlp.spec, parts_of(mlp.gate_up_proj.weight)
        kinds = self.kinds(weight)
        reads = {self.kinds(part)[0] for part in parts_of(mlp.down_proj.weight)}
        return (
            spec.gated
            and not mlp.gate_up_proj.adapters
            and not spec.sparsity
            and spec.bound is None
            and spec.norm is None
            and not others
            and mlp.gate_up_proj.bias is None
            and spec.inner % gated_tiles.WIDTH_STEP == 0
            and (*kinds[:2], spec.activation) in gated_tiles.GATE_AND_UP
            and reads == {kinds[0]}
        )

    def joins_experts(self, moe: MoE) -> bool:
        """Return whether `expert_tiles` has kernels for a mixture of experts."""
        gate_up, down = moe.gate_up_proj, moe.down_proj
        kinds = self.tiled_expert_kinds(gate_up.weight)
        return (
            gate_up.bias is None
            and not moe.spec.weighs_inputs
            and moe.spec.inner % gated_tiles.WIDTH_STEP == 0
            and (*kinds[:2], moe.spec.activation) in expert_tiles.GATE_AND_UP
            and self.tiled_expert_kinds(down.weight) in expert_tiles.DOWN
        )

    def tiled_expert_kinds(self, weight: WholeMatrix) -> Kinds:
        """Return the kinds of a product of experts, by tiles if they can be."""
        kinds = self.kinds(weight, is_grouped=True)
        in_tiles = self._uses_tiles and kinds[0] == "bfloat16"
        return (tiled(kinds[0]), *kinds[1:]) if in_tiles else kinds

    def expert_kinds(self, moe: MoE) -> tuple[Kinds, Kinds]:
        """Return the kinds of both products of experts, without tiles. Activations are rounded by
        groups if both products have kernels for that."""
        weights = moe.gate_up_proj.weight, moe.down_proj.weight
        first, second = (self.kinds(weight, is_grouped=True) for weight in weights)
        groups = [X_KINDS.get((self._activation_dtype, each[1])) for each in (first, second)]
        if self._uses_tiles or groups[0] is None or groups[1] is None:
            return first, second
        return (groups[0], *first[1:]), (groups[1], *second[1:])

    def record_gate_and_up(self, num_rows: int, x: Tensor, mlp: MLP, out: Tensor) -> None:
        """Record ``out = act(x @ gate.T) * (x @ up.T)``, rounded for the product that is recorded
        next: `out` has no other numbers then.

        Args:
            num_rows: the address of an int64, the number of rows to compute.
            x: [rows, hidden] float32.
            mlp: an MLP that `joins`.
            out: [rows, inner] float32, the memory for the rounded rows.
        """
        weight = parts_of(mlp.gate_up_proj.weight)[0]
        x_kind, kind, _ = self.kinds(weight)
        stride = row_bytes(mlp.spec.inner, x_kind)
        numbers, scales = weights_of(weight)
        rows = [*self.activations(num_rows, x, x_kind), out.data_ptr(), stride]
        operands = [num_rows, *rows, numbers.data_ptr(), mlp.spec.inner, x.shape[1], scales]
        size = "x".join(map(str, weight.shape))
        kernel = gated_tiles.GATE_AND_UP[x_kind, kind, mlp.spec.activation]
        self._kernels.record(kernel, operands, label=f"gate_and_up {size}")
        self._keep(num_rows, out, x_kind, out.data_ptr(), stride)

    def record(
        self,
        num_rows: int,
        x: Tensor,
        linear: Projection,
        out: Tensor,
        *,
        is_exact: bool = False,
        has_bias: bool = True,
    ) -> None:
        """Record ``out = x @ weight.T + bias``.

        Args:
            num_rows: the address of an int64, the number of rows to compute.
            x: [rows, in] float32.
            linear: the weight and the bias.
            out: [rows, out] float32, whose rows may be parts of wider ones.
            is_exact: whether activations must stay float32.
            has_bias: whether the bias is added, if there is one.
        """
        x_kind, source, begin = "", (0, 0), 0
        for weight in parts_of(linear.weight):
            kinds = self.kinds(weight, is_exact)
            if kinds[0] != x_kind:  # rows of one kind overwrite those of another
                x_kind, source = kinds[0], self.activations(num_rows, x, kinds[0])
            numbers, scales = weights_of(weight)
            rows = [*source, out.data_ptr() + 4 * begin, 4 * out.stride(0)]
            bias = 0
            if linear.bias is not None and has_bias:
                bias = linear.bias[begin:].data_ptr()
            operands = [num_rows, *rows, numbers.data_ptr(), *weight.shape, scales, bias]
            size = "x".join(map(str, weight.shape))
            latest = self._latest_still_valid()
            self._kernels.record(MULTIPLY[kinds], operands, label=f"multiply {size}")
            if latest is not None and latest.source != out.data_ptr():
                self._latest = latest._replace(end=len(self._kernels))
            begin += len_of(weight)


def weights_of(weight: WholeMatrix) -> tuple[Tensor, int]:
    """Return a matrix's numbers, and the address of its scales or 0."""
    if isinstance(weight, QuantizedMatrix):
        return weight.integers, weight.scales.data_ptr()
    return weight, 0
