"""The fields of config.json that only types of models with latent attention have: more of
`family_fields`.

A type is a function and a line in OF_LATENTS, as there.
"""

from __future__ import annotations

from collections.abc import Callable

from shmllm.frontend.gguf.expert_fields import SIGMOIDS, experts_of_deepseek
from shmllm.frontend.gguf.family_fields import Json, no_window, scale
from shmllm.frontend.gguf.metadata import Metadata

_SIGMOIDS_UNSAID = ((47, 154_880), (48, 154_880))
"""The numbers of layers and tokens of GLM-4.7-Flash, whose first files do not say how experts are
chosen."""


def _latents(known: Metadata, config: Json) -> Json:
    """Files from before llama.cpp kept latents have the widths of keys and values as its other
    files have them, and the projections to both in one tensor."""
    rope_dim, scaling = config["head_dim"], config.get("rope_scaling", {})
    if (weight := scale(known, "rope.scaling.yarn_log_multiplier", 0.0)) > 0:
        weight /= 0.1  # which the files of this architecture alone have as a factor
        scaling |= {"mscale": weight, "mscale_all_dim": weight}
    fields = {
        "num_key_value_heads": config["num_attention_heads"],
        "kv_lora_rank": known.whole("attention.kv_lora_rank"),
        "q_lora_rank": known.find("attention.q_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": _head_width(known, "key") - rope_dim,
        "v_head_dim": _head_width(known, "value"),
        "kv_projections_apart": not known.has_tensors("attn_kv_b.weight"),
    }
    return fields | ({"rope_scaling": scaling} if scaling else {})


def _head_width(known: Metadata, kind: str) -> int:
    """The width of a head's keys or values, which are a projection of a latent."""
    name = f"attention.{kind}_length"
    return known.whole(f"{name}_mla", known.find(name))


def _deepseek2(known: Metadata, config: Json) -> Json:
    fields = (
        experts_of_deepseek(known, config)
        | _latents(known, config)
        | {
            "n_group": known.whole("expert_group_count", 1),
            "topk_group": known.whole("expert_group_used_count", 1),
        }
    )
    chosen_by = known.find("expert_gating_func")
    if not chosen_by and (config["num_hidden_layers"], config["vocab_size"]) in _SIGMOIDS_UNSAID:
        chosen_by = SIGMOIDS
    if chosen_by != SIGMOIDS:
        fields |= {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
        if fields["n_group"] > 1:
            raise known.header.error("groups of experts with a softmax are not supported")
    return fields


def _youtu(known: Metadata, config: Json) -> Json:
    return no_window(known, config) | _latents(known, config)


def _minicpm3(known: Metadata, config: Json) -> Json:
    """The factors are those of all models, which files do not say."""
    rope_dim, heads = config["head_dim"], config["num_attention_heads"]
    value_dim = known.whole("attention.value_length", config["hidden_size"] // heads)
    return no_window(known, config) | {
        "num_key_value_heads": heads,
        "kv_lora_rank": known.whole("attention.kv_lora_rank"),
        "q_lora_rank": known.whole("attention.q_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": _head_width(known, "key") - rope_dim,
        "v_head_dim": value_dim,
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }


OF_LATENTS: dict[str, Callable[[Metadata, Json], Json]] = {
    "deepseek_v3": _deepseek2,
    "youtu": _youtu,
    "minicpm3": _minicpm3,
}
"""By the model's type."""
