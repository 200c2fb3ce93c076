"""The operations of a mixture of experts on a GPU, and the buffers between their kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.experts import ExpertLinear, MoE
from shmllm.models.layers import Allocator
from shmllm.models.ops import Routing
from shmllm.models.specs import MoESpec
from shmllm_kernels.gpu.configs import ProductConfig, product_config
from shmllm_kernels.gpu.experts import down, gate_and_up
from shmllm_kernels.gpu.routing import SortedPairs, combine, max_blocks, route, sort_pairs

SMALLEST_BLOCK = 16
"""The smallest number of rows in a block of sorted pairs: then there are the most blocks."""


class ExpertBuffers:
    """The buffers of a mixture of experts. Its pairs are a token and one of its experts.

    Args:
        allocate: returns the memory of a tensor.
        spec: the mixture.
        hidden: the width of its input and output.
        dtype: the model's dtype.
        max_tokens: the largest number of tokens in a step.

    Attributes:
        logits: [max_tokens, experts], the router's output; with a shared gate one more.
        ids: [max_tokens, top_k] int32; see `Routing`.
        weights: [max_tokens, top_k] float32; see `Routing`.
        sorted: the pairs by their experts.
        activated: [pairs, inner], the output of the activation, by expert.
        rows: [max_tokens, top_k, hidden], the outputs of the experts.
        out: [max_tokens, hidden], their sums.
    """

    def __init__(
        self,
        allocate: Allocator,
        spec: MoESpec,
        hidden: int,
        dtype: torch.dtype,
        max_tokens: int,
    ) -> None:
        top_k, experts = spec.top_k, spec.num_experts
        pairs = max_tokens * top_k

        def integers(*shape: int) -> Tensor:
            return allocate(shape, torch.int32)

        self.logits = allocate((max_tokens, experts + int(spec.shared_gate)), dtype)
        self.ids = integers(max_tokens, top_k)
        self.weights = allocate((max_tokens, top_k), torch.float32)
        blocks = integers(max_blocks(pairs, experts, SMALLEST_BLOCK), 3)
        self.sorted = SortedPairs(integers(pairs), integers(experts), blocks, integers(1))
        self.activated = allocate((pairs, spec.inner), dtype)
        self.rows = allocate((max_tokens, top_k, hidden), dtype)
        self.out = allocate((max_tokens, hidden), dtype)


class ExpertOps:
    """Launches the operations of `models.ops.Ops` on experts.

    Args:
        buffers: the buffers of each mixture.
        deterministic: whether all steps have the same tile sizes, so that a token's bits do not
            depend on the number of tokens.
    """

    def __init__(self, buffers: dict[MoESpec, ExpertBuffers], deterministic: bool) -> None:
        self._buffers = buffers
        self._deterministic = deterministic

    def logits(self, spec: MoESpec, num_tokens: int) -> Tensor:
        """Return the buffer for the router's output."""
        return self._buffers[spec].logits[:num_tokens]

    def route(self, logits: Tensor, query_starts: Tensor, spec: MoESpec) -> Routing:
        """Choose the experts by the router's output, [tokens, experts] or one column more."""
        buffers, num_experts = self._buffers[spec], spec.num_experts
        routing = Routing(
            buffers.ids[: len(logits)],
            buffers.weights[: len(logits)],
            logits[:, num_experts] if spec.shared_gate else None,
        )
        divides_by_all = spec.scoring == "softmax" and not spec.renormalize
        chosen = routing.ids, routing.weights
        route(*chosen, logits[:, :num_experts], query_starts, divides_by_all)
        return routing

    def experts(self, x: Tensor, routing: Routing, moe: MoE, shared: Tensor | None) -> Tensor:
        spec, buffers, num_tokens = moe.spec, self._buffers[moe.spec], len(x)
        config = self._config(x, spec)
        sort_pairs(buffers.sorted, routing.ids, config.block_m)
        num_pairs = num_tokens * spec.top_k
        activated = buffers.activated[:num_pairs]
        gate_up = _weights(moe.gate_up_proj)
        pairs = buffers.sorted
        gate_and_up(activated, x, *gate_up, spec.activation, spec.top_k, pairs, config)
        rows, out = buffers.rows[:num_tokens], buffers.out[:num_tokens]
        down(rows.flatten(0, 1), activated, *_weights(moe.down_proj), pairs, config)
        combine(out, rows, routing.weights, shared, routing.shared_gates)
        return out

    def _config(self, x: Tensor, spec: MoESpec) -> ProductConfig:
        num_pairs = 0 if self._deterministic else len(x) * spec.top_k
        return product_config(x.device, -(-num_pairs // spec.num_experts), x.dtype)


def _weights(linear: ExpertLinear) -> tuple[Tensor, Tensor | None]:
    assert isinstance(linear.weight, Tensor)  # `check_model` refuses others
    return linear.weight, linear.bias
