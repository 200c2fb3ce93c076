"""The decoders of ModernBERT (Weller et al., "Seq vs Seq", 2025: Ettin): its layers, whose tokens
attend to those before them, and what it computes in front of the head that predicts masked tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.modernbert import GATE_UP, NAMES, configure_layers
from shmllm.models.fields import Fields
from shmllm.models.head_specs import TransformSpec
from shmllm.models.mixer_specs import AttentionSpec, MixerSpec
from shmllm.models.readers import read_activation
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_NAMES = NAMES | {"model.transform.": "lm_head."}


def configure(fields: Fields) -> ModelConfig:
    if fields.values.get("local_attention", 128) is None:
        raise fields.error("local_attention null is not supported")
    fields.integer("local_attention", 128, minimum=2)  # half of it is a window
    model = configure_layers(fields)
    transform = TransformSpec(
        activation=read_activation(fields, "classifier_activation", "gelu"),
        bias=fields.flag("classifier_bias", False),
    )
    return replace(
        model,
        layers=tuple(layer.with_mixers(_causal) for layer in model.layers),
        transform=transform,
        lm_head_bias=fields.flag("decoder_bias", True),
    )


def _causal(mixer: MixerSpec) -> MixerSpec:
    """Returns an attention to the tokens before each one. A window of an encoder reaches half of
    ``local_attention`` to each side, one of a decoder so many tokens back, the own one included."""
    assert isinstance(mixer, AttentionSpec)
    window = None if mixer.window is None else mixer.ahead
    assert window is None or isinstance(window, int)
    return replace(mixer, ahead=0, window=window)


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.fused_names import with_fused

    return {renamed(name, _NAMES): views for name, views in with_fused(weights, GATE_UP).items()}
