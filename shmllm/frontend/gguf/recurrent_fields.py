"""The fields of config.json that only types of models with recurrent states have: more of
`family_fields`.

A type is a function and a line in OF_RECURRENT, as there.
"""

from __future__ import annotations

from collections.abc import Callable

from shmllm.formats.gguf_model import is_tiled
from shmllm.frontend.gguf.expert_fields import (
    SHARED_WIDTH,
    check_sigmoids,
    experts,
    num_dense,
)
from shmllm.frontend.gguf.family_fields import Json, granite_factors, no_window, scale
from shmllm.frontend.gguf.metadata import Metadata


def _lfm2(known: Metadata, config: Json) -> Json:
    is_causal = config.get("is_causal", True)
    architecture = {} if is_causal else {"architectures": ["Lfm2BidirectionalModel"]}
    return _lfm2_layers(known, config) | architecture


def _lfm2_layers(known: Metadata, config: Json) -> Json:
    heads = known.find("attention.head_count_kv")
    every = heads if isinstance(heads, list) else [heads] * config["num_hidden_layers"]
    return no_window(known, config) | {
        "norm_eps": config["rms_norm_eps"],
        "layer_types": ["conv" if each == 0 else "full_attention" for each in every],
        "conv_L_cache": known.whole("shortconv.l_cache"),
        "conv_bias": known.has_tensors("shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_moe(known: Metadata, config: Json) -> Json:
    check_sigmoids(known)
    has_bias = known.has_tensors("exp_probs_b.bias")
    return (
        _lfm2_layers(known, config)
        | experts(known, "num_experts")
        | {
            "moe_intermediate_size": known.whole("expert_feed_forward_length"),
            "num_dense_layers": num_dense(known),
            "use_expert_bias": has_bias,
            "routed_scaling_factor": scale(known, "expert_weights_scale", 1.0),
        }
    )


def _qwen35(known: Metadata, config: Json) -> Json:
    value_heads, key_heads = known.whole("ssm.time_step_rank"), known.whole("ssm.group_count")
    width = known.whole("ssm.inner_size")
    if width % value_heads:
        raise known.header.error(f"ssm.inner_size {width:,} is no multiple of {value_heads} heads")
    return no_window(known, config) | {
        "layer_types": _types_of_recurrent(known, config["num_hidden_layers"]),
        "linear_conv_kernel_dim": known.whole("ssm.conv_kernel"),
        "linear_num_key_heads": key_heads,
        "linear_key_head_dim": known.whole("ssm.state_size"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": width // value_heads,
        "linear_value_heads_tiled": is_tiled(known.header),
    }


def _qwen35_moe(known: Metadata, config: Json) -> Json:
    return (
        _qwen35(known, config)
        | experts(known, "num_experts")
        | {
            "moe_intermediate_size": known.whole("expert_feed_forward_length"),
            "shared_expert_intermediate_size": known.whole(SHARED_WIDTH),
        }
    )


def _qwen3_next(known: Metadata, config: Json) -> Json:
    return _qwen35_moe(known, config) | {
        "linear_projections_apart": not known.has_tensors("ssm_in.weight"),
        "norm_topk_prob": True,
    }


def _types_of_recurrent(known: Metadata, count: int) -> list[str]:
    """The types of layers with delta nets: all but the last one of each period, unless the file has
    a list."""
    own = known.find("attention.recurrent_layers")
    if isinstance(own, list):
        are_recurrent = [bool(each) for each in own[:count]]
    else:
        period = known.whole("full_attention_interval", 4)
        are_recurrent = [(layer + 1) % period > 0 for layer in range(count)]
    return ["linear_attention" if each else "full_attention" for each in are_recurrent]


def _granite_hybrid(known: Metadata, config: Json) -> Json:
    inner, heads = known.whole("ssm.inner_size"), known.whole("ssm.time_step_rank")
    kv_heads = known.find("attention.head_count_kv")
    has_experts = bool(known.find("expert_count"))
    if not isinstance(kv_heads, list) or inner % heads or inner % config["hidden_size"]:
        raise known.header.error("the sizes of Granite's layers are not known")
    fields = no_window(known, config) | granite_factors(known, config)
    counts = experts(known, "num_local_experts") if has_experts else {"num_local_experts": 0}
    shared = known.whole(SHARED_WIDTH) if has_experts else config["intermediate_size"]
    rotates = known.flag("rope.scaling.finetuned", True)
    return (
        fields
        | counts
        | {
            "position_embedding_type": "rope" if rotates else None,
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
            "mamba_conv_bias": known.has_tensors("ssm_conv1d.bias"),
            "mamba_proj_bias": known.has_tensors("ssm_in.bias"),
        }
    )


def _falcon_h1(known: Metadata, config: Json) -> Json:
    """The converter has multiplied the matrices by all factors."""
    inner, heads = known.whole("ssm.inner_size"), known.whole("ssm.time_step_rank")
    if inner % heads:
        raise known.header.error(f"ssm.inner_size {inner:,} is no multiple of {heads} heads")
    return no_window(known, config) | {
        "attention_bias": known.has_tensors("attn_q.bias"),
        "mlp_bias": known.has_tensors("ffn_up.bias"),
        "projectors_bias": known.has_tensors("ssm_out.bias"),
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": known.whole("ssm.group_count"),
        "mamba_d_state": known.whole("ssm.state_size"),
        "mamba_d_conv": known.whole("ssm.conv_kernel"),
        "mamba_conv_bias": known.has_tensors("ssm_conv1d.bias"),
        "mamba_proj_bias": known.has_tensors("ssm_in.bias"),
        "mamba_rms_norm": known.has_tensors("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def _nemotron_h(known: Metadata, config: Json) -> Json:
    inner, heads = known.whole("ssm.inner_size"), known.whole("ssm.time_step_rank")
    lists = known.find("attention.head_count_kv"), known.find("feed_forward_length")
    if not all(isinstance(each, list) for each in lists) or inner % heads:
        raise known.header.error("the sizes of Nemotron-H's layers are not known")
    has_experts = bool(known.find("expert_count"))
    fields = no_window(known, config) | {
        "layers_block_type": _types_of_nemotron(*lists, "moe" if has_experts else "mlp"),
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "n_groups": known.whole("ssm.group_count"),
        "ssm_state_size": known.whole("ssm.state_size"),
        "conv_kernel": known.whole("ssm.conv_kernel"),
        "use_conv_bias": known.has_tensors("ssm_conv1d.bias"),
        "use_bias": known.has_tensors("ssm_in.bias"),
        "mlp_bias": known.has_tensors("ffn_up.bias"),
    }
    if not has_experts:
        return fields
    return fields | {
        "n_routed_experts": known.whole("expert_count"),
        "num_experts_per_tok": known.whole("expert_used_count"),
        "moe_intermediate_size": known.whole("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": known.whole(SHARED_WIDTH),
        "moe_latent_size": known.find("moe_latent_size") or None,
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


def _mamba(known: Metadata, config: Json) -> Json:
    """Falcon Mamba's norms have the model's epsilon, as in llama.cpp; files do not say theirs."""
    fields = _of_mixers(known, config) | {
        "intermediate_size": known.whole("ssm.inner_size"),
        "time_step_rank": known.whole("ssm.time_step_rank"),
    }
    if not known.flag("ssm.dt_b_c_rms", False):
        return fields
    return fields | {
        "architectures": ["FalconMambaForCausalLM"],
        "model_type": "falcon_mamba",
        "mixer_rms_eps": config["rms_norm_eps"],
    }


def _mamba2(known: Metadata, config: Json) -> Json:
    inner, heads = known.whole("ssm.inner_size"), known.whole("ssm.time_step_rank")
    if inner % heads or inner % config["hidden_size"]:
        raise known.header.error(
            f"ssm.inner_size {inner:,} is no multiple of {heads} heads and of "
            f"{config['hidden_size']:,} columns"
        )
    return _of_mixers(known, config) | {
        "num_heads": heads,
        "head_dim": inner // heads,
        "n_groups": known.whole("ssm.group_count"),
        "expand": inner // config["hidden_size"],
    }


def _of_mixers(known: Metadata, config: Json) -> Json:
    """What models of mixers alone have in common."""
    return {
        "state_size": known.whole("ssm.state_size"),
        "conv_kernel": known.whole("ssm.conv_kernel"),
        "use_bias": known.has_tensors("ssm_in.bias"),
        "use_conv_bias": known.has_tensors("ssm_conv1d.bias"),
        "layer_norm_epsilon": config["rms_norm_eps"],
    }


def _jamba(known: Metadata, config: Json) -> Json:
    inner, hidden = known.whole("ssm.inner_size"), config["hidden_size"]
    count = config["num_hidden_layers"]
    kv_heads, tensors = known.find("attention.head_count_kv"), known.header.tensors
    if not isinstance(kv_heads, list) or len(kv_heads) < count or inner % hidden:
        raise known.header.error("the sizes of Jamba's layers are not known")
    attends = [bool(each) for each in kv_heads[:count]]
    chosen = [f"blk.{layer}.ffn_gate_inp.weight" in tensors for layer in range(count)]
    return (
        no_window(known, config)
        | experts(known, "num_experts")
        | _period(known, attends, "attn_layer")
        | _period(known, chosen, "expert_layer")
        | {
            "mamba_d_state": known.whole("ssm.state_size"),
            "mamba_d_conv": known.whole("ssm.conv_kernel"),
            "mamba_expand": inner // hidden,
            "mamba_dt_rank": known.whole("ssm.time_step_rank"),
            "mamba_conv_bias": known.has_tensors("ssm_conv1d.bias"),
            "mamba_proj_bias": known.has_tensors("ssm_in.bias"),
        }
    )


def _period(known: Metadata, are_such: list[bool], name: str) -> Json:
    """The fields by which every so many layers are such ones, from a certain one on."""
    count = len(are_such)
    found = [layer for layer, is_such in enumerate(are_such) if is_such] + [count, count]
    offset, period = found[0], max(found[1] - found[0], found[0] + 1)
    if are_such != [layer % period == offset for layer in range(count)]:
        raise known.header.error(f"there is no {name}_period by which layers of Jamba differ")
    return {f"{name}_period": period, f"{name}_offset": offset}


OF_RECURRENT: dict[str, Callable[[Metadata, Json], Json]] = {
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "qwen3_5_text": _qwen35,
    "qwen3_5_moe_text": _qwen35_moe,
    "qwen3_next": _qwen3_next,
    "granitemoehybrid": _granite_hybrid,
    "falcon_h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "jamba": _jamba,
}
"""By the model's type."""
