"""The fields of config.json that only types of models with experts have: more of `family_fields`.

A type is a function and a line in OF_MIXTURE, as there.
"""

from __future__ import annotations

from collections.abc import Callable

from shmllm.frontend.gguf.family_fields import (
    WINDOW,
    Json,
    check_one_base,
    ernie,
    granite,
    granite_factors,
    layer_types,
    lfm2,
    no_window,
    qwen35,
    scale,
)
from shmllm.frontend.gguf.metadata import Metadata

SIGMOIDS = 2
"""The value of ``expert_gating_func`` for experts that are chosen by sigmoids."""
_SHARED_WIDTH = "expert_shared_feed_forward_length"


def _experts(known: Metadata, count: str) -> Json:
    return {
        count: known.whole("expert_count"),
        "num_experts_per_tok": known.whole("expert_used_count"),
    }


def _count(known: Metadata, name: str) -> int:
    """A whole number; 0 if the file does not say it."""
    return 0 if known.find(name) in (None, 0) else known.whole(name)


def _num_dense(known: Metadata) -> int:
    """How many of the first layers have an MLP in place of experts."""
    return _count(known, "leading_dense_block_count")


def _num_shared(known: Metadata, inner: int, default: int) -> int:
    """How many experts of this width make the MLP that all tokens go to."""
    width = _count(known, _SHARED_WIDTH) or default * inner
    if width % inner:
        raise known.header.error(f"{_SHARED_WIDTH} {width:,} is no multiple of {inner:,}")
    return width // inner


def _check_sigmoids(known: Metadata, default: int = 0) -> None:
    """Refuses other experts; the default stands for a file that does not say it."""
    if (known.find("expert_gating_func") or default) != SIGMOIDS:
        raise known.header.error("experts that are not chosen by sigmoids are not supported")


def _mixtral(known: Metadata, config: Json) -> Json:
    return no_window(known, config) | _experts(known, "num_local_experts")


def _qwen2_moe(known: Metadata, config: Json) -> Json:
    inner, fields = config["intermediate_size"], _experts(known, "num_experts")
    smaller = max(inner // fields["num_experts_per_tok"], 1)
    return (
        no_window(known, config)
        | fields
        | {
            "moe_intermediate_size": known.whole("expert_feed_forward_length", smaller),
            "shared_expert_intermediate_size": known.whole(_SHARED_WIDTH, inner),
            "norm_topk_prob": known.flag("expert_weights_norm", False),
            "qkv_bias": config["attention_bias"],
        }
    )


def _hunyuan_moe(known: Metadata, config: Json) -> Json:
    inner = known.whole("expert_feed_forward_length", config["intermediate_size"])
    if (shared := _count(known, _SHARED_WIDTH)) not in (0, inner):
        raise known.header.error(f"{_SHARED_WIDTH} {shared:,} beside {inner:,} is not supported")
    return no_window(known, config) | {
        "intermediate_size": inner,
        "num_experts": known.whole("expert_count"),
        "moe_topk": known.whole("expert_used_count"),
        "shared_intermediate_size": inner,
    }


def _qwen35_moe(known: Metadata, config: Json) -> Json:
    return (
        qwen35(known, config)
        | _experts(known, "num_experts")
        | {
            "moe_intermediate_size": known.whole("expert_feed_forward_length"),
            "shared_expert_intermediate_size": known.whole(_SHARED_WIDTH),
        }
    )


def _qwen3_moe(known: Metadata, config: Json) -> Json:
    return (
        no_window(known, config)
        | _experts(known, "num_experts")
        | {
            "moe_intermediate_size": known.whole("expert_feed_forward_length"),
            "norm_topk_prob": known.flag("expert_weights_norm", True),
        }
    )


def _olmoe(known: Metadata, config: Json) -> Json:
    if known.find("attention.clamp_kqv"):
        raise known.header.error("attention.clamp_kqv is not supported")
    normalized = {"norm_topk_prob": known.flag("expert_weights_norm", False)}
    return no_window(known, config) | _experts(known, "num_experts") | normalized


def _lfm2_moe(known: Metadata, config: Json) -> Json:
    _check_sigmoids(known)
    has_bias = any(name.endswith("exp_probs_b.bias") for name in known.header.tensors)
    return (
        lfm2(known, config)
        | _experts(known, "num_experts")
        | {
            "moe_intermediate_size": known.whole("expert_feed_forward_length"),
            "num_dense_layers": _num_dense(known),
            "use_expert_bias": has_bias,
            "routed_scaling_factor": scale(known, "expert_weights_scale", 1.0),
        }
    )


def _gpt_oss(known: Metadata, config: Json) -> Json:
    check_one_base(known)
    fields = _experts(known, "num_local_experts") | {
        "intermediate_size": known.whole("expert_feed_forward_length"),
        "sliding_window": known.whole(WINDOW),
        "layer_types": layer_types(known, config, period=2),
    }
    # Without the field config.json means yarn; a file without the key means none.
    scaling = config.get("rope_scaling", {"rope_type": "default"})
    if scaling["rope_type"] == "yarn":
        # These models do not round the range of yarn, which files have no key for.
        scaling |= {"truncate": False}
    return fields | {"rope_scaling": scaling}


def _granite_moe(known: Metadata, config: Json) -> Json:
    """With an MLP that all tokens go to, transformers has another class."""
    fields = granite(known, config) | _experts(known, "num_local_experts")
    shared = _count(known, _SHARED_WIDTH)
    if not shared:
        return fields
    return fields | {
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "model_type": "granitemoeshared",
        "shared_intermediate_size": shared,
    }


def _granite_hybrid(known: Metadata, config: Json) -> Json:
    inner, heads = known.whole("ssm.inner_size"), known.whole("ssm.time_step_rank")
    kv_heads, tensors = known.find("attention.head_count_kv"), known.header.tensors
    has_experts = bool(known.find("expert_count"))
    if not isinstance(kv_heads, list) or inner % heads or inner % config["hidden_size"]:
        raise known.header.error("the sizes of Granite's layers are not known")
    fields = no_window(known, config) | granite_factors(known, config)
    experts = _experts(known, "num_local_experts") if has_experts else {"num_local_experts": 0}
    shared = known.whole(_SHARED_WIDTH) if has_experts else config["intermediate_size"]
    return (
        fields
        | experts
        | {
            "position_embedding_type": "rope"
            if known.flag("rope.scaling.finetuned", True)
            else None,
            "layer_types": ["full_attention" if each else "linear_attention" for each in kv_heads],
            "intermediate_size": known.whole(
                "expert_feed_forward_length", config["intermediate_size"]
            ),
            "shared_intermediate_size": shared,
            "mamba_n_heads": heads,
            "mamba_d_head": inner // heads,
            "mamba_expand": inner // config["hidden_size"],
            "mamba_n_groups": known.whole("ssm.group_count"),
            "mamba_d_state": known.whole("ssm.state_size"),
            "mamba_d_conv": known.whole("ssm.conv_kernel"),
            "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in tensors),
            "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in tensors),
            "attention_bias": any(name.endswith("attn_q.bias") for name in tensors),
        }
    )


def _nemotron_h(known: Metadata, config: Json) -> Json:
    inner, heads = known.whole("ssm.inner_size"), known.whole("ssm.time_step_rank")
    lists = known.find("attention.head_count_kv"), known.find("feed_forward_length")
    if not all(isinstance(each, list) for each in lists) or inner % heads:
        raise known.header.error("the sizes of Nemotron-H's layers are not known")
    if known.find("moe_latent_size"):
        raise known.header.error("moe_latent_size is not supported")
    has_experts, names = bool(known.find("expert_count")), known.header.tensors
    fields = no_window(known, config) | {
        "layers_block_type": _types_of_nemotron(*lists, "moe" if has_experts else "mlp"),
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "n_groups": known.whole("ssm.group_count"),
        "ssm_state_size": known.whole("ssm.state_size"),
        "conv_kernel": known.whole("ssm.conv_kernel"),
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in names),
        "use_bias": any(name.endswith("ssm_in.bias") for name in names),
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in names),
    }
    if not has_experts:
        return fields
    return fields | {
        "n_routed_experts": known.whole("expert_count"),
        "num_experts_per_tok": known.whole("expert_used_count"),
        "moe_intermediate_size": known.whole("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": known.whole(_SHARED_WIDTH),
        "norm_topk_prob": known.flag("expert_weights_norm", False),
        "routed_scaling_factor": scale(known, "expert_weights_scale", 1.0),
        "n_group": known.whole("expert_group_count", 1),
        "topk_group": known.whole("expert_group_used_count", 1),
    }


def _types_of_nemotron(kv_heads: list[int], widths: list[int], feed_forward: str) -> list[str]:
    """The type of each layer, which is one of three things."""
    types = {(True, False): "full_attention", (False, False): "linear_attention"}
    kinds = zip(map(bool, kv_heads), map(bool, widths), strict=False)
    return [types.get(each, feed_forward) for each in kinds]


def _ernie_moe(known: Metadata, config: Json) -> Json:
    inner = known.whole("expert_feed_forward_length")
    return ernie(known, config) | {
        "moe_num_experts": known.whole("expert_count"),
        "moe_k": known.whole("expert_used_count"),
        "moe_intermediate_size": inner,
        "moe_num_shared_experts": _num_shared(known, inner, 0),
        "moe_layer_start_index": _num_dense(known),
        "moe_layer_interval": known.whole("interleave_moe_layer_step"),
    }


def _deepseek2(known: Metadata, config: Json) -> Json:
    if not any(name.endswith("attn_k_b.weight") for name in known.header.tensors):
        raise known.header.error("a file from before llama.cpp kept latents is not supported")
    rope_dim, scaling = config["head_dim"], config.get("rope_scaling", {})
    if (weight := scale(known, "rope.scaling.yarn_log_multiplier", 0.0)) > 0:
        weight /= 0.1  # which the files of this architecture alone have as a factor
        scaling |= {"mscale": weight, "mscale_all_dim": weight}
    fields = _experts_of_deepseek(known, config) | {
        "num_key_value_heads": config["num_attention_heads"],
        "kv_lora_rank": known.whole("attention.kv_lora_rank"),
        "q_lora_rank": known.find("attention.q_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": known.whole("attention.key_length_mla") - rope_dim,
        "v_head_dim": known.whole("attention.value_length_mla"),
        "kv_projections_apart": True,
        "n_group": known.whole("expert_group_count", 1),
        "topk_group": known.whole("expert_group_used_count", 1),
    }
    if known.find("expert_gating_func") != SIGMOIDS:
        fields |= {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
        if fields["n_group"] > 1:
            raise known.header.error("groups of experts with a softmax are not supported")
    return fields | ({"rope_scaling": scaling} if scaling else {})


def _glm4_moe(known: Metadata, config: Json) -> Json:
    _check_sigmoids(known, SIGMOIDS)
    return _experts_of_deepseek(known, config) | {
        "use_qk_norm": "blk.0.attn_q_norm.weight" in known.header.tensors,
    }


def _experts_of_deepseek(known: Metadata, config: Json) -> Json:
    return no_window(known, config) | {
        "n_routed_experts": known.whole("expert_count"),
        "num_experts_per_tok": known.whole("expert_used_count"),
        "moe_intermediate_size": known.whole("expert_feed_forward_length"),
        "n_shared_experts": _count(known, "expert_shared_count"),
        "first_k_dense_replace": _num_dense(known),
        "routed_scaling_factor": scale(known, "expert_weights_scale", 1.0),
        "norm_topk_prob": known.flag("expert_weights_norm", False),
        "num_nextn_predict_layers": 0,
    }


def _exaone_moe(known: Metadata, config: Json) -> Json:
    """A window that no text reaches still says which layers rotate."""
    _check_sigmoids(known)
    inner = known.whole("expert_feed_forward_length")
    return _experts(known, "num_experts") | {
        "sliding_window": known.whole(WINDOW),
        "layer_types": layer_types(known, config, period=4),
        "moe_intermediate_size": inner,
        "num_shared_experts": _num_shared(known, inner, 1),
        "first_k_dense_replace": _num_dense(known),
        "n_group": known.whole("expert_group_count", 1),
        "topk_group": known.whole("expert_group_used_count", 1),
        "norm_topk_prob": known.flag("expert_weights_norm", False),
        "routed_scaling_factor": scale(known, "expert_weights_scale", 1.0),
    }


def _minimax_m2(known: Metadata, config: Json) -> Json:
    _check_sigmoids(known)
    return (
        no_window(known, config)
        | _experts(known, "num_local_experts")
        | {"rotary_dim": known.whole("rope.dimension_count", config["head_dim"])}
    )


def _afmoe(known: Metadata, config: Json) -> Json:
    """A window that no text reaches still says which layers rotate. All models divide the weights
    of experts by their sum; llama.cpp does so only if the file says it."""
    check_one_base(known)
    _check_sigmoids(known, default=SIGMOIDS)
    if not known.flag("expert_weights_norm", True):
        raise known.header.error("AFMoE without expert_weights_norm is not supported")
    if known.whole("expert_group_count", 1) > 1:
        raise known.header.error("AFMoE with groups of experts is not supported")
    return _experts(known, "num_experts") | {
        "sliding_window": known.whole(WINDOW),
        "layer_types": layer_types(known, config, period=4),
        "moe_intermediate_size": known.whole("expert_feed_forward_length"),
        "num_shared_experts": _count(known, "expert_shared_count"),
        "num_dense_layers": _num_dense(known),
        "route_scale": scale(known, "expert_weights_scale", 1.0),
        "mup_enabled": True,
    }


OF_MIXTURE: dict[str, Callable[[Metadata, Json], Json]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "qwen3_5_moe_text": _qwen35_moe,
    "olmoe": _olmoe,
    "lfm2_moe": _lfm2_moe,
    "gpt_oss": _gpt_oss,
    "granitemoe": _granite_moe,
    "granitemoehybrid": _granite_hybrid,
    "nemotron_h": _nemotron_h,
    "hunyuan_v1_moe": _hunyuan_moe,
    "ernie4_5_moe": _ernie_moe,
    "exaone_moe": _exaone_moe,
    "glm4_moe": _glm4_moe,
    "deepseek_v3": _deepseek2,
    "minimax_m2": _minimax_m2,
    "afmoe": _afmoe,
}
"""By the model's type."""
