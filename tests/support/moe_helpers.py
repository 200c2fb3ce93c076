"""Runs the CPU's kernels of a mixture of experts, on memory that is NaN or -1 beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shmllm_kernels.cpu import KernelProgram
from shmllm_kernels.cpu.experts import DOWN, GATE_AND_UP, SCRATCH_BYTES, PairWeights
from shmllm_kernels.cpu.memory import word_of_float
from shmllm_kernels.cpu.pairs import BLOCK_WORDS, COMBINE, SORT, max_blocks
from shmllm_kernels.cpu.routing import MIXER, ROUTE, SIGMOID, SIGMOID_OF_TOP, SOFTMAX
from shmllm_kernels.reference.moe import Choice

GUARDS = 3
"""The number of rows after the last one that no kernel may write."""


@dataclass
class Experts:
    """The weights of a layer's experts; see `experts.GATE_AND_UP` for the shapes."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None
    activation: str = "silu"
    dtype: torch.dtype = torch.float32
    x_dtype: torch.dtype = torch.float32
    weighs_inputs: bool = False
    bound: float = 0.0

    @classmethod
    def random(
        cls,
        num_experts: int,
        hidden: int,
        inner: int,
        dtype: torch.dtype = torch.float32,
        activation: str = "silu",
        has_bias: bool = False,
    ) -> Experts:
        """Makes random weights whose outputs are about as large as their inputs."""

        def matrix(rows: int, width: int) -> Tensor:
            return torch.randn(num_experts, rows, width).mul_(width**-0.5).to(dtype)

        def bias(width: int) -> Tensor | None:
            return torch.randn(num_experts, width).to(dtype) if has_bias else None

        width = inner if activation in ("relu_squared", "gelu") else 2 * inner
        return cls(
            matrix(width, hidden), matrix(hidden, inner), bias(width), bias(hidden),
            activation=activation, dtype=dtype,
        )  # fmt: skip

    @property
    def kinds(self) -> tuple[str, str, str]:
        """The dtype names of the activations, the weights and the biases."""
        dtypes = self.x_dtype, self.gate_up.dtype, self.dtype
        x, weight, bias = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        return x, weight, bias

    def values(self, operand: str) -> Tensor | None:
        """Returns the values of "gate_up", "down" or their biases in float64."""
        tensor: Tensor | None = getattr(self, operand)
        scale: Tensor | None = getattr(self, f"{operand}_scale", None)
        if tensor is None:
            return None
        return tensor.double() if scale is None else tensor.double() * scale[..., None].double()


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class MoERun:
    """One mixture of experts with the buffers for some tokens.

    Attributes:
        ids, weights: the routing, [tokens, top_k].
        tokens: the tokens of the sorted pairs.
        places: [tokens, top_k], where each pair lies among the sorted ones.
        blocks: the blocks of the last run.
        num_threads: the number of threads of a run.
    """

    def __init__(self, num_experts: int, top_k: int, num_tokens: int, num_threads: int = 2) -> None:
        self.num_experts, self.top_k, self.num_threads = num_experts, top_k, num_threads
        rows, pairs = num_tokens + GUARDS, num_tokens * top_k + GUARDS
        self.num_tokens = num_tokens
        self._count = np.array([num_tokens])
        self._ids = torch.full((rows, top_k), -1)
        self._weights = torch.full((rows, top_k), torch.nan)
        self._places, self._tokens = torch.full((rows, top_k), -1), torch.full((pairs,), -1)
        self._firsts = torch.full((num_experts + GUARDS,), -1)
        most = max_blocks(num_tokens, top_k, num_experts)
        self._blocks = torch.full((most + GUARDS, BLOCK_WORDS), -1)
        self._num_blocks = np.array([-1, -1])
        self._guarded: list[tuple[Tensor, int]] = [
            (self._ids, num_tokens), (self._weights, num_tokens), (self._places, num_tokens),
            (self._tokens, num_tokens * top_k), (self._firsts, num_experts), (self._blocks, most),
        ]  # fmt: skip

    @property
    def ids(self) -> Tensor:
        return self._ids[: self.num_tokens]

    @property
    def weights(self) -> Tensor:
        return self._weights[: self.num_tokens]

    @property
    def tokens(self) -> Tensor:
        return self._tokens[: self.num_tokens * self.top_k]

    @property
    def places(self) -> Tensor:
        return self._places[: self.num_tokens]

    @property
    def blocks(self) -> list[list[int]]:
        """The blocks: the expert, the first pair and the number of pairs of each."""
        return self._blocks[: int(self._num_blocks[0])].tolist()

    def _run(self, record: Callable[[KernelProgram], None]) -> None:
        program = KernelProgram(self.num_threads)
        record(program)
        program.replay()
        for tensor, count in self._guarded:
            rest = tensor[count:]
            assert (rest.isnan() if rest.is_floating_point() else rest == -1).all(), (
                "wrote after the last row"
            )

    def _buffer(self, rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        buffer = torch.full((rows + GUARDS, width), torch.nan, dtype=dtype)
        self._guarded.append((buffer, rows))
        return buffer

    def route(
        self, logits: Tensor, choice: Choice | None = None, bias: Tensor | None = None
    ) -> None:
        """Chooses experts by logits [tokens, experts]; None: by their softmax."""
        choice = Choice(divides_by_all=True) if choice is None else choice
        operands = [address(logits), 4 * logits.shape[1], self.num_experts, self.top_k]
        places = [int(choice.divides_by_all), address(self._ids), address(self._weights)]
        ranks = torch.full((len(logits), self.num_experts + choice.num_groups), torch.nan)
        has_ranks = bias is not None or choice.num_groups > 1
        groups = [choice.num_groups, choice.top_groups, choice.num_best]
        extra = [address(ranks) if has_ranks else 0, address(bias), *groups]
        count, factors = (
            self._count.ctypes.data,
            map(word_of_float, (choice.scale, choice.mixer_limit or choice.total_eps)),
        )
        sigmoids = SIGMOID_OF_TOP if choice.ranks_logits else SIGMOID
        scores = MIXER if choice.mixer_limit else sigmoids if choice.is_sigmoid else SOFTMAX
        kernel = ROUTE[scores]
        row = [count, *operands, *places, *extra, *factors]
        self._run(lambda program: program.record(kernel, row))

    def route_to(self, ids: Tensor, weights: Tensor) -> None:
        """Sets the experts and weights, [tokens, top_k]."""
        self.ids.copy_(ids)
        self.weights.copy_(weights)

    def sort(self) -> None:
        """Sorts the pairs by expert."""
        count, num_blocks = self._count.ctypes.data, self._num_blocks.ctypes.data
        operands = [
            count, address(self._ids), self.num_experts, self.top_k, address(self._firsts),
            address(self._tokens), address(self._places), address(self._blocks), num_blocks,
        ]  # fmt: skip
        self._run(lambda program: program.record(SORT, operands))

    def experts(
        self,
        x: Tensor,
        experts: Experts,
        shared: Tensor | None = None,
        gates: Tensor | None = None,
    ) -> Tensor:
        """Sorts the pairs, computes them and combines them; returns [tokens, hidden]."""
        self.sort()
        e, pairs = experts, self.num_tokens * self.top_k
        hidden, inner = e.gate_up.shape[2], e.down.shape[2]
        activated = self._buffer(pairs, inner, e.x_dtype)
        rows = self._buffer(pairs, hidden)
        out, size = self._buffer(self.num_tokens, hidden), activated.element_size()
        x = x.to(e.x_dtype)
        scratch = torch.full((self.num_threads, SCRATCH_BYTES // 4), torch.nan)
        weights = torch.tensor(PairWeights(address(self._ids), address(self._weights), self.top_k))
        blocks = [self._num_blocks.ctypes.data, address(self._blocks)]
        gate_up = [
            *blocks, address(x), size * hidden, address(activated), size * inner,
            address(e.gate_up), inner, hidden, address(e.gate_up_scale), address(e.gate_up_bias),
            address(self._tokens), address(scratch),
            address(weights if e.weighs_inputs else None), 0, 0, 0, word_of_float(e.bound),
        ]  # fmt: skip
        down = [
            *blocks, address(activated), size * inner, address(rows), 4 * hidden, address(e.down),
            hidden, inner, address(e.down_scale), address(e.down_bias),
        ]  # fmt: skip
        combine = [
            self._count.ctypes.data, self.top_k, address(self._places), address(self._weights),
            address(rows), address(out), hidden, address(shared), address(gates), 4,
            0 if shared is None else 4 * shared.stride(0),
        ]  # fmt: skip

        def record(program: KernelProgram) -> None:
            program.record(GATE_AND_UP[*e.kinds, e.activation], gate_up)
            program.record(DOWN[e.kinds], down)
            program.record(COMBINE, combine)

        self._run(record)
        return out[: self.num_tokens]
