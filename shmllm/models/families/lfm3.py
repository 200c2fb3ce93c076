"""LFM3: LFM2's short convolutions, with more taps, beside attention with gates of heads, in layers
with a window and in those without, whose rotations differ; norms behind mixers and MLPs, too."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import check_choice
from shmllm.models.families.lfm2 import CONVOLUTION, NORMS, read_convolution
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import MixerSpec
from shmllm.models.readers import (
    FULL,
    SLIDING,
    read_attention,
    read_layer_types,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
    read_rope_of_type,
    read_window,
    windows_by_type,
)
from shmllm.models.specs import MLPSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}
"""The rotations of a file that has no parameters of them."""
_TYPES = SLIDING, CONVOLUTION, FULL, CONVOLUTION
"""The types of layers of a file that does not say them; the first one is a convolution, too."""
_SANDWICH = replace(NORMS, after_mixer="post_operator_norm", after_mlp="post_ffn_norm")
_NAMES = {
    "model.norm.": "model.embedding_norm.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.",
}
_GATES = ".self_attn.gate_proj.", ".self_attn.g_proj."
"""The names of gates in files and in transformers' modules."""


def configure(fields: Fields) -> ModelConfig:
    check_choice(fields, "attention_bias", False)
    num_layers, positions = read_num_layers(fields), read_positions(fields, 128_000)
    types = read_layer_types(fields, num_layers, (FULL, SLIDING, CONVOLUTION))
    if types is None:
        types = tuple(_TYPES[index % 4] if index else CONVOLUTION for index in range(num_layers))
    mixers = {kind: _read_mixer(fields, kind, positions) for kind in dict.fromkeys(types)}
    norms = _SANDWICH if fields.flag("use_sandwich_norm", True) else NORMS
    mlp = MLPSpec(inner=fields.integer("intermediate_size", 7680))
    layers = [LayerSpec(mixer=mixers[kind], mlp=mlp, norms=norms) for kind in types]
    model = read_model(fields, layers, positions, tied=True)
    return replace(model, norm=read_norm(fields, "norm_eps", 1e-5))


def _read_mixer(fields: Fields, kind: str, positions: int) -> MixerSpec:
    if kind == CONVOLUTION:
        return read_convolution(fields, default_taps=7)
    attention = read_attention(fields, num_kv_heads=4, head_dim=128)
    [window] = windows_by_type(fields, [kind], read_window(fields, 256))
    has_gates = fields.flag("use_attention_gate", True)
    return replace(
        attention,
        window=window,
        rope=read_rope_of_type(fields, positions, attention.head_dim, kind, _ROPES),
        qk_norm="head",
        gated=has_gates,
        gates_of_heads=has_gates,
        gates_apart=has_gates,
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _NAMES): views for name, views in weights.items()}


def other_names(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations of the gates under the names of transformers' modules."""
    return {name.replace(*_GATES): views for name, views in weights.items() if _GATES[0] in name}
