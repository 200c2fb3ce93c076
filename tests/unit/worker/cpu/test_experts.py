"""The kernels that a layer of experts records on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shmllm.models.experts import MoE
from shmllm.models.layers import Storage
from shmllm.models.specs import MoESpec
from shmllm.worker.cpu.experts import ExpertBuffers, ExpertOps
from shmllm.worker.cpu.products import Products
from shmllm_kernels.cpu import Kernel
from shmllm_kernels.cpu.pairs import SORT

SPEC = MoESpec(num_experts=6, top_k=2, inner=8)
HIDDEN, MAX_TOKENS = 16, 10


def _allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


class FakeProgram:
    """Keeps what is recorded."""

    num_threads = 2

    def __init__(self) -> None:
        self.recorded: list[tuple[Kernel, Sequence[int]]] = []
        self.kept: list[object] = []

    def record(
        self, kernel: Kernel, operands: Sequence[int], keep: Sequence[object] = (), label: str = ""
    ) -> None:
        self.recorded.append((kernel, operands))
        self.kept += keep


def test_no_layer_writes_the_number_by_which_another_one_counts_its_pieces() -> None:
    """A thread that comes late to a kernel counts its pieces while others run the next layer's: a
    number that changed meanwhile made it wait for ever."""
    program = FakeProgram()
    buffers = {SPEC: ExpertBuffers(_allocate, SPEC, HIDDEN, MAX_TOKENS)}
    ops = ExpertOps(program, Products(program, None), 0, 0, buffers)
    layers = [MoE(HIDDEN, SPEC, Storage(_allocate, torch.float32)) for _ in range(3)]
    for layer in layers:
        x = torch.zeros(MAX_TOKENS, HIDDEN)
        ops.experts(x, ops.route(x, layer), layer, None)
    written = [operands[-1] for kernel, operands in program.recorded if kernel is SORT]
    assert len(set(written)) == len(layers)
    kept = {tensor.data_ptr() for tensor in program.kept if isinstance(tensor, torch.Tensor)}
    assert kept >= set(written)
