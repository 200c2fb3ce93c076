"""The operations of steps of few tokens, several of them in one launch.

Norms and products are not launched when the decoder calls them, but together with what reads their
result: a norm with the products that read it, a product or the sum of experts with the addition to
the residual stream, a norm behind a block with that addition.
This module owns what is launched together; `GpuOps` launches what has no such neighbour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shmllm.models.delta_net import DeltaNet
from shmllm.models.experts import MoE
from shmllm.models.latent_attention import LatentAttention
from shmllm.models.layers import MLP, AttentionHeads, Linear, Norm, TokenEmbedding
from shmllm.models.mamba2_mixer import Mamba2
from shmllm.models.mamba_mixer import Mamba
from shmllm.models.ops import Routing
from shmllm.models.per_layer import LayerInput, PerLayerInputs
from shmllm.worker.gpu.buffers import GpuBuffers
from shmllm.worker.gpu.ops import GpuOps
from shmllm.worker.gpu.row_products import RowProducts, is_whole
from shmllm_kernels.gpu.row_operands import Activation


@dataclass(slots=True, eq=False)
class _Normed:
    """A norm of the residual stream that has not been launched, or has been: then it has a value.
    The stream must not change before that."""

    residual: Tensor
    norm: Norm
    value: Tensor | None = None


@dataclass(slots=True, eq=False)
class _Product:
    """A product that has not been launched."""

    x: Tensor | _Normed | _NormedProduct
    linear: Linear


@dataclass(slots=True, eq=False)
class _Experts:
    """The sum of each token's experts, which has not been launched."""

    x: Tensor | _Normed
    routing: Routing
    moe: MoE
    shared: Tensor | None


@dataclass(slots=True, eq=False)
class _NormedProduct:
    """An RMSNorm of a product, or of a sum of experts, neither of which has been launched, unless
    there is a value."""

    product: _Product | _Experts
    norm: Norm
    value: Tensor | None = None


class FusedOps:
    """Launches the operations of `models.ops.Ops` for a step of few tokens, as `GpuOps` does, whose
    sizes of the step it uses. Its results are passed to it again, or to `value`: they need not be
    tensors.

    Args:
        ops: launches everything else.
        buffers: the buffers for the results.
        products: launches products, with what adapters add to them.
    """

    def __init__(self, ops: GpuOps, buffers: GpuBuffers, products: RowProducts) -> None:
        self._ops = ops
        self._buffers = buffers
        self._products = products
        self._normed: _Normed | None = None

    def value(self, x: Any) -> Any:
        """Launch what a result is waiting for. Returns a tensor, or None for None."""
        if isinstance(x, _Normed):
            if x.value is None:
                x.value = self._ops.add_norm(None, x.residual, x.norm, 1.0)
            return x.value
        if isinstance(x, _Product):
            return self._multiply(x)
        if isinstance(x, _NormedProduct):
            if x.value is None:
                x.value = self._ops.norm(self.value(x.product), x.norm)
            return x.value
        if isinstance(x, _Experts):
            read, norm = self._read_last(x.x)
            return self._ops.experts(read, x.routing, x.moe, x.shared, norm)
        return x

    def _multiply(self, product: _Product) -> Tensor:
        """Launch a product; if it is a part of a sum over ranks, that sum, too."""
        (read, norm), linear = self._read(product.x), product.linear
        out = self._buffers.product(linear.weight.shape[0])[: len(read)]
        if self._ops.meetings.is_partial(linear.weight):
            self._multiply_part(read, linear, norm)
            return self._ops.meetings.sum_parts(out)
        self._products.multiply(out, read, linear, norm)
        return out

    def _multiply_part(self, read: Tensor, linear: Linear, norm: Norm | None = None) -> None:
        part, has_bias = self._ops.meetings.part(len(read)), self._ops.meetings.has_rest
        self._products.multiply(part, read, linear, norm, has_bias=has_bias)

    def _read(self, x: Any) -> tuple[Tensor, Norm | None]:
        """Return what a product reads, and the norm that it computes before."""
        if isinstance(x, _Normed) and x.value is None:
            return x.residual, x.norm
        if isinstance(x, _NormedProduct) and x.value is None:
            return self.value(x.product), x.norm
        return self.value(x), None

    def _read_last(self, x: Any) -> tuple[Tensor, Norm | None]:
        """As `_read`, for experts: nothing reads the norm after them."""
        if x is self._normed:
            self._normed = None
        return self._read(x)

    def embed(self, embedding: TokenEmbedding) -> Tensor:
        self._normed = None
        return self._ops.embed(embedding)

    def receive(self) -> Tensor:
        return self._ops.receive()

    def add_norm(self, x: Any, residual: Any, norm: Norm | None, scale: float) -> Any:
        residual = self.value(residual)
        if x is not None:
            if norm is None and self._normed is not None and self._normed.residual is residual:
                self.value(self._normed)  # which may still be read
            self._add(x, residual, scale)
        if norm is None:
            return residual
        self._normed = _Normed(residual, norm)
        return self._normed

    def _add(self, x: Any, residual: Tensor, scale: float) -> None:
        """Add to the residual stream, in place."""
        if isinstance(x, _Product):
            read, norm = self._read(x.x)
            if norm is None and read is not residual:
                self._add_product(read, x.linear, residual, scale)
                return
        if isinstance(x, _NormedProduct) and x.value is None:
            self._ops.add_normed(self.value(x.product), residual, x.norm, scale)
            return
        if isinstance(x, _Experts):
            read, norm = self._read_last(x.x)
            self._ops.add_experts(read, x.routing, x.moe, x.shared, residual, scale, norm)
            return
        self._ops.add_norm(self.value(x), residual, None, scale)

    def _add_product(self, read: Tensor, linear: Linear, residual: Tensor, scale: float) -> None:
        if self._ops.meetings.is_partial(linear.weight):
            self._multiply_part(read, linear)
            self._ops.meetings.add_parts(residual, scale)
        else:
            self._products.multiply(residual, read, linear, adds=True, scale=scale)

    def add_level(self, residual: Any, level: int) -> None:
        self._ops.add_level(self.value(residual), level)

    def norm_sum(self, x: Any, residual: Any, norm: Norm, scale: float) -> Tensor:
        residual = self.value(residual)
        self._add(x, residual, scale)
        return self._ops.norm(residual, norm)

    def linear(self, x: Any, linear: Linear) -> Any:
        return _Product(x, linear)

    def mlp(self, x: Any, mlp: MLP) -> Any:
        if not is_whole(mlp.gate_up_proj.weight):
            return self._ops.mlp(self.value(x), mlp)
        read, norm = self._read(x)
        out, spec = self._buffers.activated(mlp.spec.inner)[: len(read)], mlp.spec
        activation = Activation(spec.activation, spec.gated)
        self._products.multiply(out, read, mlp.gate_up_proj, norm, activation)
        return self.linear(out, mlp.down_proj)

    def join(self, embeds: Any, hidden: Any, norms: tuple[Norm, Norm], projection: Linear) -> Any:
        return self._ops.join(self.value(embeds), self.value(hidden), norms, projection)

    def norm(self, x: Any, norm: Norm) -> Any:
        if isinstance(x, _Product | _Experts) and norm.spec.kind == "rms":
            return _NormedProduct(x, norm)
        return self._ops.norm(self.value(x), norm)

    def scale(self, x: Any, factor: float, weight: Tensor | None = None) -> Tensor:
        return self._ops.scale(self.value(x), factor, weight)

    def embed_per_layer(self, hidden: Any, inputs: PerLayerInputs) -> None:
        self._ops.embed_per_layer(self.value(hidden), inputs)

    def gate_layer_input(self, x: Any, layer: LayerInput) -> Tensor:
        return self._ops.gate_layer_input(self.value(x), layer)

    def attend(self, qkv: Any, attention: AttentionHeads) -> Tensor:
        return self._ops.attend(self.value(qkv), attention)

    def store_latents(self, x: Any, attention: LatentAttention) -> None:
        self._ops.store_latents(self.value(x), attention)

    def attend_to_latents(self, query: Any, attention: LatentAttention) -> Tensor:
        return self._ops.attend_to_latents(self.value(query), attention)

    def delta_net(self, x: Any, net: DeltaNet) -> Tensor:
        return self._ops.delta_net(self.value(x), net)

    def mamba2(self, x: Any, mixer: Mamba2) -> Tensor:
        return self._ops.mamba2(self.value(x), mixer)

    def mamba(self, x: Any, mixer: Mamba) -> Tensor:
        return self._ops.mamba(self.value(x), mixer)

    def route(self, x: Any, moe: MoE) -> Routing:
        read, norm = self._read(self._for_experts(x, moe))
        return self._ops.route(read, moe, norm)

    def experts(self, x: Any, routing: Routing, moe: MoE, shared: Any) -> Any:
        return _Experts(self._for_experts(x, moe), routing, moe, self.value(shared))

    def _for_experts(self, x: Any, moe: MoE) -> Any:
        """Launch what experts wait for, but a norm that they compute themselves."""
        if isinstance(x, _Normed) and self._ops.experts_take_norm(len(x.residual), x.norm, moe):
            return x
        return self.value(x)
