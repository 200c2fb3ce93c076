"""The kinds of mixers: which class owns the weights of each, and which operations it consists of.

A new kind is a spec in `mixer_specs.py` or `recurrent_specs.py`, a class of weights in a module of
its own, an operation of `ops.Ops`, and a row of `MIXERS`. Several of a layer are a kind, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from shmllm.models.attention import Attention
from shmllm.models.compressed_attention import CompressedAttention
from shmllm.models.compressed_specs import CompressedAttentionSpec
from shmllm.models.config import ModelConfig
from shmllm.models.delta_net import DeltaNet
from shmllm.models.kimi_delta import KimiDelta
from shmllm.models.latent_attention import LatentAttention
from shmllm.models.layers import Linear, NamedWeights, Norm, Storage
from shmllm.models.lightning import Lightning
from shmllm.models.mamba2_mixer import Mamba2
from shmllm.models.mamba_mixer import Mamba
from shmllm.models.mixer_specs import (
    AttentionSpec,
    LatentAttentionSpec,
    MixerSpec,
    SideBySideSpec,
)
from shmllm.models.ops import Ops
from shmllm.models.recurrent_specs import (
    DeltaNetSpec,
    KimiDeltaSpec,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    ShortConvolutionSpec,
)
from shmllm.models.short_convolution import ShortConvolution


class Mixer(Protocol):
    """The weights of a layer's mixer."""

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Its own norms."""

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.0"."""


@dataclass(frozen=True, slots=True)
class MixerKind:
    """A kind of mixers.

    Attributes:
        make: (config, layer, spec, storage) -> the weights of a layer's mixer.
        run: (ops, x, residual, mixer) -> its output, or None: it has added that to the residual
            stream. x is the normalised stream, residual the stream itself; all are
            [tokens, hidden].
    """

    make: Callable[[ModelConfig, int, Any, Storage], Mixer]
    run: Callable[[Ops, Tensor, Tensor, Any], Tensor | None]


def _attend(ops: Ops, x: Tensor, residual: Tensor, attention: Attention) -> Tensor:
    qkv, clip = ops.linear(x, attention.qkv_proj), attention.spec.clip
    if clip is not None:
        qkv = ops.clip(qkv, clip)
    if attention.indexer is not None:
        ops.choose_blocks(x, attention)
    out, scale = ops.attend(qkv, attention), attention.spec.output_scale
    if attention.gate_proj is not None:
        out = ops.open_heads(out, ops.linear(x, attention.gate_proj))
    if scale != 1:
        out = ops.scale(out, scale)
    if attention.output_norm is not None:
        out = ops.norm(out, attention.output_norm)
    return ops.linear(out, attention.o_proj)


def _attend_to_latents(ops: Ops, x: Tensor, residual: Tensor, attention: LatentAttention) -> Tensor:
    hidden, query = x, ops.store_latents(ops.linear(x, attention.in_proj), attention)
    if attention.query_norm is not None:
        x = ops.norm(query, attention.query_norm)
    read = x
    if attention.spec.gates_of_elements:
        read = ops.beside(x, query)
    if attention.indexer is not None:
        ops.choose_tokens(hidden, x, attention)
    if attention.query_up is not None:
        query = ops.linear(read, attention.query_up)
    out = ops.attend_to_latents(query, attention)
    if attention.gate_proj is not None:
        out = ops.open_heads(out, ops.linear(hidden, attention.gate_proj))
    return ops.linear(out, attention.o_proj)


def _attend_to_lists(
    ops: Ops, x: Tensor, residual: Tensor, attention: CompressedAttention
) -> Tensor:
    first = ops.store_keys(ops.linear(x, attention.in_proj), attention)
    latent = ops.norm(first, attention.query_norm)
    if attention.part_proj is not None:
        ops.compress(ops.linear(x, attention.part_proj), attention)
    ops.list_keys(x, latent, attention)
    out = ops.attend_to_lists(ops.linear(latent, attention.query_up), attention)
    return ops.linear(out, attention.o_proj)


def _run_delta_net(ops: Ops, x: Tensor, residual: Tensor, net: DeltaNet) -> Tensor:
    return ops.linear(ops.delta_net(ops.linear(x, net.in_proj), net), net.out_proj)


def _run_kimi_delta(ops: Ops, x: Tensor, residual: Tensor, net: KimiDelta) -> Tensor:
    projected = ops.linear(x, net.in_proj)
    decays = _project(ops, x, net.decay_down, net.decay_up)
    out = ops.kimi_delta(projected, decays, net)
    gates = _project(ops, x, net.gate_down, net.gate_up)
    return ops.linear(ops.gate_heads(out, gates, net), net.out_proj)


def _project(ops: Ops, x: Tensor, down: Linear | None, up: Linear) -> Tensor:
    return ops.linear(x, up) if down is None else ops.low_rank(x, down, up)


def _run_mamba2(ops: Ops, x: Tensor, residual: Tensor, mixer: Mamba2) -> Tensor:
    projected = ops.linear(x, mixer.in_proj)
    if mixer.factors is not None:
        projected = ops.scale(projected, 1.0, mixer.factors)
    return ops.linear(ops.mamba2(projected, mixer), mixer.out_proj)


def _run_lightning(ops: Ops, x: Tensor, residual: Tensor, mixer: Lightning) -> Tensor:
    return ops.linear(ops.mamba2(ops.linear(x, mixer.in_proj), mixer), mixer.out_proj)


def _run_mamba(ops: Ops, x: Tensor, residual: Tensor, mixer: Mamba) -> Tensor:
    return ops.linear(ops.mamba(ops.linear(x, mixer.in_proj), mixer), mixer.out_proj)


def _run_short_convolution(
    ops: Ops, x: Tensor, residual: Tensor, mixer: ShortConvolution
) -> Tensor:
    mixed = ops.short_convolution(ops.linear(x, mixer.in_proj), mixer)
    return ops.linear(mixed, mixer.out_proj)


class SideBySide:
    """The weights of several mixers of a layer.

    Attributes:
        spec: what they are.
        mixers: the weights of each.
    """

    def __init__(
        self, config: ModelConfig, layer: int, spec: SideBySideSpec, storage: Storage
    ) -> None:
        self.spec = spec
        self.mixers = tuple(make_mixer(config, layer, each, storage) for each in spec.mixers)

    @property
    def norms(self) -> tuple[Norm, ...]:
        """The norms of all."""
        return tuple(norm for mixer in self.mixers for norm in mixer.norms)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.0"."""
        every = (mixer.named_weights(prefix).items() for mixer in self.mixers)
        return {name: views for weights in every for name, views in weights}


def _run_side_by_side(ops: Ops, x: Tensor, residual: Tensor, several: SideBySide) -> None:
    spec = several.spec
    for kind, mixer, scale in zip(spec.mixers, several.mixers, spec.scales, strict=True):
        ops.add_norm(MIXERS[type(kind)].run(ops, x, residual, mixer), residual, None, scale)


MIXERS: dict[type[MixerSpec | SideBySideSpec], MixerKind] = {
    AttentionSpec: MixerKind(Attention, _attend),
    LatentAttentionSpec: MixerKind(LatentAttention, _attend_to_latents),
    CompressedAttentionSpec: MixerKind(CompressedAttention, _attend_to_lists),
    DeltaNetSpec: MixerKind(DeltaNet, _run_delta_net),
    KimiDeltaSpec: MixerKind(KimiDelta, _run_kimi_delta),
    LightningSpec: MixerKind(Lightning, _run_lightning),
    Mamba2Spec: MixerKind(Mamba2, _run_mamba2),
    MambaSpec: MixerKind(Mamba, _run_mamba),
    ShortConvolutionSpec: MixerKind(ShortConvolution, _run_short_convolution),
    SideBySideSpec: MixerKind(SideBySide, _run_side_by_side),
}


def make_mixer(
    config: ModelConfig, layer: int, spec: MixerSpec | SideBySideSpec, storage: Storage
) -> Mixer:
    """Returns the weights of a layer's mixer."""
    return MIXERS[type(spec)].make(config, layer, spec, storage)
