"""Small random models of the families that transformers has and we do not implement ourselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from support.reference_models import EOS, ReferenceModel, draw_weights, make_prompts
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shmllm.models.architectures import ARCHITECTURES

VOCAB = 512
WINDOW = 16
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "lru_width"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "dff", "ffn_hidden_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "swa_head_dim", "swa_v_head_dim"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 512),
    **dict.fromkeys(("sliding_window", "attention_window_size"), WINDOW),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "zero_expert_num"), 1),
    "vocab_size": VOCAB,
    "expert_ffn_hidden_size": 32,
    "rotary_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
"""The fields that get other values than their defaults, where a configuration has them."""
LATENT = {"num_key_value_heads": 4}
OF_FAMILY: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), LATENT),
    **dict.fromkeys(("longcat_flash", "minicpm3", "sarvam_mla", "youtu"), LATENT),
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
}
"""What the configurations of some families have besides."""


def causal_families() -> Iterator[tuple[str, str]]:
    """Yields the type and the name of the class of each causal language model of transformers. The
    classes are not loaded: each has a module of its own."""
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in [names] if isinstance(names, str) else names:
            yield model_type, name


def other_families() -> list[str]:
    """Returns the types of those whose architecture we do not have."""
    return [kind for kind, name in causal_families() if name not in ARCHITECTURES]


def class_of(model_type: str) -> Any:
    """Returns the class of a family."""
    name = next(name for kind, name in causal_families() if kind == model_type)
    return getattr(transformers, name)


def tiny_config(model_type: str) -> Any:
    """Returns the configuration of a small model of a family."""
    config_class = class_of(model_type).config_class
    default = config_class()
    fields = _sizes_for(default)
    for name in config_class.sub_configs:
        nested = getattr(default, name, None)
        if isinstance(nested, transformers.PreTrainedConfig):
            fields[name] = type(nested)(**_sizes_for(nested))
    if getattr(default, "is_decoder", True) is False:
        fields["is_decoder"] = True
    return config_class(**fields | OF_FAMILY.get(model_type, {}))


def make_family(model_type: str, directory: Path) -> ReferenceModel:
    """Writes a small random float32 model into a directory, without a tokenizer."""
    torch.manual_seed(7)
    model = class_of(model_type)._from_config(tiny_config(model_type)).eval()
    draw_weights(model)
    model.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    prompts = make_prompts(VOCAB, longest=5 * WINDOW)[:16]
    return ReferenceModel(model, directory, prompts)


def _sizes_for(default: Any) -> dict[str, Any]:
    return {name: size for name, size in SIZES.items() if _has_number(default, name)}


def _has_number(default: Any, name: str) -> bool:
    try:
        found = getattr(default, name)
    except Exception:  # it differs by layer
        return False
    return not isinstance(found, list | tuple | dict)
