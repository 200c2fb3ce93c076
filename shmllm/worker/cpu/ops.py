"""A decoder's operations on a CPU: each is recorded once, and replayed in every step.

This module owns which kernel computes an operation, and the buffers between kernels. It must not
know requests, nor what a step consists of: the kernels read that from `CpuInputs`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.delta_net import DeltaNet
from shmllm.models.experts import MoE
from shmllm.models.latent_attention import LatentAttention
from shmllm.models.layers import MLP, AttentionHeads, Linear, Norm, TokenEmbedding
from shmllm.models.mamba2_mixer import Mamba2
from shmllm.models.mamba_mixer import Mamba
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.ops import Routing
from shmllm.models.per_layer import LayerInput, PerLayerInputs
from shmllm.models.quantized import QuantizedMatrix
from shmllm.models.short_convolution import ShortConvolution
from shmllm.worker.arrays import IntArray, LongArray
from shmllm.worker.cpu.buffers import CpuBuffers
from shmllm.worker.cpu.cache import CpuKVCache, LayerCache, head_layout
from shmllm.worker.cpu.delta_net import DeltaNetOps
from shmllm.worker.cpu.experts import ExpertOps
from shmllm.worker.cpu.group import Meetings
from shmllm.worker.cpu.inputs import CpuInputs, Division
from shmllm.worker.cpu.latent_attention import LatentAttentionOps
from shmllm.worker.cpu.lora import CpuLora
from shmllm.worker.cpu.mamba import MambaOps
from shmllm.worker.cpu.norms import record_norm
from shmllm.worker.cpu.per_layer import PerLayerOps
from shmllm.worker.cpu.products import Products, dtype_name, kind_of, weights_of
from shmllm.worker.cpu.rope_tables import record_rope_tables
from shmllm.worker.cpu.short_convolution import ShortConvolutionOps
from shmllm.worker.cpu.states import States
from shmllm.worker.group import Alone
from shmllm_kernels.cpu import Kernel, KernelProgram, word_of_float
from shmllm_kernels.cpu.attention import (
    ATTEND,
    MERGE_SPLITS,
    scratch_bytes,
    split_states_bytes,
)
from shmllm_kernels.cpu.attention_pieces import request_words
from shmllm_kernels.cpu.attention_state import LOG2_E
from shmllm_kernels.cpu.cache_layout import head_words
from shmllm_kernels.cpu.heads import STORE_HEADS
from shmllm_kernels.cpu.norms import ADD, SCALE
from shmllm_kernels.cpu.rows import (
    ACTIVATE,
    EMBED,
    EMBED_PACKED,
    GATE,
    GATHER,
    JOIN,
    SCALE_AND_CAP,
)


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


class CpuLogitsOps:
    """Records the operations of `models.ops.LogitsOps` in a kernel program.

    Args:
        program: the program to record in.
        products: records matrix products there.
        num_rows: the address of an int64, the number of rows to compute.
        logits: [rows, vocab] float32, the result.
        own_tokens: the tokens of which this process has the rows of the LM head.
        meetings: where the ranks of a group meet; None: the process is alone.
    """

    def __init__(
        self,
        program: KernelProgram,
        products: Products,
        num_rows: int,
        logits: Tensor,
        own_tokens: range | None = None,
        meetings: Meetings | None = None,
    ) -> None:
        self._kernels = program
        self._products = products
        self._num_rows = num_rows
        self._logits = logits
        tokens = own_tokens or range(logits.shape[1])
        self._own = logits[:, tokens.start : tokens.stop]
        self._meetings = meetings or Meetings(program, "", Alone())

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        self._products.record(self._num_rows, x, linear, self._own)
        if self._meetings.are_needed:
            self._meetings.gather()
        return self._logits

    def scale_and_cap(self, x: Tensor, scale: float, cap: float | None) -> Tensor:
        if not self._meetings.has_rest:
            return x
        numbers = [word_of_float(number) for number in (scale, cap or 0.0)]
        operands = [self._num_rows, x.data_ptr(), x.shape[1], *numbers]
        self._kernels.record(SCALE_AND_CAP, operands, label="scale_and_cap")
        return x


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
        self._cache = cache
        self._requests = {
            (group, division): request_words(
                inputs.first_tokens.ctypes.data,
                inputs.counts.ctypes.data,
                inputs.context_lens.ctypes.data,
                inputs.rows.ctypes.data,
                block_table.ctypes.data,
                block_table.shape[1],
                *(words.ctypes.data for words in pieces),
            )
            for group, block_table in enumerate(block_tables)
            for division, pieces in inputs.pieces.items()
        }
        self._heads: list[LongArray] = []  # the kernels read them in every step
        self._ones: Tensor | None = None
        layouts = [
            (head_layout(cache.layers[index]), layer.mixer.num_heads)
            for index, layer in enumerate(config.layers)
            if isinstance(layer.mixer, AttentionSpec)
        ]
        size = max((scratch_bytes(*each) for each in layouts), default=0)
        self._scratch = torch.empty((program.num_threads, size), dtype=torch.uint8)
        states = max((split_states_bytes(*each) for each in layouts), default=0)
        self._split_states = torch.empty(states, dtype=torch.uint8)
        self._num_tokens = inputs.address_of("num_tokens")
        self._products = products
        self._lora = lora
        self._latents = LatentAttentionOps(
            program, products, config, buffers, inputs, cache, self._requests
        )
        every_state = States(inputs, cache, block_tables)
        self._delta_nets = DeltaNetOps(program, every_state)
        self._mambas = MambaOps(program, products, every_state, buffers.mambas)
        self._short_convolutions = ShortConvolutionOps(program, every_state)
        self._experts = ExpertOps(
            program, products, self._num_tokens, buffers.experts, lora, self._meetings
        )
        self._per_layer = PerLayerOps(program, products, inputs, buffers.per_layer)
        for rope in config.ropes:
            record_rope_tables(program, inputs, self._num_tokens, rope, buffers.angles[rope])

    def embed(self, embedding: TokenEmbedding) -> Tensor:
        out, table = self._buffers.embeds, embedding.table
        inputs, positions = self._inputs, embedding.positions
        if positions is not None:
            positions = positions[embedding.first_position :]
        numbers, table_scales = weights_of(table)
        rows = [inputs.token_ids.ctypes.data, numbers.data_ptr(), out.data_ptr(), table.shape[1]]
        scales = [word_of_float(embedding.scale), word_of_float(embedding.embeds_scale)]
        learned = [inputs.positions.ctypes.data, _address(positions)]
        first = embedding.first_token
        own = [first, first + table.shape[0]]
        types = [inputs.token_types.ctypes.data, _address(embedding.token_types)]
        operands, dtype = [*rows, *scales, *learned, *own, *types], kind_of(table)
        if isinstance(table, QuantizedMatrix):
            self._record("embed", EMBED_PACKED[table.kind, dtype], *operands, table_scales)
        else:
            self._record("embed", EMBED[dtype], *operands)
        if self._meetings.are_needed:
            return self._meetings.copy(self._num_tokens, out, self._buffers.hidden)
        return out

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
            addresses = [x.data_ptr(), residual.data_ptr()]
            self._record("add", ADD, *addresses, residual.shape[1], word_of_float(scale))
        return residual

    def add_level(self, residual: Tensor, level: int) -> None:
        levels = self._buffers.levels
        assert levels is not None, "the model sees images"
        operands = [
            self._inputs.address_of("num_level_tokens"), levels[level].data_ptr(),
            residual.data_ptr(), residual.shape[1], word_of_float(1.0),
        ]  # fmt: skip
        self._kernels.record(ADD, operands, label="add_level")

    def norm_sum(self, x: Tensor, residual: Tensor, norm: Norm, scale: float) -> Tensor:
        record_norm(self._kernels, self._num_tokens, x, residual, norm, residual, scale)
        return residual

    def join(
        self, embeds: Tensor, hidden: Tensor, norms: tuple[Norm, Norm], projection: Linear
    ) -> Tensor:
        joined = self._buffers.joined
        assert joined is not None, "the configuration has further layers"
        parts = self.norm(embeds, norms[0]), self.norm(hidden, norms[1])
        addresses = [tensor.data_ptr() for tensor in (*parts, joined)]
        self._record("join", JOIN, *addresses, embeds.shape[1])
        self._products.record(self._num_tokens, joined, projection, embeds)
        return embeds

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        out, width = x, len(norm.weight)
        if x.shape[1] > width:
            out, x = self._buffers.unprojected(width), x[:, :width]
        record_norm(self._kernels, self._num_tokens, None, x, norm, out)
        return out

    def scale(self, x: Tensor, factor: float, weight: Tensor | None = None) -> Tensor:
        kernel = SCALE["float32" if weight is None else kind_of(weight)]
        operands = x.data_ptr(), x.shape[1], word_of_float(factor), _address(weight)
        self._record("scale", kernel, *operands)
        return x

    def embed_per_layer(self, hidden: Tensor, inputs: PerLayerInputs) -> None:
        self._per_layer.embed(hidden, inputs)

    def gate_layer_input(self, x: Tensor, layer: LayerInput) -> Tensor:
        return self._per_layer.gate(x, layer)

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        out, meetings = self._buffers.product(linear.weight.shape[0]), self._meetings
        is_partial = meetings.is_partial(linear.weight)
        target = meetings.part() if is_partial else out
        has_bias = meetings.has_rest or not is_partial
        self._products.record(self._num_tokens, x, linear, target, has_bias=has_bias)
        if self._lora is not None:
            self._lora.record(self._kernels, x, linear, target)
        return meetings.sum_parts(self._num_tokens, out) if is_partial else out

    def attend(self, qkv: Tensor, attention: AttentionHeads) -> Tensor:
        spec, cache = attention.spec, self._cache.layers[attention.layer]
        out = self._buffers.attended(spec.width)
        blocks = cache.blocks
        layout = head_layout(cache)
        heads = head_words(layout, spec.num_heads, spec.scale, blocks.stride(0))
        self._heads.append(heads)
        source = [heads.ctypes.data, qkv.data_ptr(), 4 * qkv.shape[1]]
        kinds = layout.stored, dtype_name(attention.dtype)
        self._record("store_heads", STORE_HEADS[kinds], *source, *self._storing(attention, cache))
        requests = self._requests[cache.group, Division.of(spec)]
        operands = [
            requests.ctypes.data, *source, out.data_ptr(), 4 * out.shape[1], blocks.data_ptr(),
            spec.window or 0, self._scratch.data_ptr(), self._scratch.shape[1],
            word_of_float((spec.soft_cap or 0.0) * LOG2_E), _address(attention.sinks),
            self._split_states.data_ptr(), self._inputs.address_of_ends(spec.ahead),
        ]  # fmt: skip
        self._record("attend", ATTEND[kinds], *operands)
        self._record("merge_splits", MERGE_SPLITS[kinds], *operands)
        if spec.gated:
            gates = [qkv.data_ptr() + 4 * (spec.in_width - spec.width), 4 * qkv.shape[1]]
            self._record("gate", GATE, out.data_ptr(), spec.width, *gates)
        return out

    def _storing(self, attention: AttentionHeads, cache: LayerCache) -> list[int]:
        """Return the operands of STORE_HEADS behind the addresses of queries, keys and values."""
        spec, norm = attention.spec, self._config.norm
        angles, rotation = [0, 0], [0, 0]
        if spec.rope is not None:
            angles = [table.data_ptr() for table in self._buffers.angles[spec.rope]]
            rotation = [spec.rope.rotary_dim // 2, int(spec.rope.interleaved)]
        target = cache.blocks.data_ptr() if spec.source is None else 0
        norms = attention.q_norm, attention.k_norm
        weights = [None if each is None else each.weight for each in norms]
        return [
            *angles, self._inputs.slot_mapping[cache.group].ctypes.data, target,
            *map(_address, weights),
            word_of_float(norm.eps), word_of_float(norm.offset), int(spec.qk_norm == "row"),
            *rotation, _address(self._weight_of_values(attention)),
        ]  # fmt: skip

    def _weight_of_values(self, attention: AttentionHeads) -> Tensor | None:
        """Return the weight of the values' norm, which are all 1; None: they have no norm."""
        if not attention.spec.value_norm:
            return None
        if self._ones is None:
            widest = max(each.head_dim for each in self._config.attentions)
            self._ones = torch.ones(widest, dtype=attention.dtype)
        return self._ones

    def store_latents(self, x: Tensor, attention: LatentAttention) -> Tensor:
        self._latents.store(x[:, -attention.spec.key_dim :], attention)
        return x

    def attend_to_latents(self, query: Tensor, attention: LatentAttention) -> Tensor:
        return self._latents.attend(query, attention)

    def delta_net(self, x: Tensor, net: DeltaNet) -> Tensor:
        out = self._buffers.attended(net.spec.width)
        self._delta_nets.run(x, net, out)
        return out

    def mamba2(self, x: Tensor, mixer: Mamba2) -> Tensor:
        out = self._buffers.attended(mixer.spec.width)
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
        spec, out = mlp.spec, self._buffers.activated(mlp.spec.inner)
        if self._lora is None and self._products.joins(mlp):
            self._products.record_gate_and_up(self._num_tokens, x, mlp, out)
        else:
            projected = self.linear(x, mlp.gate_up_proj)
            label = f"{spec.activation}_and_mul" if spec.gated else spec.activation
            kernel = ACTIVATE[spec.activation, spec.gated]
            self._record(label, kernel, projected.data_ptr(), out.data_ptr(), out.shape[1])
        return self.linear(out, mlp.down_proj)

    def route(self, x: Tensor, moe: MoE) -> Routing:
        logits = self._experts.logits(moe.spec)
        self._products.record(self._num_tokens, x, moe.router, logits, is_exact=True)
        if self._lora is not None:
            self._lora.record(self._kernels, x, moe.router, logits)
        return self._experts.route(moe)

    def experts(self, x: Tensor, routing: Routing, moe: MoE) -> Tensor:
        shared = None if moe.shared is None else self.mlp(x, moe.shared)
        return self._experts.experts(x, routing, moe, shared)

    def _record(self, label: str, kernel: Kernel, *operands: int) -> None:
        self._kernels.record(kernel, [self._num_tokens, *operands], label=label)
