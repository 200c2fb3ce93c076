"""Decoders whose tokens attend to those behind them, too."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import AttentionSpec, MixerSpec
from shmllm_kernels.windows import Chunk


def attend_both_ways(layers: tuple[LayerSpec, ...], fields: Fields) -> tuple[LayerSpec, ...]:
    """Returns a decoder's layers with attention both ways, as transformers computes it for a config
    with ``is_causal`` false: as far ahead as back, a window's own position not included."""

    def changed(mixer: MixerSpec) -> MixerSpec:
        if not isinstance(mixer, AttentionSpec):
            raise fields.error("is_causal False is supported with plain attention only")
        if isinstance(mixer.window, Chunk):
            raise fields.error("is_causal False is not supported with chunks of attention")
        wider = None if mixer.window is None else mixer.window + 1
        return replace(mixer, window=wider, ahead=mixer.window)

    return tuple(layer.with_mixers(changed) for layer in layers)
