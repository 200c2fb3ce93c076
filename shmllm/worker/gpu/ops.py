"""A decoder's operations on a GPU: each call launches kernels on buffers of the step's size.

This module owns which kernel computes an operation. It must not know requests, nor whether a launch
is executed or captured; it knows only that attention may be kept out of captures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shmllm.models.attention import AttentionHeads
from shmllm.models.config import ModelConfig
from shmllm.models.delta_net import DeltaNet
from shmllm.models.experts import MoE
from shmllm.models.kimi_delta import KimiDelta
from shmllm.models.latent_attention import LatentAttention
from shmllm.models.layers import Linear, Norm, TokenEmbedding
from shmllm.models.lightning import Mamba2Like
from shmllm.models.mamba_mixer import Mamba
from shmllm.models.mlp import MLP
from shmllm.models.per_layer import LayerInput, PerLayerInputs
from shmllm.models.rope import attention_factor, axes, inverse_frequencies
from shmllm.models.routing import Routing
from shmllm.models.short_convolution import ShortConvolution
from shmllm.worker.gpu.activations import activate_mlp, needs_whole_product
from shmllm.worker.gpu.attention import AttentionOps, AttentionStep
from shmllm.worker.gpu.buffers import GpuBuffers
from shmllm.worker.gpu.cache import GpuKVCache
from shmllm.worker.gpu.compressed_attention import CompressedAttentionOps, CompressedLaunches
from shmllm.worker.gpu.embeddings import look_up
from shmllm.worker.gpu.experts import ExpertOps
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor
from shmllm.worker.gpu.group import NoMeetings
from shmllm.worker.gpu.inputs import GpuInputs
from shmllm.worker.gpu.latent_attention import LatentAttentionOps
from shmllm.worker.gpu.lora import GpuLora
from shmllm.worker.gpu.pending import Addend
from shmllm.worker.gpu.per_layer import PerLayerOps
from shmllm.worker.gpu.piecewise_graph import Call
from shmllm.worker.gpu.products import GpuProducts
from shmllm.worker.gpu.recurrent import RecurrentOps
from shmllm.worker.gpu.streams import StreamLaunches
from shmllm_kernels.gpu.few_rows import MAX_ROWS
from shmllm_kernels.gpu.norm import NormedPair, add_normed, add_rms_norm, layer_norm, rms_norm
from shmllm_kernels.gpu.row_copies import gather_rows
from shmllm_kernels.gpu.row_operands import Activation
from shmllm_kernels.gpu.step import rope_tables
from shmllm_kernels.gpu.weights_ahead import WeightsAhead


def call_now(call: Call) -> None:
    """Launch attention at once."""
    call()


class GpuOps(CompressedLaunches, StreamLaunches):
    """Launches the operations of `models.ops.Ops`. The launches' arguments depend only on the sizes
    given to `begin`, and not on the contents of the device's memory.

    Args:
        config: the model's configuration.
        cache: the KV cache.
        inputs: the step's inputs.
        buffers: the buffers for the results.
        device: the device.
        lora: launches what adapters add to products; None: nothing.
        meetings: launches sums over the ranks of a group; None: the process is alone.
        rotates_apart, ahead: see `AttentionOps`.

    Attributes:
        products: launches matrix products.
        latents, recurrent: launch latent attention, and layers with a recurrent state.
        mixtures: launches mixtures of experts.
        meetings: as given.
        is_fused: whether the step has so few tokens that products are launched with their
            neighbours; see `FusedOps`.
    """

    def __init__(
        self,
        config: ModelConfig,
        cache: GpuKVCache,
        inputs: GpuInputs,
        buffers: GpuBuffers,
        device: torch.device,
        lora: GpuLora | None = None,
        meetings: NoMeetings | None = None,
        rotates_apart: bool = False,
        ahead: Mapping[int, WeightsAhead] | None = None,
    ) -> None:
        super().__init__(buffers)
        self._lora = lora
        self.meetings = meetings or NoMeetings()
        self._cache = cache
        self._inputs = inputs
        self.products = GpuProducts(buffers.attention.deterministic, device, buffers.many_products)
        self.latents = LatentAttentionOps(cache, inputs, buffers)
        self.lists = CompressedAttentionOps(cache, inputs, buffers)
        self.recurrent = RecurrentOps(cache, inputs, buffers)
        self.mixtures = ExpertOps(
            inputs, buffers.experts, self.products, lora, self.meetings, buffers.routed
        )
        self._per_layer = PerLayerOps(self.products, inputs, buffers.per_layer)
        rest = self.norm, self.products, rotates_apart, ahead or {}
        self._attends = AttentionOps(cache, inputs, buffers, *rest)
        self._frequencies = {rope: inverse_frequencies(rope).to(device) for rope in config.ropes}
        self._axes = {
            rope: torch.tensor(axes(rope), device=device)
            for rope in config.ropes
            # A model that drafts uses the inputs of another one, which may have no axes.
            if rope.sections and len(inputs.step.rope_positions)
        }
        self.begin(BatchDescriptor(1, 1, True), 1)

    def begin(
        self,
        descriptor: BatchDescriptor,
        max_query_len: int,
        launch_attention: Callable[[Call], None] = call_now,
    ) -> None:
        """Set the sizes of the next forward pass.

        Args:
            descriptor: the padded sizes of the step.
            max_query_len: the largest number of tokens of a request; ignored for uniform steps.
            launch_attention: called with each launch of attention, at once or to launch it in each
                replay. A later launch uses the sizes of the latest call of `begin`, except the
                number of tokens.
        """
        self.meetings.restart()
        self._descriptor = descriptor
        self.is_fused = descriptor.num_tokens <= MAX_ROWS
        has_many = self.products.has_many(descriptor.num_tokens)
        is_dependent = (self.is_fused or has_many) and self.products.is_dependent
        self._norms_are_dependent = is_dependent
        launches = self._buffers.attention.choose(descriptor, max_query_len)
        step = AttentionStep(descriptor, launches, launch_attention, is_dependent, self.is_fused)
        for mixers in (self._attends, self.latents, self.lists, self.recurrent):
            mixers.begin(step)

    def variants(
        self, max_tokens: int, max_requests: int, has_packed: bool
    ) -> list[BatchDescriptor]:
        """Return a small step for each choice of kernels.

        Args:
            max_tokens: the largest number of tokens in a step.
            max_requests: the largest number of requests in a step.
            has_packed: whether the model has packed matrices.
        """

        def tiles(step: BatchDescriptor) -> tuple[int, ...]:
            rows = self.mixtures.rows_of_experts(step.num_tokens)
            if has_packed:
                rows += [step.num_tokens, step.num_samples]
            kernel = (step.num_tokens > 1) + (step.num_tokens > MAX_ROWS)
            kernel += self.products.has_many(step.num_tokens)
            layouts = self.mixtures.sorts_apart(step.num_tokens)
            return (kernel, *layouts, *(self.products.tile(count) for count in rows))

        return self._buffers.attention.variants(max_tokens, max_requests, tiles)

    def embed(self, embedding: TokenEmbedding) -> Tensor:
        out = self._buffers.embeds[: self._descriptor.num_tokens]
        look_up(out, embedding, self._inputs, self.meetings)
        self.compute_angles()
        return out

    def compute_angles(self) -> None:
        """Compute the angles by which the step's tokens are rotated."""
        num_tokens, step = self._descriptor.num_tokens, self._inputs.step
        for rope, frequencies in self._frequencies.items():
            cos, sin = (table[:num_tokens] for table in self._buffers.angles[rope])
            of_pairs = self._axes.get(rope)
            positions = step.positions if of_pairs is None else step.rope_positions
            of_rope = positions[..., :num_tokens]
            rope_tables(cos, sin, of_rope, frequencies, attention_factor(rope), of_pairs)
        positions = step.positions[:num_tokens]
        for (rope, rate), tables in self._buffers.window_angles.items():
            cos, sin = (table[:num_tokens] for table in tables)
            factor = attention_factor(rope)
            rope_tables(cos, sin, positions, self._frequencies[rope], factor, rate=rate)

    def project(self, x: Tensor, projection: Linear) -> Tensor:
        out = self._buffers.hidden[: len(x)]
        self.products.linear(out, x, projection)
        return out

    def receive(self) -> Tensor:
        raise AssertionError("a GPU computes all layers")

    def add_norm(
        self, x: Tensor | None, residual: Tensor, norm: Norm | None, scale: float
    ) -> Tensor:
        if norm is None:
            return residual if x is None else residual.add_(x, alpha=scale)
        out, spec = self._buffers.normed[: len(residual)], norm.spec
        if spec.kind == "layer":
            added, stream = (residual, None) if x is None else (x, residual)
            layer_norm(out, added, norm.weight, norm.bias, spec.eps, stream, scale, spec.offset)
        elif x is None:
            options = spec.eps, spec.offset, self._norms_are_dependent
            rms_norm(out, residual, norm.weight, *options)
        else:
            with_sum = spec.eps, scale, spec.offset, self._norms_are_dependent
            add_rms_norm(out, x, residual, norm.weight, *with_sum)
        return out

    def add_normed(self, added: Addend, residual: Tensor) -> None:
        """Add an RMSNorm to the residual stream, in place."""
        spec, pair = added.norm.spec, None
        if added.pair is not None:
            weights = added.pair.norm.weight, added.pair.first_norm.weight
            pair = NormedPair(added.pair.x, *weights)
        numbers = spec.eps, added.scale, spec.offset
        others = added.factor, pair, self.products.is_dependent
        add_normed(added.x, residual, added.norm.weight, *numbers, *others)

    def add_level(self, residual: Tensor, level: int) -> None:
        levels, meetings = self._buffers.levels[level, : len(residual)], self.meetings
        if not meetings.are_needed:
            residual.add_(levels)
            return
        part = meetings.part(*residual.shape)
        if meetings.has_rest:  # rank 0 alone encodes images
            part.copy_(levels)
        else:
            part.zero_()
        meetings.add_parts(residual, 1.0)

    def norm_sum(self, x: Tensor, residual: Tensor, norm: Norm, scale: float) -> Tensor:
        return self.norm(self.add_norm(x, residual, None, scale), norm)

    def join(
        self, embeds: Tensor, hidden: Tensor, norms: tuple[Norm, Norm], projection: Linear
    ) -> Tensor:
        joined = self.beside(self.norm(embeds, norms[0]), self.norm(hidden, norms[1]))
        self.products.linear(embeds, joined, projection)
        return embeds

    def given(self) -> Tensor:
        return self._buffers.given[: self._descriptor.num_tokens]

    def beside(self, first: Tensor, second: Tensor) -> Tensor:
        joined = self._buffers.joined(2 * first.shape[1])[: len(first)]
        return torch.cat((first, second[:, : first.shape[1]]), 1, out=joined)

    def set_aside(self, residual: Tensor) -> None:
        self._buffers.aside[: len(residual)].copy_(residual)

    def aside(self) -> Tensor:
        return self._buffers.aside[: self._descriptor.num_tokens]

    def keep(self, residual: Tensor, place: int) -> None:
        self._buffers.kept[: len(residual), place].copy_(residual)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        out, spec, width = x, norm.spec, len(norm.weight)
        if x.shape[1] > width:
            out, x = self._buffers.unprojected(width)[: len(x)], x[:, :width]
        if spec.kind == "layer":
            layer_norm(out, x, norm.weight, norm.bias, spec.eps, offset=spec.offset)
        else:
            rms_norm(out, x, norm.weight, spec.eps, spec.offset)
        return out

    def scale(self, x: Tensor, factor: float, weight: Tensor | None = None) -> Tensor:
        if factor != 1:
            x.mul_(factor)
        return x if weight is None else x.mul_(weight)

    def clip(self, x: Tensor, bound: float) -> Tensor:
        return x.clamp_(-bound, bound)

    def embed_per_layer(self, hidden: Tensor, inputs: PerLayerInputs) -> None:
        self._per_layer.embed(hidden, inputs)

    def gate_layer_input(self, x: Tensor, layer: LayerInput) -> Tensor:
        return self._per_layer.gate(x, layer)

    def layer_inputs(self, layer: LayerInput) -> Tensor:
        """Return what `gate_layer_input` multiplies by, [tokens, width]."""
        return self._per_layer.of_layer(self._descriptor.num_tokens, layer)

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        out, meetings = self._buffers.product(linear.weight.shape[0])[: len(x)], self.meetings
        if meetings.is_partial(linear.weight):
            self._multiply(meetings.part(*out.shape), x, linear, has_bias=meetings.has_rest)
            return meetings.sum_parts(out)
        self._multiply(out, x, linear)
        for down, up, columns in linear.adapted(out):
            columns.add_(self.low_rank(x, down, up))
        return out

    def _multiply(self, out: Tensor, x: Tensor, linear: Linear, has_bias: bool = True) -> None:
        self.products.linear(out, x, linear, has_bias=has_bias)
        if self._lora is not None:
            self._lora.add(out, x, linear)

    def attend(self, qkv: Tensor, attention: AttentionHeads) -> Tensor:
        return self._attends.attend(qkv, attention)

    def store_heads(self, qkv: Tensor, attention: AttentionHeads) -> None:
        self._attends.store(qkv, attention)

    def store_latents(self, x: Tensor, attention: LatentAttention) -> Tensor:
        return self.latents.store(x, attention)

    def choose_tokens(self, x: Tensor, latent: Tensor, attention: LatentAttention) -> None:
        self.latents.choose(x, latent, attention, self.linear)

    def choose_blocks(self, x: Tensor, attention: AttentionHeads) -> None:
        self._attends.choose(x, attention, self.linear)

    def attend_to_latents(self, query: Tensor, attention: LatentAttention) -> Tensor:
        return self.latents.attend(query, attention)

    def open_heads(self, x: Tensor, gates: Tensor) -> Tensor:
        x.unflatten(1, (gates.shape[1], -1)).mul_(gates.sigmoid_().unsqueeze(-1))
        return x

    def delta_net(self, x: Tensor, net: DeltaNet) -> Tensor:
        return self.recurrent.delta_net(x, net)

    def low_rank(self, x: Tensor, down: Linear, up: Linear) -> Tensor:
        inner = self._buffers.low_rank(down.weight.shape[0])[: len(x)]
        self._multiply(inner, x, down)
        return self.linear(inner, up)

    def kimi_delta(self, x: Tensor, decays: Tensor, net: KimiDelta) -> Tensor:
        return self.recurrent.kimi_delta(x, decays, net)

    def gate_heads(self, x: Tensor, gates: Tensor, net: KimiDelta) -> Tensor:
        return self.recurrent.gate_heads(x, gates, net)

    def mamba2(self, x: Tensor, mixer: Mamba2Like) -> Tensor:
        return self.recurrent.mamba2(x, mixer)

    def mamba(self, x: Tensor, mixer: Mamba) -> Tensor:
        return self.recurrent.mamba(x, mixer, self.products.linear)

    def short_convolution(self, x: Tensor, mixer: ShortConvolution) -> Tensor:
        return self.recurrent.short_convolution(x, mixer)

    def mlp(self, x: Tensor, mlp: MLP) -> Tensor:
        out, spec = self._buffers.activated(mlp.spec.inner)[: len(x)], mlp.spec
        of_product = Activation(spec.activation, spec.gated)
        is_apart = self._lora is not None or needs_whole_product(mlp)
        if is_apart or not self.products.activated(out, x, mlp.gate_up_proj, of_product):
            activate_mlp(out, self.linear(x, mlp.gate_up_proj), mlp)
        out = out if mlp.norm is None else self.norm(out, mlp.norm)
        if mlp.behind is not None:
            return self.low_rank(out, mlp.down_proj, mlp.behind)
        return self.linear(out, mlp.down_proj)

    def route(self, x: Tensor, moe: MoE) -> Routing:
        return self.mixtures.route(x, self._query_starts, moe)

    def route_few(
        self,
        x: Tensor,
        normed: Tensor,
        norm: Norm | None,
        moe: MoE,
        factor: float = 1.0,
        experts_norm: Norm | None = None,
    ) -> Routing:
        """Compute `add_norm` and `route` of few tokens; see `ExpertOps.route_few`."""
        starts = self._query_starts
        return self.mixtures.route_few(x, normed, norm, starts, moe, factor, experts_norm)

    @property
    def _query_starts(self) -> Tensor:
        return self._inputs.step.query_starts[: self._descriptor.num_reqs + 1]

    def experts(self, x: Tensor, routing: Routing, moe: MoE) -> Tensor:
        mixtures = self.mixtures
        added = mixtures.added_rows(moe, len(x)) if moe.shared is None else self.mlp(x, moe.shared)
        return mixtures.experts(x, routing, moe, added)

    def gather_samples(self, hidden: Tensor) -> Tensor:
        """Gather the hidden states of the tokens that get logits, padded to the step's number of
        samples."""
        num_samples = self._descriptor.num_samples
        if len(hidden) == num_samples == 1:
            return hidden
        out = self._buffers.sampled[:num_samples]
        gather_rows(out, hidden, self._inputs.step.sample_tokens[:num_samples])
        return out
