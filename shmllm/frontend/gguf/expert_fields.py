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
    layer_types,
    no_window,
    scale,
)
from shmllm.frontend.gguf.metadata import Metadata

SIGMOIDS = 2
"""The value of ``expert_gating_func`` for experts that are chosen by sigmoids."""
SHARED_WIDTH = "expert_shared_feed_forward_length"
_WITHOUT_NORMS = 128
"""The number of experts of the Llama 4 that has no norms of queries and keys (Maverick)."""


def experts(known: Metadata, count: str) -> Json:
    return {
        count: known.whole("expert_count"),
        "num_experts_per_tok": known.whole("expert_used_count"),
    }


def _count(known: Metadata, name: str) -> int:
    """A whole number; 0 if the file does not say it."""
    return 0 if known.find(name) in (None, 0) else known.whole(name)


def num_dense(known: Metadata) -> int:
    """How many of the first layers have an MLP in place of experts."""
    return _count(known, "leading_dense_block_count")


def _num_shared(known: Metadata, inner: int, default: int) -> int:
    """How many experts of this width make the MLP that all tokens go to."""
    width = _count(known, SHARED_WIDTH) or default * inner
    if width % inner:
        raise known.header.error(f"{SHARED_WIDTH} {width:,} is no multiple of {inner:,}")
    return width // inner


def check_sigmoids(known: Metadata, default: int = 0) -> None:
    """Refuses other experts; the default stands for a file that does not say it."""
    if (known.find("expert_gating_func") or default) != SIGMOIDS:
        raise known.header.error("experts that are not chosen by sigmoids are not supported")


def _mixtral(known: Metadata, config: Json) -> Json:
    return no_window(known, config) | experts(known, "num_local_experts")


def _qwen2_moe(known: Metadata, config: Json) -> Json:
    inner, fields = config["intermediate_size"], experts(known, "num_experts")
    smaller = max(inner // fields["num_experts_per_tok"], 1)
    return (
        no_window(known, config)
        | fields
        | {
            "moe_intermediate_size": known.whole("expert_feed_forward_length", smaller),
            "shared_expert_intermediate_size": known.whole(SHARED_WIDTH, inner),
            "norm_topk_prob": known.flag("expert_weights_norm", False),
            "qkv_bias": config["attention_bias"],
        }
    )


def _hunyuan_moe(known: Metadata, config: Json) -> Json:
    inner = known.whole("expert_feed_forward_length", config["intermediate_size"])
    if (shared := _count(known, SHARED_WIDTH)) not in (0, inner):
        raise known.header.error(f"{SHARED_WIDTH} {shared:,} beside {inner:,} is not supported")
    return no_window(known, config) | {
        "intermediate_size": inner,
        "num_experts": known.whole("expert_count"),
        "moe_topk": known.whole("expert_used_count"),
        "shared_intermediate_size": inner,
    }


def _qwen3_moe(known: Metadata, config: Json) -> Json:
    return (
        no_window(known, config)
        | experts(known, "num_experts")
        | {
            "moe_intermediate_size": known.whole("expert_feed_forward_length"),
            "norm_topk_prob": known.flag("expert_weights_norm", True),
        }
    )


def _olmoe(known: Metadata, config: Json) -> Json:
    if known.find("attention.clamp_kqv"):
        raise known.header.error("attention.clamp_kqv is not supported")
    normalized = {"norm_topk_prob": known.flag("expert_weights_norm", False)}
    return no_window(known, config) | experts(known, "num_experts") | normalized


def _gpt_oss(known: Metadata, config: Json) -> Json:
    check_one_base(known)
    fields = experts(known, "num_local_experts") | {
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


def _llama4(known: Metadata, config: Json) -> Json:
    """A file says neither how long chunks are, nor whether queries and keys have norms."""
    check_one_base(known)
    if known.find(WINDOW) == 0:
        raise known.header.error(f"Llama 4 without chunks ({WINDOW} 0) is not supported")
    kinds = {"sliding_attention": "chunked_attention"}
    inner = known.whole("expert_feed_forward_length")
    return experts(known, "num_local_experts") | {
        "intermediate_size": inner,
        "intermediate_size_mlp": config["intermediate_size"],
        "shared_intermediate_size": inner,
        "interleave_moe_layer_step": known.whole("interleave_moe_layer_step"),
        "layer_types": [kinds.get(each, each) for each in layer_types(known, config, period=4)],
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "use_qk_norm": known.whole("expert_count") != _WITHOUT_NORMS,
    }


def _granite_moe(known: Metadata, config: Json) -> Json:
    """With an MLP that all tokens go to, transformers has another class."""
    fields = granite(known, config) | experts(known, "num_local_experts")
    shared = _count(known, SHARED_WIDTH)
    if not shared:
        return fields
    return fields | {
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "model_type": "granitemoeshared",
        "shared_intermediate_size": shared,
    }


def _ernie_moe(known: Metadata, config: Json) -> Json:
    inner = known.whole("expert_feed_forward_length")
    return ernie(known, config) | {
        "moe_num_experts": known.whole("expert_count"),
        "moe_k": known.whole("expert_used_count"),
        "moe_intermediate_size": inner,
        "moe_num_shared_experts": _num_shared(known, inner, 0),
        "moe_layer_start_index": num_dense(known),
        "moe_layer_interval": known.whole("interleave_moe_layer_step"),
    }


def _glm4_moe(known: Metadata, config: Json) -> Json:
    check_sigmoids(known, SIGMOIDS)
    return experts_of_deepseek(known, config) | {
        "use_qk_norm": "blk.0.attn_q_norm.weight" in known.header.tensors,
    }


def _dots1(known: Metadata, config: Json) -> Json:
    check_sigmoids(known, SIGMOIDS)
    return experts_of_deepseek(known, config)


def _deepseek(known: Metadata, config: Json) -> Json:
    """llama.cpp divides no weights of experts by their sum, whatever a file says."""
    return experts_of_deepseek(known, config) | {"norm_topk_prob": False}


def _bailing_moe(known: Metadata, config: Json) -> Json:
    """Ling 1 is DeepSeek-MoE but for the weights of experts."""
    divides = known.flag("expert_weights_norm", False)
    return experts_of_deepseek(known, config) | {"norm_topk_prob": divides}


def _bailing_moe_v2(known: Metadata, config: Json) -> Json:
    check_sigmoids(known)
    if not known.flag("expert_weights_norm", False):
        raise known.header.error("Ling 2.0 without expert_weights_norm is not supported")
    fields = experts_of_deepseek(known, config)
    return fields | {
        "num_experts": fields["n_routed_experts"],
        "num_shared_experts": fields["n_shared_experts"],
        "n_group": known.whole("expert_group_count", 1),
        "topk_group": known.whole("expert_group_used_count", 1),
        "use_qkv_bias": config["attention_bias"],
    }


def experts_of_deepseek(known: Metadata, config: Json) -> Json:
    """The fields of experts, and no window."""
    return no_window(known, config) | routed_experts(known)


def routed_experts(known: Metadata) -> Json:
    """The fields of experts that DeepSeek's and other models have."""
    return {
        "n_routed_experts": known.whole("expert_count"),
        "num_experts_per_tok": known.whole("expert_used_count"),
        "moe_intermediate_size": known.whole("expert_feed_forward_length"),
        "n_shared_experts": _count(known, "expert_shared_count"),
        "first_k_dense_replace": num_dense(known),
        "routed_scaling_factor": scale(known, "expert_weights_scale", 1.0),
        "norm_topk_prob": known.flag("expert_weights_norm", False),
        "num_nextn_predict_layers": 0,
    }


def _exaone_moe(known: Metadata, config: Json) -> Json:
    """A window that no text reaches still says which layers rotate."""
    check_sigmoids(known)
    inner = known.whole("expert_feed_forward_length")
    return experts(known, "num_experts") | {
        "sliding_window": known.whole(WINDOW),
        "layer_types": layer_types(known, config, period=4),
        "moe_intermediate_size": inner,
        "num_shared_experts": _num_shared(known, inner, 1),
        "first_k_dense_replace": num_dense(known),
        "n_group": known.whole("expert_group_count", 1),
        "topk_group": known.whole("expert_group_used_count", 1),
        "norm_topk_prob": known.flag("expert_weights_norm", False),
        "routed_scaling_factor": scale(known, "expert_weights_scale", 1.0),
    }


def _minimax_m2(known: Metadata, config: Json) -> Json:
    check_sigmoids(known)
    return (
        no_window(known, config)
        | experts(known, "num_local_experts")
        | {"rotary_dim": known.whole("rope.dimension_count", config["head_dim"])}
    )


def _afmoe(known: Metadata, config: Json) -> Json:
    """A window that no text reaches still says which layers rotate. All models divide the weights
    of experts by their sum; llama.cpp does so only if the file says it."""
    check_one_base(known)
    check_sigmoids(known, default=SIGMOIDS)
    if not known.flag("expert_weights_norm", True):
        raise known.header.error("AFMoE without expert_weights_norm is not supported")
    if known.whole("expert_group_count", 1) > 1:
        raise known.header.error("AFMoE with groups of experts is not supported")
    return experts(known, "num_experts") | {
        "sliding_window": known.whole(WINDOW),
        "layer_types": layer_types(known, config, period=4),
        "moe_intermediate_size": known.whole("expert_feed_forward_length"),
        "num_shared_experts": _count(known, "expert_shared_count"),
        "num_dense_layers": num_dense(known),
        "route_scale": scale(known, "expert_weights_scale", 1.0),
        "mup_enabled": True,
    }


OF_MIXTURE: dict[str, Callable[[Metadata, Json], Json]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    "granitemoe": _granite_moe,
    "hunyuan_v1_moe": _hunyuan_moe,
    "ernie4_5_moe": _ernie_moe,
    "exaone_moe": _exaone_moe,
    "glm4_moe": _glm4_moe,
    "dots1": _dots1,
    "deepseek": _deepseek,
    "bailing_moe": _bailing_moe,
    "bailing_moe_v2": _bailing_moe_v2,
    "minimax_m2": _minimax_m2,
    "afmoe": _afmoe,
}
"""By the model's type."""
