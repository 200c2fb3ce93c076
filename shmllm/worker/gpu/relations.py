"""What depends on query, key and distance in the scores of attention, on a GPU: the projections of
embeddings of distances, and a launch that multiplies tokens by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shmllm.models.attention import AttentionHeads
from shmllm.models.config import ModelConfig
from shmllm.models.layers import Allocator, Norm
from shmllm.models.widths import relations_of
from shmllm.worker.gpu.inputs import GpuInputs
from shmllm.worker.gpu.products import GpuProducts
from shmllm_kernels.gpu.relations import relate


@dataclass(frozen=True, slots=True)
class RelationBuffers:
    """The buffers of a step.

    Attributes:
        embeddings: [rows, hidden], normalised embeddings.
        projected: [rows, width], their projections.
        biases: [max_tokens, num_heads, num_positions] float32, what is added to scores.
    """

    embeddings: Tensor
    projected: Tensor
    biases: Tensor

    @classmethod
    def allocate(
        cls, allocate: Allocator, config: ModelConfig, dtype: torch.dtype, max_tokens: int
    ) -> RelationBuffers | None:
        """Return the buffers of a model; None: it needs none."""
        if (spec := relations_of(config)) is None:
            return None
        (attention,) = set(config.attentions)
        sizes = max_tokens, attention.num_heads, spec.num_positions
        return cls(
            allocate((spec.num_rows, config.hidden_size), dtype),
            allocate((spec.num_rows, attention.in_width), dtype),
            allocate(sizes, torch.float32),
        )


class RelationOps:
    """Launches what is added to the scores of attention.

    Args:
        products: launches matrix products.
        inputs: the step's inputs.
        buffers: the buffers for the results; None: the model needs none.
        norm: normalises rows in place.
    """

    def __init__(
        self,
        products: GpuProducts,
        inputs: GpuInputs,
        buffers: RelationBuffers | None,
        norm: Callable[[Tensor, Norm], Tensor],
    ) -> None:
        self._products = products
        self._inputs = inputs
        self._buffers = buffers
        self._norm = norm

    def launch(self, qkv: Tensor, attention: AttentionHeads) -> Tensor:
        """Launch the sums for all scores of a layer.

        Args:
            qkv: [tokens, in_width], which begins with queries and keys.
            attention: the layer.

        Returns:
            [tokens, num_heads, num_positions] float32, by the position of the key.
        """
        relations, buffers, spec = attention.relations, self._buffers, attention.spec
        assert relations is not None, "the layer has embeddings of distances"
        assert buffers is not None, "the model has them"
        rows, width = buffers.embeddings.copy_(relations.table), spec.query_width
        if relations.norm is not None:
            self._norm(rows, relations.norm)
        projected = buffers.projected
        for linear, column in relations.projections:
            columns = projected[:, column : column + linear.weight.shape[0]]
            self._products.linear(columns, rows, linear)
        to_keys, to_queries = (
            None if column is None else projected[:, column : column + width]
            for column in (relations.to_keys, relations.to_queries)
        )
        step, tokens = self._inputs.step, len(qkv)
        ends = self._inputs.ends(spec.ahead, tokens)
        assert ends is not None, "tokens attend to those behind them"
        out = buffers.biases[:tokens]
        parts = qkv[:, :width], qkv[:, width : 2 * width], to_keys, to_queries
        relate(out, *parts, relations.rows, step.positions[:tokens], ends, spec.scale)
        return out
