"""The operations of steps of few tokens, several of them in one launch.

Norms and products are not launched when the decoder calls them, but together with what reads their
result: a norm with the products that read it, a product or the sum of experts with the addition to
the residual stream, a norm behind a block with that addition.
This module owns what is launched together; `GpuOps` launches what has no such neighbour.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shmllm.models.altup import AltUpLayer
from shmllm.models.compressed_attention import CompressedAttention
from shmllm.models.connections import Connection
from shmllm.models.delta_net import DeltaNet
from shmllm.models.experts import MoE
from shmllm.models.latent_attention import LatentAttention
from shmllm.models.layers import Linear, Norm, TokenEmbedding
from shmllm.models.lightning import Mamba2Like
from shmllm.models.mamba_mixer import Mamba
from shmllm.models.mlp import MLP
from shmllm.models.per_layer import LayerInput
from shmllm.models.routing import Routing
from shmllm.models.short_convolution import ShortConvolution
from shmllm.worker.gpu.activations import activate_mlp, needs_whole_product
from shmllm.worker.gpu.buffers import GpuBuffers
from shmllm.worker.gpu.ops import GpuOps
from shmllm.worker.gpu.pending import (
    Addend,
    Experts,
    Normed,
    NormedProduct,
    Pair,
    Product,
    Read,
    Route,
    Shared,
    Stream,
    SumOfNorms,
    reads_norm,
)
from shmllm.worker.gpu.row_products import RowProducts, added_norm, is_whole
from shmllm.worker.gpu.unfused_ops import UnfusedOps
from shmllm_kernels.gpu.row_operands import Activation


class FusedOps(UnfusedOps):
    """Launches the operations of `models.ops.Ops` for a step of few tokens, as `GpuOps` does, whose
    sizes of the step it uses. Its results are passed to it again, or to `value`: they need not be
    tensors.

    Args:
        ops: launches everything else.
        buffers: the buffers for the results.
        products: launches products, with what adapters add to them.
    """

    def __init__(self, ops: GpuOps, buffers: GpuBuffers, products: RowProducts) -> None:
        super().__init__(ops)
        self._buffers = buffers
        self._products = products
        self._stream: Stream | None = None
        self._normed: Normed | None = None
        self._unstored: Tensor | None = None

    def value(self, x: Any) -> Any:
        """Launch what a result is waiting for. Returns a tensor, or None for None."""
        if self._stream is not None and x is self._stream.given:
            self._settle_deferred(self._stream)
            self._add_normed(self._stream)
            return self._stream.now
        if isinstance(x, Normed):
            if x.value is None:
                self._add_normed(x.stream)
                x.value = self._ops.add_norm(None, x.stream.now, x.norm, 1.0)
                self._ops.scale(x.value, x.factor)
            return x.value
        if isinstance(x, Product):
            return self._multiply(x)
        if isinstance(x, NormedProduct):
            if x.value is None:
                x.value = self._ops.norm(self.value(x.read), x.norm)
            return x.value
        if isinstance(x, Experts):
            return self._ops.mixtures.experts(x.x, x.routing, x.moe, x.shared)
        if isinstance(x, SumOfNorms):
            total, second = self.value(x.first), x.second
            self._ops.add_normed(Addend(self.value(second.product), second.norm, 1.0), total)
            return total
        return x

    def _settle_deferred(self, stream: Stream) -> None:
        """Launch the sums that were deferred. Nobody may be going to read a norm of the stream as
        it was before."""
        deferred, stream.deferred = stream.deferred, []
        for x, scale in deferred:
            self._add_normed(stream)
            self._add(x, stream, scale)

    def _add_normed(self, stream: Stream) -> None:
        """Add the norm of a product to the stream, if there is one, in place."""
        if stream.added is not None:
            added, stream.added = stream.added, None
            self._ops.add_normed(added, stream.now)

    def _multiply(self, product: Product, out: Tensor | None = None, **options: Any) -> Tensor:
        """Launch a product; if it is a part of a sum over ranks, that sum, too. The result goes to
        the buffer of its width, or to another one; options are those of `RowProducts.multiply`."""
        linear = product.linear
        if out is None:
            out = self._buffers.product(linear.weight.shape[0])
        read = self._read(product.x)
        self._keep_added(out)
        out = out[: len(read.x)]
        if self._ops.meetings.is_partial(linear.weight):
            assert not options, "of a part of a sum nothing else is computed"
            self._multiply_part(read, linear)
            return self._ops.meetings.sum_parts(out)
        self._launch(out, read, linear, **options)
        return out

    def _keep_added(self, out: Tensor) -> None:
        """Launch the sum with what is to be added to the stream if it lies where a product goes."""
        stream = self._stream
        if stream is None or stream.added is None:
            return
        if out.data_ptr() in stream.added.places:
            self._add_normed(stream)

    def _multiply_part(self, read: Read, linear: Linear) -> None:
        meetings = self._ops.meetings
        part = meetings.part(len(read.x), linear.weight.shape[0])
        self._launch(part, read, linear, has_bias=meetings.has_rest)

    def _launch(self, out: Tensor, read: Read, linear: Linear, **options: Any) -> None:
        """Launch a product with the norms of what it reads. What is to be added to the stream is
        added by the product, which writes the stream to another place."""
        stream = read.stream
        if stream is not None and stream.added is not None and stream.added.pair is not None:
            self._add_normed(stream)  # a product computes one norm of what is added
        if stream is not None and stream.added is not None:
            options["added"] = added_norm(stream.added, stream.spare)
            stream.now, stream.spare, stream.added = stream.spare, stream.now, None
        self._products.multiply(out, read.x, linear, read.norm, **options)

    def _read(self, x: Any) -> Read:
        """Return what a product reads, and the norm that it computes before."""
        stream = self._stream
        if isinstance(x, Normed) and x.is_plain:
            return Read(x.stream.now, x.norm, x.stream)
        if isinstance(x, NormedProduct) and x.value is None:
            return Read(self.value(x.product), x.norm)
        if stream is not None and x is stream.given:
            self._settle_deferred(stream)
            return Read(stream.now, None, stream)
        return Read(self.value(x))

    def embed(self, embedding: TokenEmbedding) -> Tensor:
        return self._begin_stream(self._ops.embed(embedding))

    def project(self, x: Any, projection: Linear) -> Tensor:
        return self._begin_stream(self._ops.project(self.value(x), projection))

    def _begin_stream(self, rows: Tensor) -> Tensor:
        """Let rows be the residual stream; nothing is waiting for another one's sum."""
        self._stream, self._normed = Stream(rows, rows, self._buffers.spare[: len(rows)]), None
        return rows

    def receive(self) -> Tensor:
        return self._ops.receive()

    def add_norm(self, x: Any, residual: Any, norm: Norm | None, scale: float) -> Any:
        stream, last = self._stream, self._normed
        if stream is None or residual is not stream.given:
            return self._add_elsewhere(x, residual, norm, scale)
        if isinstance(x, Normed) or (stream.deferred and reads_norm(x)):
            x = self.value(x)  # before the stream changes
        if x is not None and norm is None and last is not None and last.stream is stream:
            stream.deferred.append((x, scale))  # the last norm may still be read
            return residual
        self._settle_deferred(stream)
        if x is not None:
            self._add_normed(stream)
            self._add(x, stream, scale)
        if norm is None:
            return residual
        self._normed = Normed(stream, norm)
        return self._normed

    def _add(self, x: Any, stream: Stream, scale: float) -> None:
        """Add to the stream, which is waiting for no sum: in place, or when it is read next."""
        if isinstance(x, Product) and self._is_plain(x.x):
            read = self._read(x.x)
            if self._ops.meetings.is_partial(x.linear.weight):
                self._multiply_part(read, x.linear)
                self._ops.meetings.add_parts(stream.now, scale)
            else:
                self._launch(stream.now, read, x.linear, adds=True, scale=scale)
        elif isinstance(x, NormedProduct) and x.value is None:
            stream.added = self._addend(x, scale)
        elif isinstance(x, Experts):
            self._ops.mixtures.add_experts(x.x, x.routing, x.moe, x.shared, stream.now, scale)
        else:
            self._ops.add_norm(self.value(x), stream.now, None, scale)

    def _addend(self, x: NormedProduct, scale: float) -> Addend:
        """Launch the products whose norm is to be added."""
        if not isinstance(x.product, SumOfNorms):
            return Addend(self.value(x.product), x.norm, scale)
        first, second = x.product.first, x.product.second
        rows = self.value(first.product)
        pair = Pair(self.value(second.product), second.norm, first.norm)
        return Addend(rows, x.norm, scale, pair)

    def _add_elsewhere(self, x: Any, residual: Any, norm: Norm | None, scale: float) -> Any:
        """Add to what is not the stream."""
        is_normed = isinstance(x, NormedProduct) and x.value is None
        if is_normed and norm is None and scale == 1 and isinstance(residual, NormedProduct):
            specs = x.norm.spec, residual.norm.spec
            if residual.value is None and specs[0] == specs[1]:
                return SumOfNorms(residual, x)
        out = self.value(residual)
        if is_normed:
            self._ops.add_normed(Addend(self.value(x.product), x.norm, scale), out)
            x = None
        return self._ops.add_norm(self.value(x), out, norm, scale)

    def _is_plain(self, x: Any) -> bool:
        """Return whether a product reads rows that are neither the stream nor a norm."""
        is_stream = self._stream is not None and x is self._stream.given
        return not is_stream and not isinstance(x, Normed | NormedProduct)

    def norm_sum(self, x: Any, residual: Any, norm: Norm, scale: float) -> Tensor:
        self.value(self.add_norm(x, residual, None, scale))
        return self._ops.norm(self.value(residual), norm)

    def linear(self, x: Any, linear: Linear) -> Any:
        return self._ops.linear(self.value(x), linear) if linear.adapters else Product(x, linear)

    def mlp(self, x: Any, mlp: MLP) -> Any:
        if not is_whole(mlp.gate_up_proj.weight) or mlp.gate_up_proj.adapters:
            return self._ops.mlp(self.value(x), mlp)
        product, spec = Product(x, mlp.gate_up_proj), mlp.spec
        out = self._buffers.activated(spec.inner)
        if needs_whole_product(mlp):
            projected = self._multiply(product)
            out = out[: len(projected)]
            activate_mlp(out, projected, mlp)
        else:
            activation = Activation(spec.activation, spec.gated)
            out = self._multiply(product, out, activation=activation)
        if mlp.norm is not None:
            out = self._ops.norm(out, mlp.norm)
        return self.linear(out, mlp.down_proj)

    def norm(self, x: Any, norm: Norm) -> Any:
        is_product = isinstance(x, Product | Experts) and norm.spec.kind == "rms"
        if is_product or (isinstance(x, SumOfNorms) and norm.spec == x.first.norm.spec):
            return NormedProduct(x, norm)
        width = len(norm.weight)
        if isinstance(x, Tensor) and x.shape[1] > width:
            return NormedProduct(x[:, :width], norm, wider=x)
        return self._ops.norm(self.value(x), norm)

    def scale(self, x: Any, factor: float, weight: Tensor | None = None) -> Any:
        stream = self._stream
        if isinstance(x, Normed) and x.value is None and weight is None:
            return Normed(x.stream, x.norm, x.factor * factor)
        if stream is not None and x is stream.given and factor == 1 and weight is not None:
            self._settle_deferred(stream)
            if stream.added is not None and stream.added.factor is None:
                stream.added.factor = weight
                return x
        return self._ops.scale(self.value(x), factor, weight)

    def gate_layer_input(self, x: Any, layer: LayerInput) -> Tensor:
        if not isinstance(x, Product) or self._ops.meetings.is_partial(x.linear.weight):
            return self._ops.gate_layer_input(self.value(x), layer)
        activation = Activation(layer.spec.activation, is_gated=False)
        out = self._ops.layer_inputs(layer)
        return self._multiply(x, out, activation=activation, factors=out)

    def predict_streams(self, routed: Any, altup: AltUpLayer) -> Tensor:
        return self._begin_stream(self._ops.predict_streams(self.value(routed), altup))

    def correct_streams(self, residual: Any, routed: Any, altup: AltUpLayer) -> Tensor:
        routed = self.value(routed)  # its product may add to the stream
        return self._ops.correct_streams(self.value(residual), routed, altup)

    def fold_streams(self, connection: Connection) -> Tensor:
        return self._begin_stream(self._ops.fold_streams(connection))

    def store_latents(self, x: Any, attention: LatentAttention) -> Tensor:
        # They are stored by the launch that projects the queries.
        assert isinstance(x, Product), "latents are a product"
        self._unstored = self._multiply(x, self._buffers.unstored(attention.spec.in_width))
        return self._unstored

    def attend_to_latents(self, query: Any, attention: LatentAttention) -> Tensor:
        x, self._unstored = self._unstored, None
        assert x is not None, "latents come before queries"
        return self._ops.latents.attend_few(self.value(query), x, attention)

    def store_keys(self, x: Any, attention: CompressedAttention) -> Tensor:
        assert isinstance(x, Product), "keys are a product"
        out = self._multiply(x, self._buffers.unstored(sum(attention.spec.first_widths)))
        return self._ops.store_keys(out, attention)

    def list_keys(self, x: Any, latent: Any, attention: CompressedAttention) -> None:
        def linear(x: Any, linear: Linear) -> Any:
            return self.value(self.linear(x, linear))

        self._ops.lists.list_keys(x, latent, attention, linear)

    def delta_net(self, x: Any, net: DeltaNet) -> Tensor:
        return self._ops.recurrent.delta_net_of_few(self.value(x), net)

    def low_rank(self, x: Any, down: Linear, up: Linear) -> Any:
        out = self._buffers.low_rank(down.weight.shape[0])
        return Product(self._multiply(Product(x, down), out), up)

    def mamba2(self, x: Any, mixer: Mamba2Like) -> Tensor:
        return self._ops.recurrent.mamba2_of_few(self.value(x), mixer)

    def mamba(self, x: Any, mixer: Mamba) -> Tensor:
        return self._ops.recurrent.mamba_of_few(self.value(x), mixer, self._products.linear)

    def short_convolution(self, x: Any, mixer: ShortConvolution) -> Tensor:
        return self._ops.recurrent.short_convolution(self.value(x), mixer, is_of_few=True)

    def route(self, x: Any, moe: MoE) -> Any:
        if not self._ops.mixtures.can_route_few(moe):
            return self._ops.route(self.value(x), moe)
        if not isinstance(x, Normed) or x.value is not None or x.norm.spec.kind != "rms":
            rows = self.value(x)
            return self._ops.route_few(rows, rows, None, moe)
        if x.factor != 1:
            return Route(x, moe)
        self._add_normed(x.stream)
        x.value = self._buffers.normed[: len(x.stream.now)]
        return self._ops.route_few(x.stream.now, x.value, x.norm, moe)

    def _route_apart(self, route: Route, x: Any) -> Routing:
        """Launch a choice of experts, with the norm ``x`` of the stream that the experts read."""
        read, moe = route.x, route.moe
        is_pair = isinstance(x, Normed) and x.is_plain and x.stream is read.stream
        if not is_pair or x.norm.spec != read.norm.spec:
            rows = self.value(read)
            return self._ops.route_few(rows, rows, None, moe)
        stream = read.stream
        self._add_normed(stream)
        x.value = self._buffers.normed[: len(stream.now)]
        return self._ops.route_few(stream.now, x.value, read.norm, moe, read.factor, x.norm)

    def experts(self, x: Any, routing: Any, moe: MoE) -> Any:
        if isinstance(routing, Route):
            routing = self._route_apart(routing, x)
        shared: Shared = self._ops.mixtures.joined_shared(moe)
        if moe.shared is not None and shared is None:
            shared = self.value(self.mlp(x, moe.shared))
        read = self.value(x)
        if moe.shared is None:
            shared = self._ops.mixtures.added_rows(moe, len(read))
        return Experts(read, routing, moe, shared)
