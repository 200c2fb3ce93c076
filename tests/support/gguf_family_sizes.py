"""What llama.cpp's conversion writes of sizes and constants that only models of one family have."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import gguf

LATENTS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu")
"""The model types whose attention is that to latents."""


def heads_of_layers(config: Any) -> list[tuple[int, int]]:
    """The width of heads and the number of key heads of each layer of Gemma 4."""
    own = config.to_dict()["per_layer_config"]
    plain = {"head_dim": config.head_dim, "num_key_value_heads": config.num_key_value_heads}
    every = [plain | own.get(str(layer), {}) for layer in range(config.num_hidden_layers)]
    return [(each["head_dim"], each["num_key_value_heads"]) for each in every]


def _add_gemma4(writer: gguf.GGUFWriter, config: Any) -> None:
    heads, kinds = heads_of_layers(config), config.layer_types
    width = heads[kinds.index("full_attention")][0]
    shared, inner = config.num_kv_shared_layers, config.intermediate_size
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    writer.add_rope_dimension_count(width)
    writer.add_rope_dimension_count_swa(config.head_dim)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if len({number for _, number in heads}) > 1:
        writer.add_head_count_kv([number for _, number in heads])
    if config.use_double_wide_mlp:
        first = config.num_hidden_layers - shared
        writer.add_feed_forward_length([inner] * first + [2 * inner] * shared)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _add_gemma3n(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    cut = NormalDist().inv_cdf
    scales = [cut(each) if each else -math.inf for each in config.activation_sparsity_pattern]
    writer.add_activation_sparsity_scale(scales)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_falcon_h1(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)


def _add_llama4(writer: gguf.GGUFWriter, config: Any) -> None:
    _add_experts(writer, config)
    writer.add_feed_forward_length(config.intermediate_size_mlp)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)


def has_experts(config: Any) -> bool:
    return bool(config.num_local_experts)


def _add_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    inner = getattr(config, "moe_intermediate_size", None)
    if inner or config.model_type == "gpt_oss":
        writer.add_expert_feed_forward_length(inner or config.intermediate_size)
    if hasattr(config, "sections"):
        writer.add_rope_dimension_sections(config.sections)
        writer.add_num_deepstack_layers(3)
    if config.model_type == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.model_type == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)


def _add_sigmoids(writer: gguf.GGUFWriter, config: Any) -> None:
    _add_experts(writer, config)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_minimax(writer: gguf.GGUFWriter, config: Any) -> None:
    _add_sigmoids(writer, config)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_rope_dimension_count(config.rotary_dim)


def _add_hunyuan_moe(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.moe_topk)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.intermediate_size)
    writer.add_expert_shared_count(1)


def _add_qwen35(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    recurrent = [each == "linear_attention" for each in config.layer_types]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    share = config.rope_parameters["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(config.head_dim * share))
    writer.add_rope_dimension_sections([11, 11, 10, 0])


def _add_qwen35_moe(writer: gguf.GGUFWriter, config: Any) -> None:
    _add_qwen35(writer, config)
    _add_experts(writer, config)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _add_mistral3(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_log_mul(rope.get("mscale_all_dim", 0.0))
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _add_granite_moe(writer: gguf.GGUFWriter, config: Any) -> None:
    _add_granite(writer, config)
    _add_experts(writer, config)
    if config.model_type == "granitemoeshared":
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


def _add_nemotron_h(writer: gguf.GGUFWriter, config: Any) -> None:
    kinds, heads = config.layers_block_type, config.num_key_value_heads
    width, feed_forward = config.intermediate_size, "mlp"
    if "moe" in kinds:
        width, feed_forward = config.moe_intermediate_size, "moe"
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(width)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(1)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        if config.moe_latent_size is not None:
            writer.add_moe_latent_size(config.moe_latent_size)
    writer.add_feed_forward_length([width if each == feed_forward else 0 for each in kinds])
    writer.add_head_count_kv([heads if each == "full_attention" else 0 for each in kinds])
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)


def _add_granite_hybrid(writer: gguf.GGUFWriter, config: Any) -> None:
    _add_granite(writer, config)
    if has_experts(config):
        _add_experts(writer, config)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    _add_falcon_h1(writer, config)
    heads = config.num_key_value_heads
    kinds = config.layer_types
    writer.add_head_count_kv([heads if each == "full_attention" else 0 for each in kinds])
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")


def _add_ernie_moe(writer: gguf.GGUFWriter, config: Any) -> None:
    """The converter takes the width of the shared experts for that of an MLP over the key heads,
    which it is in the published models."""
    writer.add_expert_count(config.moe_num_experts)
    writer.add_expert_used_count(config.moe_k)
    writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    writer.add_leading_dense_block_count(config.moe_layer_start_index)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.moe_num_shared_experts)
    if config.moe_num_shared_experts:
        shared = config.moe_num_shared_experts * config.moe_intermediate_size
        writer.add_expert_shared_feed_forward_length(shared)


def _add_exaone_moe(writer: gguf.GGUFWriter, config: Any) -> None:
    _add_sigmoids(writer, config)
    _add_olmo3(writer, config)
    inner, num_shared = config.moe_intermediate_size, config.num_shared_experts
    writer.add_expert_shared_count(num_shared)
    writer.add_expert_shared_feed_forward_length(inner * num_shared)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    writer.add_leading_dense_block_count(config.mlp_layer_types.count("dense"))
    writer.add_nextn_predict_layers(0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _add_deepseek2(writer: gguf.GGUFWriter, config: Any) -> None:
    rank, rope_dim, rope = config.kv_lora_rank, config.qk_rope_head_dim, config.rope_parameters
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rope_dim)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + rope_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(rope_dim)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if config.model_type == "youtu":
        writer.add_leading_dense_block_count(config.num_hidden_layers)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_shared_count(0)
        return
    _add_experts_of_deepseek(writer, config)
    if config.model_type != "deepseek_v2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def _add_glm4_moe(writer: gguf.GGUFWriter, config: Any) -> None:
    _add_partial(writer, config)
    _add_experts_of_deepseek(writer, config)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_experts_of_deepseek(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    num_dense = getattr(config, "first_k_dense_replace", None)
    if num_dense is None:
        num_dense = config.mlp_layer_types.count("dense")
    writer.add_leading_dense_block_count(num_dense)
    writer.add_expert_weights_scale(getattr(config, "routed_scaling_factor", 1.0))
    if config.norm_topk_prob:
        writer.add_expert_weights_norm(True)


def _add_dots1(writer: gguf.GGUFWriter, config: Any) -> None:
    _add_experts_of_deepseek(writer, config)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_bailing(writer: gguf.GGUFWriter, config: Any) -> None:
    _add_dots1(writer, config)
    _add_partial(writer, config)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)


def _add_mimo(writer: gguf.GGUFWriter, config: Any) -> None:
    are_sliding = [kind == "sliding_attention" for kind in config.layer_types]
    full, local = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    writer.add_head_count_kv([config.num_key_value_heads * (1 + each) for each in are_sliding])
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(are_sliding)
    writer.add_rope_dimension_count(int(config.head_dim * full["partial_rotary_factor"]))
    writer.add_rope_freq_base_swa(local["rope_theta"])
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.attention_value_scale is not None:  # `gguf` has no name for it yet
        writer.add_float32("mimo2.attention.value_scale", config.attention_value_scale)


def _add_minicpm3(writer: gguf.GGUFWriter, config: Any) -> None:
    """Without the width of values, which llama.cpp takes for that of the hidden size's heads."""
    writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)


def add_mixers(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.state_size)
    if config.model_type == "mamba2":
        writer.add_ssm_inner_size(config.num_heads * config.head_dim)
        writer.add_ssm_time_step_rank(config.num_heads)
        writer.add_ssm_group_count(config.n_groups)
        return
    writer.add_ssm_inner_size(config.intermediate_size)
    writer.add_ssm_time_step_rank(config.time_step_rank)
    writer.add_ssm_dt_b_c_rms(config.model_type == "falcon_mamba")


def _add_jamba(writer: gguf.GGUFWriter, config: Any) -> None:
    _add_experts(writer, config)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
    writer.add_ssm_time_step_rank(config.mamba_dt_rank)
    period, offset = config.attn_layer_period, config.attn_layer_offset
    heads = [
        config.num_key_value_heads if layer % period == offset else 0
        for layer in range(config.num_hidden_layers)
    ]
    writer.add_head_count_kv(heads)


def _add_afmoe(writer: gguf.GGUFWriter, config: Any) -> None:
    _add_sigmoids(writer, config)
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_shared_count(config.num_shared_experts)
    writer.add_leading_dense_block_count(config.num_dense_layers)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(config.route_scale)


def _add_lfm2_moe(writer: gguf.GGUFWriter, config: Any) -> None:
    _add_sigmoids(writer, config)
    writer.add_leading_dense_block_count(config.num_dense_layers)


def add_lfm2(writer: gguf.GGUFWriter, config: Any) -> None:
    inner = config.intermediate_size
    if getattr(config, "block_auto_adjust_ff_dim", False):
        multiple = config.block_multiple_of
        inner = int(config.block_ffn_dim_multiplier * int(2 * inner / 3))
        inner = multiple * ((inner + multiple - 1) // multiple)
    writer.add_feed_forward_length(inner)
    heads = config.num_key_value_heads
    writer.add_head_count_kv([0 if kind == "conv" else heads for kind in config.layer_types])
    writer.add_shortconv_l_cache(config.conv_L_cache)


def _add_gemma2(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_partial(writer: gguf.GGUFWriter, config: Any) -> None:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = config.rope_parameters.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(width * share))
    if config.model_type == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)
    if config.model_type == "gpt_neox":
        writer.add_parallel_residual(config.use_parallel_residual)


def _add_granite(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _add_olmo3(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def _add_bounds(writer: gguf.GGUFWriter, config: Any) -> None:
    if config.clip_qkv is not None:
        writer.add_clamp_kqv(config.clip_qkv)


def _add_exaone4(writer: gguf.GGUFWriter, config: Any) -> None:
    if config.sliding_window:
        _add_olmo3(writer, config)


def _add_cohere2(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_logit_scale(config.logit_scale)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


OF_FAMILY: dict[str, Callable[[gguf.GGUFWriter, Any], None]] = {
    "mixtral": _add_experts,
    "qwen2_moe": _add_experts,
    "qwen3_moe": _add_experts,
    "olmoe": _add_experts,
    "gpt_oss": _add_experts,
    "llama4_text": _add_llama4,
    "falcon_h1": _add_falcon_h1,
    "gemma3n_text": _add_gemma3n,
    "lfm2_moe": _add_lfm2_moe,
    "ministral3": _add_mistral3,
    "qwen3_5_text": _add_qwen35,
    "qwen3_5_moe_text": _add_qwen35_moe,
    "qwen3_next": _add_qwen35_moe,
    "hunyuan_v1_moe": _add_hunyuan_moe,
    "granitemoehybrid": _add_granite_hybrid,
    "nemotron_h": _add_nemotron_h,
    "granitemoe": _add_granite_moe,
    "granitemoeshared": _add_granite_moe,
    "ernie4_5_moe": _add_ernie_moe,
    "exaone_moe": _add_exaone_moe,
    "glm4_moe": _add_glm4_moe,
    "minimax_m2": _add_minimax,
    "afmoe": _add_afmoe,
    "dots1": _add_dots1,
    "bailing_moe": _add_experts_of_deepseek,
    "bailing_moe_v2": _add_bailing,
    "mimo_v2_flash": _add_mimo,
    "deepseek": _add_experts_of_deepseek,
    "jamba": _add_jamba,
    "minicpm3": _add_minicpm3,
    **dict.fromkeys(LATENTS, _add_deepseek2),
    "gemma2": _add_gemma2,
    "gemma4_text": _add_gemma4,
    "gemma3_text": lambda writer, config: writer.add_sliding_window(config.sliding_window),
    "olmo": _add_bounds,
    "phi3": _add_partial,
    "glm": _add_partial,
    "glm4": _add_partial,
    "granite": _add_granite,
    "olmo3": _add_olmo3,
    "cohere": lambda writer, config: writer.add_logit_scale(config.logit_scale),
    "cohere2": _add_cohere2,
    "exaone4": _add_exaone4,
    "gpt_neox": _add_partial,
    "nemotron": _add_partial,
    "phi": _add_partial,
    "stablelm": _add_partial,
    "starcoder2": lambda writer, config: writer.add_sliding_window(config.sliding_window or 0),
}
