"""Mamba 2: every layer is a mixer alone; there is neither attention nor an MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.mamba_fields import UNLIMITED_POSITIONS, Names, read_mamba2
from shmllm.models.mixer_specs import MixerSpec
from shmllm.models.readers import read_model, read_norm, read_num_layers
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_FIELDS: Names = {
    "heads": ("num_heads", 128),
    "head_dim": ("head_dim", 64),
    "groups": ("n_groups", 8),
    "state_size": ("state_size", 128),
    "taps": ("conv_kernel", 4),
    "bias": ("use_bias", False),
    "convolution_bias": ("use_conv_bias", True),
    "expand": ("expand", 2),
    "activation": ("hidden_act", "silu"),
}
_NAMES = {
    ".mamba.": ".mixer.",
    "model.embed_tokens.": "model.embeddings.",
    "model.norm.": "model.norm_f.",
}
"""The parts of names that differ from the default ones."""


def configure(fields: Fields) -> ModelConfig:
    return configure_with(fields, read_mamba2(fields, _FIELDS))


def configure_with(fields: Fields, mixer: MixerSpec, *, tied: bool = False) -> ModelConfig:
    """Returns the configuration of a model whose layers all have this mixer.

    Args:
        fields: the fields of config.json.
        mixer: the mixer.
        tied: the default of ``tie_word_embeddings``.
    """
    layer = LayerSpec(mixer=mixer, mlp=None, norms=LayerNorms(before_mixer="norm"))
    layers = [layer] * read_num_layers(fields)
    model = read_model(fields, layers, UNLIMITED_POSITIONS, tied=tied)
    return replace(model, norm=read_norm(fields, "layer_norm_epsilon", 1e-5))


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _NAMES): views for name, views in weights.items()}
