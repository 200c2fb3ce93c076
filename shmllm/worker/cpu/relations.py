"""What depends on query, key and distance in the scores of attention, on a CPU: the projections of
embeddings of distances, and a kernel that multiplies tokens by them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shmllm.models.attention import AttentionHeads
from shmllm.models.config import ModelConfig
from shmllm.models.layers import Allocator
from shmllm.models.relations import Relations
from shmllm.models.widths import relations_of
from shmllm.worker.cpu.inputs import CpuInputs
from shmllm.worker.cpu.norms import record_norm
from shmllm.worker.cpu.products import Products
from shmllm_kernels.cpu import KernelProgram, word_of_float
from shmllm_kernels.cpu.relations import COUNT_ROWS, RELATE


@dataclass(frozen=True, slots=True)
class RelationBuffers:
    """The buffers of a step, all float32.

    Attributes:
        embeddings: [rows, hidden], normalised embeddings.
        projected: [rows, width], their projections.
        biases: [max_tokens, num_heads, num_positions], what is added to scores.
    """

    embeddings: Tensor
    projected: Tensor
    biases: Tensor

    @classmethod
    def allocate(
        cls, allocate: Allocator, config: ModelConfig, max_tokens: int
    ) -> RelationBuffers | None:
        """Return the buffers of a model; None: it needs none."""
        if (spec := relations_of(config)) is None:
            return None
        (attention,) = set(config.attentions)
        shapes = (
            (spec.num_rows, config.hidden_size),
            (spec.num_rows, attention.in_width),
            (max_tokens, attention.num_heads, spec.num_positions),
        )
        return cls(*(allocate(shape, torch.float32) for shape in shapes))


class RelationOps:
    """Records what is added to the scores of attention in a kernel program.

    Args:
        program: the program to record in.
        products: records matrix products there.
        inputs: the inputs that the kernels read.
        buffers: the buffers for the results; None: the model needs none.
    """

    def __init__(
        self,
        program: KernelProgram,
        products: Products,
        inputs: CpuInputs,
        buffers: RelationBuffers | None,
    ) -> None:
        self._program = program
        self._products = products
        self._inputs = inputs
        self._buffers = buffers
        self._count = np.zeros(1, np.int64)  # of embeddings in a step

    def record(self, qkv: Tensor, attention: AttentionHeads) -> Tensor:
        """Record the sums for all scores of a layer.

        Args:
            qkv: [tokens, in_width] float32, which begins with queries and keys.
            attention: the layer.

        Returns:
            [max_tokens, num_heads, num_positions], by the position of the key.
        """
        relations, buffers, inputs = attention.relations, self._buffers, self._inputs
        assert relations is not None, "the layer has embeddings of distances"
        assert buffers is not None, "the model has them"
        counting = [inputs.address_of("num_requests"), inputs.context_lens.ctypes.data]
        counting += [relations.counts.data_ptr(), self._count.ctypes.data]
        self._program.record(COUNT_ROWS, counting, label="count_rows")
        projected = self._project(relations, buffers)
        to_keys, to_queries = (
            0 if column is None else projected[:, column:].data_ptr()
            for column in (relations.to_keys, relations.to_queries)
        )
        spec, out = attention.spec, buffers.biases
        rows = relations.rows[len(relations.rows) // 2 :].data_ptr()
        operands = [
            inputs.address_of("num_tokens"), qkv.data_ptr(), 4 * qkv.shape[1], spec.num_heads,
            spec.head_dim, to_keys, to_queries, 4 * projected.stride(0), rows,
            inputs.positions.ctypes.data, inputs.address_of_ends(spec.ahead), out.data_ptr(),
            out.shape[2], word_of_float(spec.scale),
        ]  # fmt: skip
        self._program.record(RELATE, operands, label="relate")
        return out

    def _project(self, relations: Relations, buffers: RelationBuffers) -> Tensor:
        """Record the projections of embeddings, and return them, [rows, width]."""
        count, rows = self._count.ctypes.data, relations.table
        if relations.norm is not None:
            rows = buffers.embeddings
            record_norm(self._program, count, None, relations.table, relations.norm, rows)
        for linear, column in relations.projections:
            columns = buffers.projected[:, column : column + linear.weight.shape[0]]
            self._products.record(count, rows, linear, columns)
        return buffers.projected
