"""The kinds of mixers: which class owns the weights of each, and which operations it consists of.

A new kind is a spec in `mixer_specs.py` or `recurrent_specs.py`, a class of weights in a module of
its own, an operation of `ops.Ops`, and a row of `MIXERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.delta_net import DeltaNet
from shmllm.models.latent_attention import LatentAttention
from shmllm.models.layers import Attention, NamedWeights, Norm, Storage
from shmllm.models.mamba2_mixer import Mamba2
from shmllm.models.mamba_mixer import Mamba
from shmllm.models.mixer_specs import AttentionSpec, LatentAttentionSpec, MixerSpec
from shmllm.models.ops import Ops
from shmllm.models.recurrent_specs import DeltaNetSpec, Mamba2Spec, MambaSpec, ShortConvolutionSpec
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
        run: (ops, x, mixer) -> its output; x and the output are [tokens, hidden].
    """

    make: Callable[[ModelConfig, int, Any, Storage], Mixer]
    run: Callable[[Ops, Tensor, Any], Tensor]


def _attend(ops: Ops, x: Tensor, attention: Attention) -> Tensor:
    qkv, clip = ops.linear(x, attention.qkv_proj), attention.spec.clip
    if clip is not None:
        qkv = ops.clip(qkv, clip)
    return ops.linear(ops.attend(qkv, attention), attention.o_proj)


def _attend_to_latents(ops: Ops, x: Tensor, attention: LatentAttention) -> Tensor:
    query = ops.store_latents(ops.linear(x, attention.in_proj), attention)
    if attention.query_norm is not None:
        x = ops.norm(query, attention.query_norm)
    if attention.query_up is not None:
        query = ops.linear(x, attention.query_up)
    return ops.linear(ops.attend_to_latents(query, attention), attention.o_proj)


def _run_delta_net(ops: Ops, x: Tensor, net: DeltaNet) -> Tensor:
    return ops.linear(ops.delta_net(ops.linear(x, net.in_proj), net), net.out_proj)


def _run_mamba2(ops: Ops, x: Tensor, mixer: Mamba2) -> Tensor:
    return ops.linear(ops.mamba2(ops.linear(x, mixer.in_proj), mixer), mixer.out_proj)


def _run_mamba(ops: Ops, x: Tensor, mixer: Mamba) -> Tensor:
    return ops.linear(ops.mamba(ops.linear(x, mixer.in_proj), mixer), mixer.out_proj)


def _run_short_convolution(ops: Ops, x: Tensor, mixer: ShortConvolution) -> Tensor:
    mixed = ops.short_convolution(ops.linear(x, mixer.in_proj), mixer)
    return ops.linear(mixed, mixer.out_proj)


MIXERS: dict[type[MixerSpec], MixerKind] = {
    AttentionSpec: MixerKind(Attention, _attend),
    LatentAttentionSpec: MixerKind(LatentAttention, _attend_to_latents),
    DeltaNetSpec: MixerKind(DeltaNet, _run_delta_net),
    Mamba2Spec: MixerKind(Mamba2, _run_mamba2),
    MambaSpec: MixerKind(Mamba, _run_mamba),
    ShortConvolutionSpec: MixerKind(ShortConvolution, _run_short_convolution),
}
