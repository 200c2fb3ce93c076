"""Launches the attention of heads, with the norms, the rotation and the cache writes before it.

This module owns which kernels that takes. It must not know what else a layer computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.nn.functional import softplus

from shmllm.models.attention import AttentionHeads
from shmllm.models.layers import HeadNorm, Linear, Norm
from shmllm.models.mixer_specs import WITHIN_ITEMS, AttentionSpec, Encoded
from shmllm.worker.gpu.attention_launches import AttentionLaunch, HeadShape
from shmllm.worker.gpu.buffers import GpuBuffers
from shmllm.worker.gpu.cache import GpuKVCache
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor
from shmllm.worker.gpu.inputs import GpuInputs
from shmllm.worker.gpu.piecewise_graph import Call
from shmllm.worker.gpu.products import GpuProducts
from shmllm.worker.gpu.relations import RelationOps
from shmllm_kernels.gpu.attention import paged_attention
from shmllm_kernels.gpu.block_indexer import choose_blocks
from shmllm_kernels.gpu.decode_attention import decode_attention
from shmllm_kernels.gpu.rope_write import rope_and_write
from shmllm_kernels.gpu.weights_ahead import WeightsAhead
from shmllm_kernels.reference.rope_write import HeadNorms, QueryGrowth


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The sizes of a step, as attention needs them.

    Attributes:
        descriptor: the padded sizes.
        launches: the tile sizes and splits, by the heads of a layer.
        launch: called with each launch of attention, at once or to launch it in each replay.
        is_dependent: whether launches begin before those before them have ended.
        is_few: whether the step has few tokens: memory rests during its attention, so that
            launches load before they wait, and may ask for weights.
    """

    descriptor: BatchDescriptor
    launches: dict[HeadShape, AttentionLaunch]
    launch: Callable[[Call], None]
    is_dependent: bool
    is_few: bool


@dataclass(frozen=True, slots=True)
class _Heads:
    """What is computed of queries and keys before they are compared.

    Attributes:
        cos, sin: [tokens, rotary_dim], or None: nothing is rotated.
        norms: the norms of each head, or of all heads side by side, or None.
        interleaved: whether neighbouring elements are rotated together.
        growth: the factor of rotated queries, or None.
    """

    cos: Tensor | None
    sin: Tensor | None
    norms: HeadNorms | None
    interleaved: bool
    growth: QueryGrowth | None

    @property
    def changes_some(self) -> bool:
        """Whether there is anything to compute."""
        return any(each is not None for each in (self.cos, self.norms, self.growth))


class AttentionOps:
    """Launches the attention of layers.

    Args:
        cache: the KV cache.
        inputs: the step's inputs.
        buffers: the buffers for the results.
        norm: normalises rows in place.
        products: launches matrix products.
        rotates_apart: whether decodes, too, are rotated and written by a launch of their own. In a
            piecewise graph, which serves all steps of its size, they are, and the bits of a decode
            must not depend on whether it is replayed.
        ahead: the weights that the attention of each layer asks for, of layers that do.
    """

    def __init__(
        self,
        cache: GpuKVCache,
        inputs: GpuInputs,
        buffers: GpuBuffers,
        norm: Callable[[Tensor, Norm], Tensor],
        products: GpuProducts,
        rotates_apart: bool,
        ahead: Mapping[int, WeightsAhead],
    ) -> None:
        self._cache = cache
        self._inputs = inputs
        self._buffers = buffers
        self._norm = norm
        self._relations = RelationOps(products, inputs, buffers.relations, norm)
        self._rotates_apart = rotates_apart
        self._ahead = ahead

    def begin(self, step: AttentionStep) -> None:
        """Set the sizes of the next forward pass. Launches that a graph keeps out of itself use the
        latest ones, except for the number of tokens."""
        self._step = step

    def attend(self, qkv: Tensor, attention: AttentionHeads) -> Tensor:
        """See `models.ops.Ops.attend`."""
        spec, num_tokens = attention.spec, len(qkv)
        heads, values, of_gates = _parts_of(qkv, spec)
        gates = of_gates.unflatten(1, (spec.num_heads, -1)) if spec.gated else None
        most = self._step.launches[HeadShape.of(spec)].max_tokens
        # An item that a request's last known token belongs to does not go on in that step. What an
        # encoder has computed is the context of one token, and of each of several.
        is_plain = spec.ahead in (0, WITHIN_ITEMS) and spec.biases is None
        is_one_of_decode = isinstance(spec.ahead, Encoded) and most == 1
        is_one_launch = most > 0 and (is_plain or is_one_of_decode) and not self._rotates_apart
        is_one_launch &= attention.indexer is None
        rotation = self._rotation_of(qkv, attention, is_one_launch)
        out = self._buffers.attended(spec.width)[:num_tokens]
        attended = out.view(num_tokens, spec.num_heads, spec.value_head_dim)
        if is_one_launch:
            computes_gates = spec.gate == "sigmoid" and not spec.gates_of_heads
            parts = heads, values, gates if computes_gates else None
            attend = partial(self._attend_decodes, attended, *parts, attention, rotation)
            self._step.launch(attend)
            if not computes_gates:
                _multiply_by_gates(attended, gates, spec)
            return out
        query = heads[:, : spec.num_heads]  # rotated in place
        if rotation.changes_some or spec.source is None:
            self._rotate_and_write(query, heads, values, attention, rotation)
        biases = attention.biases
        if attention.relations is not None:
            biases = self._relations.launch(qkv, attention)
        if attention.indexer is not None:
            self._step.launch(partial(self._attend_chosen, attended, query, attention))
        else:
            self._step.launch(partial(self._attend, attended, query, attention, biases))
        _multiply_by_gates(attended, gates, spec)
        return out

    def choose(
        self, x: Tensor, attention: AttentionHeads, linear: Callable[[Tensor, Linear], Tensor]
    ) -> None:
        """See `models.ops.Ops.choose_blocks`; ``linear`` launches its product."""
        indexer, spec = attention.indexer, attention.spec
        assert indexer is not None, "the layer has an indexer"
        rows = linear(x, indexer.in_proj)
        heads = rows.unflatten(1, (spec.num_kv_heads + 1, -1))
        rotation = self._rotation_of(rows, attention, is_one_launch=False)
        norms = _norms_of(attention, indexer.q_norm, indexer.k_norm)
        keys, query = self._cache.index_keys[attention.layer], heads[:, :-1]
        group, _, _ = self._cache.layers[attention.layer]
        rope_and_write(
            query,
            keys[:, :, None],
            keys[:, :, None, :0],
            heads,
            rotation.cos,
            rotation.sin,
            self._inputs.step.slots[group, : len(rows)],
            norms,
            rotation.interleaved,
            values=heads[:, -1:, :0],
        )
        self._step.launch(partial(self._choose, query, attention))

    def _choose(self, query: Tensor, attention: AttentionHeads) -> None:
        """Choose blocks of keys for queries [tokens, kv heads, dim]."""
        spec, choice, inputs = attention.spec.indexer, self._buffers.choice, self._inputs
        assert spec is not None, "the layer has an indexer"
        assert choice is not None, "the model has indexers"
        num_reqs = self._step.descriptor.num_reqs
        group, _, _ = self._cache.layers[attention.layer]
        choose_blocks(
            choice.table[: len(query)],
            choice.starts[: len(query) + 1],
            choice.lens[: len(query)],
            query,
            self._cache.index_keys[attention.layer],
            inputs.block_tables[group, :num_reqs],
            inputs.step.query_starts[: num_reqs + 1],
            inputs.step.context_lens[:num_reqs],
            choice.scores,
            spec.size,
            spec.num_local,
        )

    def _attend_chosen(self, out: Tensor, query: Tensor, attention: AttentionHeads) -> None:
        """Compute the attention of tokens that are requests of their own, over the blocks that were
        chosen for each key-value head; ``query`` is rotated, and the cache has their keys."""
        choice, tokens = self._buffers.choice, len(query)
        assert choice is not None, "the model has indexers"
        shape = HeadShape.of(attention.spec)
        launch = self._step.launches[shape]
        group, keys, values = self._cache.layers[attention.layer]
        decode_attention(
            out,
            query,
            keys,
            values,
            choice.table[:tokens],
            choice.starts[: tokens + 1],
            choice.lens[:tokens],
            self._inputs.step.slots[group, :tokens],
            launch.config,
            attention.spec.scale,
            soft_cap=attention.spec.soft_cap,
            sinks=attention.sinks,
            num_splits=launch.num_splits,
            scratch=self._buffers.scratch(shape, tokens, launch.num_splits),
        )

    def store(self, qkv: Tensor, attention: AttentionHeads) -> None:
        """See `models.ops.Ops.store_heads`."""
        heads, values, _ = _parts_of(qkv, attention.spec)
        rotation = self._rotation_of(qkv, attention, is_one_launch=False)
        query = heads[:, : attention.spec.num_heads]
        self._rotate_and_write(query, heads, values, attention, rotation)

    def _rotation_of(self, qkv: Tensor, attention: AttentionHeads, is_one_launch: bool) -> _Heads:
        """Return how the launch that stores heads changes them."""
        spec, num_tokens = attention.spec, len(qkv)
        cos, sin = (None, None) if spec.rope is None else self._buffers.angles[spec.rope]
        return _Heads(
            None if cos is None else cos[:num_tokens],
            None if sin is None else sin[:num_tokens],
            self._norms_of_heads(qkv, attention, is_one_launch),
            spec.rope is not None and spec.rope.interleaved,
            None if spec.growth is None else QueryGrowth(*spec.growth),
        )

    def _norms_of_heads(
        self, qkv: Tensor, attention: AttentionHeads, is_one_launch: bool
    ) -> HeadNorms | None:
        """Return the norms of heads that a launch computes with their rotation. Those over all
        heads side by side have launches of their own, unless all of attention is one launch."""
        spec, q_norm, k_norm = attention.spec, attention.q_norm, attention.k_norm
        if q_norm is None:
            return None
        if spec.qk_norm == "row" and not is_one_launch:
            self._norm(qkv[:, : spec.query_width], q_norm)
            if k_norm is not None:
                self._norm(qkv[:, spec.query_width :][:, : spec.key_width], k_norm)
            return None
        return _norms_of(attention, q_norm, k_norm)

    def _rotate_and_write(
        self,
        query: Tensor,
        heads: Tensor,
        new_values: Tensor | None,
        attention: AttentionHeads,
        rotation: _Heads,
    ) -> None:
        group, keys, values = self._cache.layers[attention.layer]
        slots = self._inputs.step.slots[group, : len(heads)]
        rope_and_write(
            query,
            keys,
            values,
            heads,
            rotation.cos,
            rotation.sin,
            slots,
            rotation.norms,
            rotation.interleaved,
            rotation.growth,
            self._inputs.step.positions[: len(heads)],
            new_values,
        )

    def _attend_decodes(
        self,
        out: Tensor,
        heads: Tensor,
        new_values: Tensor | None,
        gates: Tensor | None,
        attention: AttentionHeads,
        rotation: _Heads,
    ) -> None:
        inputs, num_reqs = self._inputs, self._step.descriptor.num_reqs
        shape = HeadShape.of(attention.spec)
        launch = self._step.launches[shape]
        group, keys, values = self._cache.layers[attention.layer]
        lengths = inputs.step.context_lens[:num_reqs]
        is_encoded = isinstance(attention.spec.ahead, Encoded)
        if is_encoded:
            ends = inputs.ends(attention.spec.ahead, num_reqs)
            assert ends is not None, "its tokens have ends in all steps"
            lengths = ends
        decode_attention(
            out,
            heads,
            keys,
            values,
            inputs.block_tables[group, :num_reqs],
            inputs.step.query_starts[: num_reqs + 1],
            lengths,
            inputs.step.slots[group, : len(heads)],
            launch.config,
            attention.spec.scale,
            rotation.cos,
            rotation.sin,
            rotation.norms,
            rotation.interleaved,
            window=attention.spec.window,
            soft_cap=attention.spec.soft_cap,
            sinks=attention.sinks,
            num_splits=launch.num_splits,
            scratch=self._buffers.scratch(shape, len(out), launch.num_splits),
            max_tokens=launch.max_tokens,
            loads_first=launch.loads_first or (self._step.is_few and self._step.is_dependent),
            is_dependent=self._step.is_dependent,
            gates=gates,
            growth=rotation.growth,
            ahead=self._ahead.get(attention.layer) if self._step.is_few else None,
            sees_new=not is_encoded,
            values=new_values,
        )

    def _attend(
        self, out: Tensor, query: Tensor, attention: AttentionHeads, biases: Tensor | None
    ) -> None:
        inputs, descriptor = self._inputs, self._step.descriptor
        num_reqs = descriptor.num_reqs
        heads = HeadShape.of(attention.spec)
        launch = self._step.launches[heads]
        num_tokens = num_reqs if descriptor.uniform else len(query)
        group, keys, values = self._cache.layers[attention.layer]
        paged_attention(
            out[:num_tokens],
            query[:num_tokens],
            keys,
            values,
            inputs.block_tables[group, :num_reqs],
            inputs.step.query_starts[: num_reqs + 1],
            inputs.step.context_lens[:num_reqs],
            launch.config,
            attention.spec.scale,
            window=attention.spec.window,
            soft_cap=attention.spec.soft_cap,
            sinks=attention.sinks,
            num_splits=launch.num_splits,
            scratch=self._buffers.scratch(heads, num_tokens, launch.num_splits),
            masks_all=launch.masks_all,
            ends=inputs.ends(attention.spec.ahead, num_tokens),
            biases=biases,
        )


def _norms_of(attention: AttentionHeads, q_norm: HeadNorm, k_norm: HeadNorm | None) -> HeadNorms:
    """Return norms of heads of a layer, those of queries and those of keys."""
    spec, kind = attention.spec, q_norm.spec
    return HeadNorms(
        q_norm.parameters,
        None if k_norm is None else k_norm.parameters,
        kind.eps,
        kind.offset,
        spec.value_norm,
        spec.norms_rotated,
        kind.kind == "layer",
        spec.norms_have_bias,
    )


def _parts_of(qkv: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the queries and keys, [tokens, heads, head_dim], the values, [tokens, kv_heads,
    value_head_dim], and the gates, [tokens, gate_width], of what attention reads."""
    widths = [spec.key_width, spec.value_width] if spec.source is None else [0, 0]
    widths = [spec.query_width + widths[0], widths[1], spec.gate_width]
    of_heads, of_values, of_gates = qkv.split_with_sizes(widths, dim=1)
    heads = of_heads.unflatten(1, (-1, spec.head_dim))
    values = of_values.unflatten(1, (-1, spec.value_head_dim)) if of_values.shape[1] else None
    return heads, values, of_gates


def _multiply_by_gates(attended: Tensor, gates: Tensor | None, spec: AttentionSpec) -> None:
    """Multiply the result, [tokens, heads, value_head_dim], by the function of its gates, if it has
    any; these may be overwritten."""
    if gates is None:
        return
    opened = gates.sigmoid_() if spec.gate == "sigmoid" else softplus(gates)
    attended.mul_(opened)
