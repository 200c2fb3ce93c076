"""All layers of a dense model in one launch, for steps of up to eight tokens.

This module owns which models and steps can be computed so; `shmllm_kernels.gpu.decoder` computes
them. It must not know whether a launch is executed or captured.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from shmllm.models.attention import Attention
from shmllm.models.config import ModelConfig
from shmllm.models.decoder import DecoderModel
from shmllm.models.decoder_layer import DecoderLayer
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.layers import Linear
from shmllm.models.mixer_specs import WITHIN_ITEMS, AttentionSpec
from shmllm.models.mlp import MLP
from shmllm.models.specs import MLPSpec
from shmllm.worker.gpu.attention_launches import AttentionLaunch, HeadShape
from shmllm.worker.gpu.buffers import GpuBuffers
from shmllm.worker.gpu.cache import GpuKVCache
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor
from shmllm.worker.gpu.inputs import GpuInputs
from shmllm_kernels.gpu.configs import device_key, has_dependent_launches, num_multiprocessors
from shmllm_kernels.gpu.decoder import (
    MAX_HEAD_DIM,
    DecoderLayers,
    DecoderMemory,
    DecoderNumbers,
    LayerOperands,
    attention_tile,
    run_layers,
    splits_at_once,
)
from shmllm_kernels.gpu.few_rows import MAX_ROWS
from shmllm_kernels.gpu.row_configs import DecoderConfig, decoder_config
from shmllm_kernels.gpu.row_operands import Activation


def reason_against(config: ModelConfig, has_packed: bool) -> str | None:
    """Return why the layers of a model cannot be one launch, or None.

    Args:
        config: the model's configuration.
        has_packed: whether some of its matrices are packed.
    """
    if has_packed:
        return "some of its matrices are packed"
    if config.norm.kind != "rms":
        return "its norms are no RMSNorms"
    if config.per_layer is not None or config.scales_layers or config.num_levels:
        return "its layers have inputs or factors of their own"
    if config.has_streams:
        return "it has several residual streams"
    for index, layer in enumerate(config.layers):
        reason = _reason_against_layer(layer)
        if reason is not None:
            return f"{reason} of layer {index}"
    kinds = set(map(_without_places, config.layers))
    rotations = {(rope.rotary_dim, rope.interleaved) for rope in config.ropes}
    are_equal = len(kinds) == 1 and len(rotations) <= 1
    return None if are_equal else "its layers differ in norms, heads, rotation or MLP"


def _reason_against_layer(layer: LayerSpec) -> str | None:
    mixer, mlp = layer.mixer, layer.mlp
    if not isinstance(mixer, AttentionSpec):
        return "the kernel does not compute the mixer"
    if not isinstance(mlp, MLPSpec) or mlp.sparsity or layer.mlp_scale != 1:
        return "the kernel does not compute the feed-forward"
    if mlp.norm is not None:
        return "the kernel does not compute the norm behind the activation"
    if mlp.learns_activation or mlp.bound is not None:
        return "the kernel does not compute the activation"
    if layer.laurel_rank is not None:
        return "the kernel does not compute the branch beside the mixer"
    names = layer.norms
    has_both = names.before_mixer is not None and names.before_mlp is not None
    are_equal = (names.after_mixer is None) == (names.after_mlp is None)
    if not has_both or not are_equal or names.of_sums or names.gated or layer.parallel:
        return "the kernel takes norms before both blocks, and behind both or none, not the norms"
    if mixer.head_dim > MAX_HEAD_DIM:
        return f"heads of at most {MAX_HEAD_DIM} elements fit into its registers, not those"
    has_more = mixer.sinks or mixer.gated or mixer.value_norm or mixer.growth is not None
    has_more |= mixer.value_head_dim != mixer.head_dim or mixer.output_scale != 1
    has_more |= mixer.qk_norm not in (None, "head") or mixer.norms_rotated or mixer.clip is not None
    has_more |= mixer.biases is not None or mixer.output_norm or mixer.indexer is not None
    is_plain = mixer.source is None and mixer.ahead in (0, WITHIN_ITEMS)
    return None if is_plain and not has_more else "the kernel does not compute the attention"


def _without_places(layer: LayerSpec) -> LayerSpec:
    """Return a layer without what may differ from layer to layer: which tokens attention reads, and
    by which angles heads are rotated."""
    assert isinstance(layer.mixer, AttentionSpec), "checked before"
    return replace(layer, mixer=replace(layer.mixer, window=None, rope=None, ahead=0))


def tile_of(model: DecoderModel, device: torch.device) -> DecoderConfig:
    """Return the tile of a model's launches on a device."""
    return decoder_config(model.config.hidden_size, model.dtype, device_key(device))


class PersistentDecoder:
    """Launches the layers of a model; see `decoder.run_layers`.

    Args:
        model: the model, which nothing is against; the addresses of its weights must not change.
        cache: the KV cache.
        inputs: the inputs of each step.
        buffers: the buffers for the results.
        device: the device.
    """

    def __init__(
        self,
        model: DecoderModel,
        cache: GpuKVCache,
        inputs: GpuInputs,
        buffers: GpuBuffers,
        device: torch.device,
    ) -> None:
        config, spec = model.config, model.config.attentions[0]
        mlp = model.config.feed_forwards[0]
        assert isinstance(mlp, MLPSpec), "checked before"
        self._inputs, self._buffers = inputs, buffers
        self._shape = HeadShape.of(spec)
        self._tile = tile_of(model, device)
        self._programs = self._tile.programs * num_multiprocessors(device)
        self._asks_cache = has_dependent_launches(device)
        attentions = [_attention_of(layer) for layer in model.layers]
        head_norm = attentions[0].q_norm
        numbers = DecoderNumbers(
            config.norm.eps,
            config.norm.offset,
            0.0 if head_norm is None else head_norm.spec.eps,
            0.0 if head_norm is None else head_norm.spec.offset,
            spec.scale,
            config.residual_scale,
            Activation(mlp.activation, mlp.gated),
            any(rope.interleaved for rope in config.ropes),
            spec.soft_cap,
        )
        layers = [self._operands(layer, cache) for layer in model.layers]
        self._layers = DecoderLayers(layers, numbers)
        self._memory = DecoderMemory(
            buffers.product(spec.in_width),
            buffers.attended(spec.width),
            buffers.activated(mlp.inner),
            torch.zeros(2, dtype=torch.int32, device=device),
            buffers.spare,
            torch.zeros(2, MAX_ROWS, config.hidden_size, dtype=model.dtype, device=device),
        )

    def _operands(self, layer: DecoderLayer, cache: GpuKVCache) -> LayerOperands:
        attention, mlp, names = _attention_of(layer), layer.mlp, layer.spec.norms
        assert isinstance(mlp, MLP), "checked before"
        assert names.before_mixer is not None, "checked before"
        assert names.before_mlp is not None, "checked before"
        group, keys, values = cache.layers[attention.layer]
        spec = attention.spec
        cos, sin = (None, None) if spec.rope is None else self._buffers.angles[spec.rope]
        query_norm, key_norm = attention.q_norm, attention.k_norm
        return LayerOperands(
            layer.norms[names.before_mixer].weight,
            *_matrix(attention.qkv_proj),
            *_matrix(attention.o_proj),
            layer.norms[names.before_mlp].weight,
            *_matrix(mlp.gate_up_proj),
            *_matrix(mlp.down_proj),
            None if names.after_mixer is None else layer.norms[names.after_mixer].weight,
            None if names.after_mlp is None else layer.norms[names.after_mlp].weight,
            keys,
            values,
            self._inputs.block_tables[group],
            self._inputs.step.slots[group],
            cos,
            sin,
            None if query_norm is None else query_norm.weight,
            None if key_norm is None else key_norm.weight,
            spec.window,
        )

    def takes(self, descriptor: BatchDescriptor) -> bool:
        """Return whether the kernel computes a step of padded sizes: each request has one token, or
        so few as `decode_attention` takes."""
        return descriptor.num_tokens <= MAX_ROWS and self._launch(descriptor).max_tokens > 0

    def run(self, residual: Tensor, descriptor: BatchDescriptor) -> None:
        """Launch the layers.

        Args:
            residual: [tokens, hidden], the residual stream, changed in place.
            descriptor: the padded sizes of a step that `takes` accepts.
        """
        launch, num_reqs = self._launch(descriptor), descriptor.num_reqs
        step, splits = self._inputs.step, self._splits(launch, num_reqs)
        run_layers(
            residual,
            self._layers,
            self._memory,
            step.query_starts[: num_reqs + 1],
            step.context_lens[:num_reqs],
            self._tile,
            attention_tile(launch.config, self._shape.head_dim),
            self._programs,
            splits,
            self._buffers.scratch(self._shape, len(residual), splits),
            launch.max_tokens,
            self._asks_cache,
        )

    def _launch(self, descriptor: BatchDescriptor) -> AttentionLaunch:
        choice = self._buffers.attention.choose(descriptor, descriptor.num_tokens)
        return choice[self._shape]

    def _splits(self, launch: AttentionLaunch, num_reqs: int) -> int:
        """Return the number of parts of a context: as many as programs compute at once."""
        if self._buffers.attention.deterministic:
            return launch.num_splits
        num_kv_heads = self._shape.num_kv_heads
        return splits_at_once(launch.num_splits, self._programs, num_reqs, num_kv_heads)


def _attention_of(layer: DecoderLayer) -> Attention:
    assert isinstance(layer.mixer, Attention), "checked before"
    return layer.mixer


def _matrix(linear: Linear) -> tuple[Tensor, Tensor | None]:
    assert isinstance(linear.weight, Tensor), "checked before"
    return linear.weight, linear.bias
