"""Records the lookup of a step's tokens, and copies of rows, in a kernel program."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.layers import TokenEmbedding
from shmllm.models.quantized import QuantizedMatrix
from shmllm.worker.arrays import LongArray
from shmllm.worker.cpu.inputs import CpuInputs
from shmllm.worker.cpu.products import kind_of, weights_of
from shmllm_kernels.cpu import KernelProgram, word_of_float
from shmllm_kernels.cpu.rows import EMBED, EMBED_PACKED, GATHER


def record_lookup(
    program: KernelProgram, embedding: TokenEmbedding, inputs: CpuInputs, out: Tensor
) -> None:
    """Record the lookup of a step's tokens, and of what is added to their embeddings.

    Args:
        program: the program to record in.
        embedding: the tables.
        inputs: the inputs that the kernel reads.
        out: [tokens, width] float32, the result; embeddings that a prompt gives are there already.
    """
    table, positions, first = embedding.table, embedding.positions, embedding.first_token
    if positions is not None:
        positions = positions[embedding.first_position :]
    numbers, table_scales = weights_of(table)
    operands = [
        inputs.address_of("num_tokens"), inputs.token_ids.ctypes.data, numbers.data_ptr(),
        out.data_ptr(), table.shape[1], word_of_float(embedding.scale),
        word_of_float(embedding.embeds_scale), inputs.positions.ctypes.data, _address(positions),
        first, first + table.shape[0], inputs.token_types.ctypes.data,
        _address(embedding.token_types), _address(embedding.added),
    ]  # fmt: skip
    if isinstance(table, QuantizedMatrix):
        kernel = EMBED_PACKED[table.kind, kind_of(table)]
        program.record(kernel, [*operands, table_scales], label="embed")
    else:
        program.record(EMBED[kind_of(table)], operands, label="embed")


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def record_gather(
    program: KernelProgram, num_rows: int, indices: LongArray, source: Tensor, out: Tensor
) -> None:
    """Record ``out[row] = source[indices[row]]``.

    Args:
        program: the program to record in.
        num_rows: the address of an int64, the number of rows to copy.
        indices: (rows,) int64.
        source: [tokens, width] float32.
        out: [rows, width] float32.
    """
    addresses = [indices.ctypes.data, source.data_ptr(), out.data_ptr()]
    program.record(GATHER, [num_rows, *addresses, out.shape[1]], label="gather")
