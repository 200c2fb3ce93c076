"""MiniMax-Text-01 and M1: lightning attention beside attention, experts, and norms that take the
residual stream's place."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import check_choice
from shmllm.models.families.mixtral import named_weights as mixtral_weights
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.mamba_fields import CHANNEL_MULTIPLE, LINEAR
from shmllm.models.mixer_specs import AttentionSpec, MixerSpec
from shmllm.models.readers import (
    FULL,
    read_attention,
    read_experts,
    read_layer_types,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
    read_window,
)
from shmllm.models.recurrent_specs import LightningSpec
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MoESpec

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_PARTS = {FULL: "full_attn", LINEAR: "linear_attn"}
_AUTHORS_PARTS = {"full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp"}
"""The parts of a layer as transformers' names of their factors begin, and as the authors' do."""
_CONSTANTS = "slope_rate", "query_decay", "key_decay", "diagonal_decay"
"""What transformers' files have of a lightning attention beside its weights."""
_NEXT = "next_layernorm"
"""The norm behind a layer's MLP, which in files is the first one of the next layer."""


def configure(fields: Fields) -> ModelConfig:
    fields = _under_transformers_names(fields)
    num_layers, positions = read_num_layers(fields), read_positions(fields, 4096 * 32)
    types = _read_types(fields, num_layers)
    norm, of_mlp = read_norm(fields, default=1e-5), _read_factors(fields, "mlp")
    attention, experts = _read_attention(fields, positions), _read_experts(fields)
    layers = []
    for index, kind in enumerate(types):
        alpha, beta = _read_factors(fields, _PARTS[kind])
        # The norm of a sum times a number is that of the sum, but for the number that it adds.
        eps = norm.eps / alpha**2, norm.eps / of_mlp[0] ** 2
        norms = LayerNorms(
            after_mixer="post_attention_layernorm", after_mlp=_NEXT, of_sums=True, eps_behind=eps
        )
        mixer: MixerSpec = attention
        if kind == LINEAR:
            mixer = _lightning(fields, attention, index, num_layers)
        layers.append(LayerSpec(mixer=mixer, mlp=experts, norms=norms, mixed_scale=beta / alpha))
    return replace(
        read_model(fields, layers, positions),
        norm=norm,
        embedding_norm=True,
        final_norm=False,
        residual_scale=of_mlp[1] / of_mlp[0],
        skipped_prefixes=tuple(
            f"model.layers.{index}.self_attn.{name}"
            for index, kind in enumerate(types)
            for name in _CONSTANTS
            if kind == LINEAR
        ),
    )


def _under_transformers_names(fields: Fields) -> Fields:
    """Returns the fields of files of the authors (``MiniMaxText01ForCausalLM``,
    ``MiniMaxM1ForCausalLM``) under the names that transformers' files have."""
    found = {
        f"{part}_{factor}_factor": fields.values.get(f"layernorm_{own}_{factor}")
        for part, own in _AUTHORS_PARTS.items()
        for factor in ("alpha", "beta")
    }
    types: Any = fields.values.get("attn_type_list")
    if types is not None:
        if not isinstance(types, list) or any(each not in (0, 1) for each in types):
            raise fields.error("'attn_type_list' must list 0 or 1 for each layer")
        found["layer_types"] = [FULL if each else LINEAR for each in types]
    if types is not None or "postnorm" in fields.values:
        check_choice(fields, "postnorm", True)
    check_choice(fields, "shared_intermediate_size", 0)
    return fields.with_defaults({name: value for name, value in found.items() if value is not None})


def _read_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    types = read_layer_types(fields, num_layers, (LINEAR, FULL))
    return types or tuple(LINEAR if index % 2 else FULL for index in range(num_layers))


def _read_factors(fields: Fields, part: str) -> tuple[float, float]:
    """Returns the factors of the residual stream, and of what a part adds to it."""
    alpha, beta = (fields.number(f"{part}_{factor}_factor", 1.0) for factor in ("alpha", "beta"))
    return alpha, beta


def _read_attention(fields: Fields, positions: int) -> AttentionSpec:
    attention = read_attention(fields, num_kv_heads=8)
    head_dim = attention.head_dim
    rotary_dim = fields.integer("rotary_dim", head_dim, maximum=head_dim)
    if fields.values.get("partial_rotary_factor") is not None:
        check_choice(fields, "partial_rotary_factor", rotary_dim / head_dim)
    rope = RopeConfig.from_fields(
        fields, positions, head_dim, theta=1e6, partial=rotary_dim / head_dim
    )
    return replace(attention, rope=rope, window=read_window(fields, None))


def _lightning(
    fields: Fields, attention: AttentionSpec, layer: int, num_layers: int
) -> LightningSpec:
    if attention.head_dim % CHANNEL_MULTIPLE:
        raise fields.error(
            f"head_dim must be a multiple of {CHANNEL_MULTIPLE}, not {attention.head_dim}"
        )
    slope = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
    return LightningSpec(heads=attention.num_heads, head_dim=attention.head_dim, slope=slope)


def _read_experts(fields: Fields) -> MoESpec:
    inner = fields.integer("intermediate_size", 14336)
    return replace(read_experts(fields, inner, num_experts=8, top_k=2), renormalize=True)


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations under this family's names, each norm under that of the part that
    reads it."""
    last = len(config.layers) - 1
    weights["model.layers.0.input_layernorm.weight"] = weights.pop("model.embed_norm.weight")
    for index in range(len(config.layers)):
        name = "norm" if index == last else f"layers.{index + 1}.input_layernorm"
        weights[f"model.{name}.weight"] = weights.pop(f"model.layers.{index}.{_NEXT}.weight")
    return mixtral_weights(weights, config)
