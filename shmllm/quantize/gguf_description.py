"""The metadata and tensors of a GGUF file that describe a model's shapes and constants.

The names are llama.cpp's. What only one architecture has is a function and a line in
_OF_ARCHITECTURE. This module must not know tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from shmllm.formats.gguf_family import NUM_HEADS, NUM_KV_HEADS
from shmllm.frontend.gguf.expert_fields import SIGMOIDS
from shmllm.frontend.gguf.rope import FACTORS, LONG_FACTORS, SHORT_FACTORS, llama3_factors
from shmllm.models.bias_specs import LinearBiases
from shmllm.models.config import ModelConfig
from shmllm.models.mixer_specs import AttentionSpec, LatentAttentionSpec
from shmllm.models.recurrent_specs import Mamba2Spec, MambaSpec, ShortConvolutionSpec
from shmllm.models.rope import attention_factor
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MLPSpec, MoESpec

Values = dict[str, Any]
"""Metadata by their keys: str, int, float, bool, or lists of these."""

_TOLERANCE = 1e-5
_NUM_SECTIONS = 4


def describe(config: ModelConfig, fields: Mapping[str, Any], architecture: str) -> Values:
    """The metadata of a model's shapes and constants.

    Args:
        config: the model.
        fields: the content of its config.json.
        architecture: llama.cpp's name, which is the prefix of the keys.

    Raises:
        QuantizeError: no layer has attention, of which a file says the heads.
    """
    values: Values = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": _feed_forward_length(config, fields),
        _NORM_EPS[config.norm.kind]: config.norm.eps,
        "vocab_size": config.vocab_size,
    }
    values |= _mixers(config)
    if config.mixtures:
        values |= _experts(config.mixtures[0])
    windows = _windows(config)
    if windows:
        values["attention.sliding_window"] = windows[0]
    if config.logits_cap is not None:
        values["final_logit_softcapping"] = config.logits_cap
    rope = _main_rope(config)
    values |= {} if rope is None else _rope(rope)
    own = _OF_ARCHITECTURE.get(architecture)
    values |= {} if own is None else own(config, fields)
    return {f"{architecture}.{key}": value for key, value in values.items()}


_NORM_EPS = {
    "rms": "attention.layer_norm_rms_epsilon",
    "layer": "attention.layer_norm_epsilon",
}


def _mixers(config: ModelConfig) -> Values:
    """What the mixers of all layers are. A layer without attention has 0 heads of keys."""
    first = {type(mixer): mixer for mixer in reversed(config.mixers)}
    values: Values = {NUM_HEADS: 0}
    for kind, mixer in first.items():
        values |= _OF_MIXER.get(kind, lambda _: {})(mixer)
    if len(first) > 1:
        heads = [0 if kv is None else kv.count for kv in config.layer_kv]
        values[NUM_KV_HEADS] = heads
    return values


def _attention(attention: AttentionSpec) -> Values:
    values: Values = {
        NUM_HEADS: attention.num_heads,
        NUM_KV_HEADS: attention.num_kv_heads,
        "attention.key_length": attention.head_dim,
        "attention.value_length": attention.head_dim,
    }
    if attention.soft_cap is not None:
        values["attn_logit_softcapping"] = attention.soft_cap
    return values


def _latent_attention(attention: LatentAttentionSpec) -> Values:
    values: Values = {
        NUM_HEADS: attention.num_heads,
        NUM_KV_HEADS: attention.num_heads,
        "attention.key_length": attention.nope_dim + attention.rope_dim,
        "attention.value_length": attention.value_dim,
        "attention.kv_lora_rank": attention.rank,
    }
    if attention.query_rank is not None:
        values["attention.q_lora_rank"] = attention.query_rank
    return values


def _mamba(mixer: MambaSpec) -> Values:
    return {
        "ssm.conv_kernel": mixer.taps,
        "ssm.inner_size": mixer.width,
        "ssm.state_size": mixer.state_size,
        "ssm.time_step_rank": mixer.rank,
        "ssm.dt_b_c_rms": mixer.norms == "plain",
    }


def _mamba2(mixer: Mamba2Spec) -> Values:
    return {
        "ssm.conv_kernel": mixer.taps,
        "ssm.inner_size": mixer.width,
        "ssm.state_size": mixer.state_size,
        "ssm.time_step_rank": mixer.heads,
        "ssm.group_count": mixer.groups,
    }


_OF_MIXER: dict[type[Any], Callable[[Any], Values]] = {
    AttentionSpec: _attention,
    LatentAttentionSpec: _latent_attention,
    MambaSpec: _mamba,
    Mamba2Spec: _mamba2,
}


def _feed_forward_length(config: ModelConfig, fields: Mapping[str, Any]) -> int:
    mlp = config.layers[0].mlp
    if mlp is None:
        return 0
    assert isinstance(mlp, MLPSpec | MoESpec), "llama.cpp's families have these"
    width = fields.get("intermediate_size")
    return width if isinstance(mlp, MoESpec) and type(width) is int else mlp.inner


def _experts(mixture: MoESpec) -> Values:
    values: Values = {
        "expert_count": mixture.num_experts,
        "expert_used_count": mixture.top_k,
        "expert_feed_forward_length": mixture.inner,
    }
    if mixture.shared is not None:
        values["expert_shared_feed_forward_length"] = mixture.shared.inner
    return values


def _windows(config: ModelConfig) -> list[int]:
    return sorted({window for window in config.layer_windows if isinstance(window, int)})


def _main_rope(config: ModelConfig) -> RopeConfig | None:
    """The rotation of layers that see all positions, or of the others if those have none."""
    full = [each.rope for each in config.attentions if each.window is None]
    return next((rope for rope in (*full, *config.ropes) if rope is not None), None)


def _rope(rope: RopeConfig) -> Values:
    values: Values = {"rope.freq_base": rope.theta, "rope.dimension_count": rope.rotary_dim}
    factor = attention_factor(rope)
    if rope.type in ("llama3", "yarn", "longrope"):
        values["rope.scaling.original_context_length"] = rope.original_max_positions
    if rope.type in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope.type, "rope.scaling.factor": rope.factor}
    if rope.type == "yarn":
        values |= {
            "rope.scaling.yarn_beta_fast": rope.beta_fast,
            "rope.scaling.yarn_beta_slow": rope.beta_slow,
        }
        factor /= 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    if not math.isclose(factor, 1.0, rel_tol=_TOLERANCE):
        values["rope.scaling.attn_factor"] = factor
    return values


def rope_tensors(config: ModelConfig) -> dict[str, list[float]]:
    """The tensors of factors of frequencies, by name; empty if a model needs none."""
    for rope in config.ropes:
        if rope.type == "llama3":
            length = rope.original_max_positions
            return {
                FACTORS: llama3_factors(
                    rope.theta, config.attentions[0].head_dim, rope.factor, length,
                    rope.low_freq_factor, rope.high_freq_factor,
                )
            }  # fmt: skip
        if rope.type == "longrope":
            return {LONG_FACTORS: [*rope.long_factors], SHORT_FACTORS: [*rope.short_factors]}
    return {}


def _olmo(config: ModelConfig, _: Mapping[str, Any]) -> Values:
    clip = config.attentions[0].clip
    return {} if clip is None else {"attention.clamp_kqv": clip}


def _mpt(config: ModelConfig, fields: Mapping[str, Any]) -> Values:
    biases = config.attentions[0].biases
    assert isinstance(biases, LinearBiases), "MPT has these"
    return _olmo(config, fields) | {"attention.max_alibi_bias": float(biases.steepness)}


def _mistral3(config: ModelConfig, _: Mapping[str, Any]) -> Values:
    growth = config.attentions[0].growth
    if growth is None:
        return {}
    return {
        "attention.temperature_scale": growth.rate,
        "rope.scaling.original_context_length": growth.length,
    }


def _llama4(config: ModelConfig, _: Mapping[str, Any]) -> Values:
    dense = [layer.mlp.inner for layer in config.layers if isinstance(layer.mlp, MLPSpec)]
    sparse = [i for i, layer in enumerate(config.layers) if isinstance(layer.mlp, MoESpec)]
    return {
        "feed_forward_length": next(iter(dense), config.mixtures[0].inner),
        "interleave_moe_layer_step": sparse[0] + 1,
    }


def _hunyuan_moe(config: ModelConfig, _: Mapping[str, Any]) -> Values:
    return {"expert_shared_count": 1}


def _granite(config: ModelConfig, _: Mapping[str, Any]) -> Values:
    return {
        "attention.scale": config.attentions[0].scale,
        "embedding_scale": config.embedding_scale,
        "residual_scale": config.residual_scale,
        "logit_scale": 1 / config.logits_scale,
    }


def _granite_hybrid(config: ModelConfig, fields: Mapping[str, Any]) -> Values:
    """With a flag by which llama.cpp knows whether attention rotates."""
    rotates = config.attentions[0].rope is not None
    return _granite(config, fields) | {"rope.scaling.finetuned": rotates}


def _lfm2(config: ModelConfig, fields: Mapping[str, Any]) -> Values:
    every = (each.taps for each in config.mixers if isinstance(each, ShortConvolutionSpec))
    return {"shortconv.l_cache": next(every, fields.get("conv_L_cache") or 3)}


def _jamba(config: ModelConfig, fields: Mapping[str, Any]) -> Values:
    """A model without experts has one."""
    mixture = next(iter(config.mixtures), None)
    top_k = fields.get("num_experts_per_tok", 2) if mixture is None else mixture.top_k
    return {
        "expert_count": 1 if mixture is None else mixture.num_experts,
        "expert_used_count": top_k,
    }


def _sigmoid_experts(config: ModelConfig, _: Mapping[str, Any]) -> Values:
    """Those that are chosen by sigmoids, behind layers with an MLP."""
    are_dense = [not isinstance(layer.mlp, MoESpec) for layer in config.layers]
    return {
        "leading_dense_block_count": sum(are_dense),
        "expert_gating_func": SIGMOIDS,
        "expert_weights_scale": max((each.weight_scale for each in config.mixtures), default=1.0),
    }


def _lfm2_moe(config: ModelConfig, fields: Mapping[str, Any]) -> Values:
    return _lfm2(config, fields) | _sigmoid_experts(config, fields)


def _ernie_moe(config: ModelConfig, fields: Mapping[str, Any]) -> Values:
    count = _sigmoid_experts(config, fields)["leading_dense_block_count"]
    return {"leading_dense_block_count": count, "interleave_moe_layer_step": 1}


def _shared_experts(config: ModelConfig, fields: Mapping[str, Any]) -> Values:
    mixture = next(iter(config.mixtures), None)
    values: Values = _sigmoid_experts(config, fields) | _pattern(config, fields)
    if mixture is not None:
        shared = 0 if mixture.shared is None else mixture.shared.inner
        values |= {
            "expert_shared_count": shared // mixture.inner,
            "expert_weights_norm": mixture.renormalize,
            "expert_group_count": mixture.num_groups,
            "expert_group_used_count": mixture.top_groups,
        }
    return values


def _deepseek(config: ModelConfig, fields: Mapping[str, Any]) -> Values:
    unread = "expert_gating_func", "expert_group_count", "expert_group_used_count"
    values = _shared_experts(config, fields)
    return {name: value for name, value in values.items() if name not in unread}


def _cohere(config: ModelConfig, _: Mapping[str, Any]) -> Values:
    return {"logit_scale": config.logits_scale}


def _phi3(config: ModelConfig, _: Mapping[str, Any]) -> Values:
    return {"attention.sliding_window": next(iter(_windows(config)), 0)}


def _parallel(config: ModelConfig, _: Mapping[str, Any]) -> Values:
    return {"use_parallel_residual": config.layers[0].parallel}


def _pattern(config: ModelConfig, _: Mapping[str, Any]) -> Values:
    pattern = [window is not None for window in config.layer_windows]
    return {"attention.sliding_window_pattern": pattern} if any(pattern) else {}


def _qwen3_vl(config: ModelConfig, fields: Mapping[str, Any]) -> Values:
    """How the pairs of a head are distributed over time, height and width."""
    text, vision = (fields.get(name) or {} for name in ("text_config", "vision_config"))
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    pairs = config.attentions[0].head_dim // 2
    sections = [*(rope.get("mrope_section") or [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3])]
    return {
        "rope.dimension_sections": (sections + [0] * _NUM_SECTIONS)[:_NUM_SECTIONS],
        "n_deepstack_layers": len(vision.get("deepstack_visual_indexes") or []),
    }


_OF_ARCHITECTURE: dict[str, Callable[[ModelConfig, Mapping[str, Any]], Values]] = {
    "llama4": _llama4,
    "mistral3": _mistral3,
    "mpt": _mpt,
    "hunyuan-moe": _hunyuan_moe,
    "granite": _granite,
    "granitemoe": _granite,
    "granitehybrid": _granite_hybrid,
    "ernie4_5-moe": _ernie_moe,
    "exaone-moe": _shared_experts,
    "dots1": _shared_experts,
    "bailingmoe2": _shared_experts,
    "deepseek": _deepseek,
    "minimax-m2": _sigmoid_experts,
    "afmoe": _shared_experts,
    "jamba": _jamba,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    "cohere2": _cohere,
    "command-r": _cohere,
    "exaone4": _pattern,
    "phi3": _phi3,
    "olmo": _olmo,
    "olmo2": _pattern,
    "gptneox": _parallel,
    "stablelm": _parallel,
    "qwen3vl": _qwen3_vl,
}
"""What only files of one of llama.cpp's architectures have."""
