"""A decoder's operations on a CPU: each is recorded once, and replayed in every step.

This module owns which kernel computes an operation, and the buffers between kernels. It must not
know requests, nor what a step consists of: the kernels read that from `CpuInputs`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from shmllm.models.altup import AltUpLayer
from shmllm.models.attention import AttentionHeads
from shmllm.models.compressed_attention import CompressedAttention
from shmllm.models.config import ModelConfig
from shmllm.models.connections import Connection
from shmllm.models.delta_net import DeltaNet
from shmllm.models.experts import MoE
from shmllm.models.kimi_delta import KimiDelta
from shmllm.models.latent_attention import LatentAttention
from shmllm.models.layers import Linear, Norm, TokenEmbedding
from shmllm.models.lightning import Lightning
from shmllm.models.mamba2_mixer import Mamba2
from shmllm.models.mamba_mixer import Mamba
from shmllm.models.mlp import MLP
from shmllm.models.per_layer import LayerInput, PerLayerInputs
from shmllm.models.routing import Routing
from shmllm.models.short_convolution import ShortConvolution
from shmllm.worker.arrays import IntArray
from shmllm.worker.cpu.altup import AltUpOps
from shmllm.worker.cpu.attention import AttentionOps, requests_of_groups
from shmllm.worker.cpu.buffers import CpuBuffers
from shmllm.worker.cpu.cache import CpuKVCache
from shmllm.worker.cpu.compressed_attention import CompressedAttentionOps
from shmllm.worker.cpu.connections import ConnectionOps
from shmllm.worker.cpu.delta_net import DeltaNetOps
from shmllm.worker.cpu.embeddings import record_lookup
from shmllm.worker.cpu.experts import ExpertOps
from shmllm.worker.cpu.group import Meetings
from shmllm.worker.cpu.inputs import CpuInputs
from shmllm.worker.cpu.latent_attention import LatentAttentionOps
from shmllm.worker.cpu.lora import CpuLora
from shmllm.worker.cpu.mamba import MambaOps
from shmllm.worker.cpu.norms import record_norm
from shmllm.worker.cpu.per_layer import PerLayerOps
from shmllm.worker.cpu.products import Products, kind_of
from shmllm.worker.cpu.relations import RelationOps
from shmllm.worker.cpu.rope_tables import record_rope_tables
from shmllm.worker.cpu.short_convolution import ShortConvolutionOps
from shmllm.worker.cpu.states import States
from shmllm.worker.group import Alone
from shmllm_kernels.cpu import Kernel, KernelProgram, word_of_float
from shmllm_kernels.cpu.bounded_activation import ACTIVATE_BOUNDED
from shmllm_kernels.cpu.norms import ADD, SCALE, SCALE_COLUMNS
from shmllm_kernels.cpu.rows import ACTIVATE, CLIP, PLACE
from shmllm_kernels.cpu.sparse_activation import ACTIVATE_SPARSE
from shmllm_kernels.cpu.xielu import XIELU


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class CpuOps:
    """Records the operations of `models.ops.Ops` in a kernel program.

    Args:
        program: the program to record in.
        products: records matrix products there.
        config: the model's configuration.
        buffers: the buffers for the results.
        inputs: the inputs that the kernels read.
        cache: the KV cache.
        block_tables: (groups, rows, blocks) int32, the block ids of each row's request.
        lora: records what adapters add to products; None: nothing.
        meetings: records sums over the ranks of a group; None: the process is alone.
        receive: records that the stage of a pipeline before this one has computed the residual
            stream, and returns it; None: there is none.
    """

    def __init__(
        self,
        program: KernelProgram,
        products: Products,
        config: ModelConfig,
        buffers: CpuBuffers,
        inputs: CpuInputs,
        cache: CpuKVCache,
        block_tables: IntArray,
        lora: CpuLora | None = None,
        meetings: Meetings | None = None,
        receive: Callable[[], Tensor] | None = None,
    ) -> None:
        self._kernels = program
        self._receive = receive
        self._meetings = meetings or Meetings(program, "", Alone())
        self._config = config
        self._buffers = buffers
        self._inputs = inputs
        self._num_tokens = inputs.address_of("num_tokens")
        self._products = products
        self._lora = lora
        requests = requests_of_groups(inputs, block_tables)
        relations = RelationOps(program, products, inputs, buffers.relations)
        self._attentions = AttentionOps(
            program, config, buffers, inputs, cache, requests, relations
        )
        self._latents = LatentAttentionOps(
            program, products, config, buffers, inputs, cache, requests
        )
        every_state = States(inputs, cache, block_tables)
        self._delta_nets = DeltaNetOps(program, every_state)
        self._mambas = MambaOps(program, products, every_state, buffers.mambas)
        self._short_convolutions = ShortConvolutionOps(program, every_state)
        self._experts = ExpertOps(
            program, products, self._num_tokens, inputs.token_ids.ctypes.data, buffers.experts,
            lora, self._meetings, buffers.routed,
        )  # fmt: skip
        self._per_layer = PerLayerOps(program, products, inputs, buffers.per_layer, buffers.gated)
        self._altup = AltUpOps(program, self._num_tokens, buffers.streams, buffers.predicted)
        self._connections = ConnectionOps(
            program, products, self._num_tokens, buffers.connected, buffers.stream_gates,
            buffers.hidden,
        )  # fmt: skip
        self._compressed = CompressedAttentionOps(
            program, products, config, buffers, inputs, cache, requests
        )
        for rope in config.ropes:
            record_rope_tables(program, inputs, self._num_tokens, rope, buffers.angles[rope])
        for (rope, rate), angles in buffers.window_angles.items():
            starts = inputs.window_starts[rate]
            record_rope_tables(program, inputs, self._num_tokens, rope, angles, starts)

    def embed(self, embedding: TokenEmbedding) -> Tensor:
        out = self._buffers.embeds
        record_lookup(self._kernels, embedding, self._inputs, out)
        if self._meetings.are_needed:
            return self._meetings.copy(self._num_tokens, out, self._buffers.looked_up)
        return out

    def project(self, x: Tensor, projection: Linear) -> Tensor:
        self._products.record(self._num_tokens, x, projection, self._buffers.hidden)
        return self._buffers.hidden

    def receive(self) -> Tensor:
        assert self._receive is not None, "the stage is the first one"
        return self._receive()

    def add_norm(
        self, x: Tensor | None, residual: Tensor, norm: Norm | None, scale: float
    ) -> Tensor:
        if norm is not None:
            out = self._buffers.normed
            record_norm(self._kernels, self._num_tokens, x, residual, norm, out, scale)
            return out
        if x is not None:
            self._add(x, residual, scale)
        return residual

    def _add(self, x: Tensor, out: Tensor, scale: float) -> None:
        operands = x.data_ptr(), out.data_ptr(), out.shape[1], word_of_float(scale)
        self._record("add", ADD, *operands, 4 * out.stride(0))

    def add_level(self, residual: Tensor, level: int) -> None:
        levels = self._buffers.levels
        assert levels is not None, "the model sees images"
        operands = [
            self._inputs.address_of("num_level_tokens"), levels[level].data_ptr(),
            residual.data_ptr(), residual.shape[1], word_of_float(1.0), 4 * residual.shape[1],
        ]  # fmt: skip
        self._kernels.record(ADD, operands, label="add_level")

    def norm_sum(self, x: Tensor, residual: Tensor, norm: Norm, scale: float) -> Tensor:
        record_norm(self._kernels, self._num_tokens, x, residual, norm, residual, scale)
        return residual

    def join(
        self, embeds: Tensor, hidden: Tensor, norms: tuple[Norm, Norm], projection: Linear
    ) -> Tensor:
        joined = self.beside(self.norm(embeds, norms[0]), self.norm(hidden, norms[1]))
        self._products.record(self._num_tokens, joined, projection, embeds)
        return embeds

    def given(self) -> Tensor:
        return self._buffers.given

    def beside(self, first: Tensor, second: Tensor) -> Tensor:
        width = first.shape[1]
        joined = self._buffers.joined(2 * width)
        self._place(first, joined[:, :width])
        self._place(second[:, :width], joined[:, width:])
        return joined

    def set_aside(self, residual: Tensor) -> None:
        self._place(residual, self._buffers.aside)

    def aside(self) -> Tensor:
        return self._buffers.aside

    def keep(self, residual: Tensor, place: int) -> None:
        self._place(residual, self._buffers.kept[:, place])

    def _place(self, source: Tensor, out: Tensor) -> None:
        places = source.data_ptr(), out.data_ptr(), source.shape[1]
        self._record("place", PLACE, *places, 4 * out.stride(0), 4 * source.stride(0))

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        out, width = x, len(norm.weight)
        if x.shape[1] > width:
            out, x = self._buffers.unprojected(width), x[:, :width]
        record_norm(self._kernels, self._num_tokens, None, x, norm, out)
        return out

    def scale(self, x: Tensor, factor: float, weight: Tensor | None = None) -> Tensor:
        kernel = SCALE["float32" if weight is None else kind_of(weight)]
        if weight is not None and len(weight) > 1:
            kernel = SCALE_COLUMNS
        operands = x.data_ptr(), x.shape[1], word_of_float(factor), _address(weight)
        self._record("scale", kernel, *operands)
        return x

    def clip(self, x: Tensor, bound: float) -> Tensor:
        self._record("clip", CLIP, x.data_ptr(), x.shape[1], word_of_float(bound))
        return x

    def embed_per_layer(self, hidden: Tensor, inputs: PerLayerInputs) -> None:
        self._per_layer.embed(hidden, inputs)

    def gate_layer_input(self, x: Tensor, layer: LayerInput) -> Tensor:
        return self._per_layer.gate(x, layer)

    def stream(self, index: int) -> Tensor:
        return self._buffers.streams[index]

    def match_magnitude(self, x: Tensor, like: Tensor, out: Tensor) -> None:
        self._altup.match_magnitude(x, like, out)

    def predict_streams(self, routed: Tensor, altup: AltUpLayer) -> Tensor:
        return self._altup.predict(routed, altup)

    def correct_streams(self, residual: Tensor, routed: Tensor, altup: AltUpLayer) -> Tensor:
        return self._altup.correct(residual, routed, altup)

    def add_to_streams(self, x: Tensor) -> None:
        self._altup.add(x)

    def repeat_stream(self, residual: Tensor) -> None:
        self._connections.repeat(residual)

    def fold_streams(self, connection: Connection) -> Tensor:
        return self._connections.fold(connection)

    def spread(self, x: Tensor, connection: Connection) -> None:
        self._connections.spread(x, connection)

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        out, meetings = self._buffers.product(linear.weight.shape[0]), self._meetings
        is_partial = meetings.is_partial(linear.weight)
        target = meetings.part(out.shape[1]) if is_partial else out
        has_bias = meetings.has_rest or not is_partial
        self._products.record(self._num_tokens, x, linear, target, has_bias=has_bias)
        if self._lora is not None:
            self._lora.record(self._kernels, x, linear, target)
        if is_partial:
            return meetings.sum_parts(self._num_tokens, out)
        for down, up, columns in linear.adapted(out):
            self._add(self.low_rank(x, down, up), columns, 1.0)
        return out

    def attend(self, qkv: Tensor, attention: AttentionHeads) -> Tensor:
        out = self._buffers.attended(attention.spec.width)
        self._attentions.attend(qkv, attention, out)
        return out

    def store_heads(self, qkv: Tensor, attention: AttentionHeads) -> None:
        self._attentions.store(qkv, attention)

    def store_latents(self, x: Tensor, attention: LatentAttention) -> Tensor:
        self._latents.store(x[:, -attention.spec.key_dim :], attention)
        return x

    def choose_tokens(self, x: Tensor, latent: Tensor, attention: LatentAttention) -> None:
        self._latents.choose(x, latent, attention, self.linear)

    def choose_blocks(self, x: Tensor, attention: AttentionHeads) -> None:
        self._attentions.choose(x, attention, self.linear)

    def attend_to_latents(self, query: Tensor, attention: LatentAttention) -> Tensor:
        return self._latents.attend(query, attention)

    def store_keys(self, x: Tensor, attention: CompressedAttention) -> Tensor:
        self._compressed.store_keys(x, attention)
        return x

    def compress(self, x: Tensor, attention: CompressedAttention) -> None:
        self._compressed.compress(x, attention)

    def list_keys(self, x: Tensor, latent: Tensor, attention: CompressedAttention) -> None:
        self._compressed.list_keys(x, latent, attention, self.linear)

    def attend_to_lists(self, query: Tensor, attention: CompressedAttention) -> Tensor:
        out = self._buffers.attended(attention.spec.width)
        self._compressed.attend(query, attention, out)
        return out

    def open_heads(self, x: Tensor, gates: Tensor) -> Tensor:
        self._latents.open_heads(x, gates)
        return x

    def delta_net(self, x: Tensor, net: DeltaNet) -> Tensor:
        out = self._buffers.attended(net.spec.width)
        self._delta_nets.run(x, net, out)
        return out

    def low_rank(self, x: Tensor, down: Linear, up: Linear) -> Tensor:
        inner = self._buffers.low_rank(down.weight.shape[0])
        self._products.record(self._num_tokens, x, down, inner)
        if self._lora is not None:
            self._lora.record(self._kernels, x, down, inner)
        return self.linear(inner, up)

    def kimi_delta(self, x: Tensor, decays: Tensor, net: KimiDelta) -> Tensor:
        out = self._buffers.attended(net.spec.width)
        self._delta_nets.run_by_channel(x, decays, net, out)
        return out

    def gate_heads(self, x: Tensor, gates: Tensor, net: KimiDelta) -> Tensor:
        self._delta_nets.gate(x, gates, net)
        return x

    def mamba2(self, x: Tensor, mixer: Mamba2 | Lightning) -> Tensor:
        out = self._buffers.attended(mixer.spec.width)
        if isinstance(mixer, Lightning):
            self._mambas.run_lightning(x, mixer, out)
        else:
            self._mambas.run_2(x, mixer, out)
        return out

    def mamba(self, x: Tensor, mixer: Mamba) -> Tensor:
        out = self._buffers.attended(mixer.spec.width)
        self._mambas.run_1(x, mixer, out)
        return out

    def short_convolution(self, x: Tensor, mixer: ShortConvolution) -> Tensor:
        out = self._buffers.attended(mixer.spec.width)
        self._short_convolutions.run(x, mixer, out)
        return out

    def mlp(self, x: Tensor, mlp: MLP) -> Tensor:
        out = self._buffers.activated(mlp.spec.inner)
        if self._lora is None and self._products.joins(mlp):
            self._products.record_gate_and_up(self._num_tokens, x, mlp, out)
        else:
            self._activate(self.linear(x, mlp.gate_up_proj), mlp, out)
        if mlp.norm is not None:
            out = self.norm(out, mlp.norm)
        if mlp.behind is not None:
            return self.low_rank(out, mlp.down_proj, mlp.behind)
        return self.linear(out, mlp.down_proj)

    def _activate(self, projected: Tensor, mlp: MLP, out: Tensor) -> None:
        spec, operands = mlp.spec, [projected.data_ptr(), out.data_ptr(), out.shape[1]]
        label = f"{spec.activation}_and_mul" if spec.gated else spec.activation
        if mlp.learned is not None:
            self._record(label, XIELU, *operands, mlp.learned.data_ptr())
        elif spec.sparsity:
            deviations = word_of_float(spec.deviations)
            self._record(f"sparse_{label}", ACTIVATE_SPARSE[spec.activation], *operands, deviations)
        elif spec.bound is not None:
            kernel, bound = ACTIVATE_BOUNDED[spec.activation], word_of_float(spec.bound)
            self._record(f"bounded_{label}", kernel, *operands, bound)
        else:
            self._record(label, ACTIVATE[spec.activation, spec.gated], *operands)

    def route(self, x: Tensor, moe: MoE) -> Routing:
        logits = self._experts.logits(moe.spec)
        self._products.record(self._num_tokens, x, moe.router, logits, is_exact=True)
        if self._lora is not None:
            self._lora.record(self._kernels, x, moe.router, logits)
        return self._experts.route(x, moe)

    def experts(self, x: Tensor, routing: Routing, moe: MoE) -> Tensor:
        experts = self._experts
        added = experts.added_rows(moe, len(x)) if moe.shared is None else self.mlp(x, moe.shared)
        return experts.experts(x, routing, moe, added)

    def _record(self, label: str, kernel: Kernel, *operands: int) -> None:
        self._kernels.record(kernel, [self._num_tokens, *operands], label=label)
