"""The metadata of small GGUF files: what llama.cpp's conversion writes of a model's sizes."""

from __future__ import annotations

from typing import Any

import gguf
from support.gguf_family_sizes import LATENTS, OF_FAMILY, add_lfm2, add_mixers, has_experts


def num_kv_heads(config: Any) -> int:
    """The number of key heads of a model with queries, keys and values in one matrix."""
    if getattr(config, "new_decoder_architecture", False):
        return int(config.num_kv_heads)
    return 1 if getattr(config, "multi_query", False) else int(config.num_attention_heads)


def add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add the metadata that each model has, and those of its family."""
    family = config.model_type
    writer.add_block_count(config.num_hidden_layers)
    lengths = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    writer.add_context_length(next(filter(None, lengths), 2**11 if family == "bloom" else 2**20))
    writer.add_embedding_length(config.hidden_size)
    if family in ("mamba", "falcon_mamba", "mamba2"):
        add_mixers(writer, config)
        return
    writer.add_head_count(config.num_attention_heads)
    if family in _WITHOUT_FIELDS:
        _add_sizes_without_fields(writer, config)
        return
    _add_sizes_of_layers(writer, config)
    if family == "olmo":
        writer.add_layer_norm_eps(1e-5)
    elif family in _LAYER_NORM_EPS:
        writer.add_layer_norm_eps(getattr(config, _LAYER_NORM_EPS[family]))
    else:
        names = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")
        writer.add_layer_norm_rms_eps(next(filter(None, (getattr(config, n, 0) for n in names))))
    head_dim = getattr(config, "head_dim", None)
    if head_dim and family not in (*LATENTS, "minicpm3"):
        writer.add_key_length(head_dim)
        writer.add_value_length(getattr(config, "v_head_dim", head_dim))
    if family not in ("jamba", "nemotron_h"):  # which rotate nothing
        ropes = config.rope_parameters
        writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])
    own = OF_FAMILY.get(family)
    if own is not None:
        own(writer, config)


def _add_sizes_without_fields(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add the sizes of a model whose fields have other names."""
    inner = getattr(config, "ffn_hidden_size", None) or getattr(config, "n_inner", None)
    writer.add_feed_forward_length(inner or 4 * config.hidden_size)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    if config.model_type == "mpt":
        writer.add_max_alibi_bias(config.attn_config.alibi_bias_max)
        if config.attn_config.clip_qkv:
            writer.add_clamp_kqv(config.attn_config.clip_qkv)
    if config.model_type != "gpt2":
        writer.add_head_count_kv(num_kv_heads(config))


def _add_sizes_of_layers(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add the width of MLPs and the number of key heads, if all layers have the same."""
    family = config.model_type
    if family.startswith("lfm2"):
        add_lfm2(writer, config)
        return
    if family == "granitemoehybrid" and not has_experts(config):
        writer.add_feed_forward_length(config.shared_intermediate_size)
    elif family not in ("qwen3_5_moe_text", "nemotron_h"):
        writer.add_feed_forward_length(config.intermediate_size)
    if family not in ("gpt_neox", "granitemoehybrid", "jamba", "nemotron_h", "mimo_v2_flash"):
        writer.add_head_count_kv(1 if family in LATENTS else config.num_key_value_heads)


_WITHOUT_FIELDS = ("gpt2", "gpt_bigcode", "falcon", "bloom", "mpt")
"""Model types whose fields have other names, or which have none of most of them."""
_LAYER_NORM_EPS = {
    **dict.fromkeys(
        ("cohere", "cohere2", "gpt_neox", "phi", "stablelm", "jais2"), "layer_norm_eps"
    ),
    "nemotron": "norm_eps",
    "orion": "rms_norm_eps",
    "starcoder2": "norm_epsilon",
}
