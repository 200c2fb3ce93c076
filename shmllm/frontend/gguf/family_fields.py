"""The fields of config.json that only models of one type have, from the metadata of a GGUF file.

A type is a function and a line in OF_FAMILY, OF_MIXTURE of `expert_fields`, or OF_RECURRENT of
`recurrent_fields`. The function gets the metadata and the fields that all types have, and refuses
what no engine computes. It knows what llama.cpp knows and files do not say.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from shmllm.formats.gguf import shown
from shmllm.frontend.gguf.metadata import Metadata

Json = dict[str, Any]

WINDOW = "attention.sliding_window"


def _window(known: Metadata, config: Json) -> int | None:
    """The number of positions that attention sees; None: all."""
    if known.find(WINDOW) in (None, 0):
        return None
    window = known.whole(WINDOW)
    return window if window < config["max_position_embeddings"] else None


def no_window(known: Metadata, config: Json) -> Json:
    """No fields; a window is refused."""
    window = _window(known, config)
    if window is not None:
        raise known.header.error(
            f"a sliding window of {window:,} positions is not supported with this architecture"
        )
    return {}


def layer_types(known: Metadata, config: Json, period: int) -> list[str]:
    """Which layers have a window: all but the last one of each period, unless the file has a
    pattern."""
    own, count = known.find("attention.sliding_window_pattern"), config["num_hidden_layers"]
    if isinstance(own, list):
        types = [bool(is_sliding) for is_sliding in own[:count]]  # more layers may follow
        if len(types) < count:
            raise known.header.error(
                f"attention.sliding_window_pattern has {len(types)} layers of {count}"
            )
    else:
        period = known.whole("attention.sliding_window_pattern", period)
        types = [(layer + 1) % period > 0 for layer in range(count)]
    return ["sliding_attention" if each else "full_attention" for each in types]


def check_one_base(known: Metadata) -> None:
    """Refuses another rotation in layers with a window."""
    base, own = known.find("rope.freq_base"), known.find("rope.freq_base_swa")
    if own not in (None, base):
        raise known.header.error(
            f"rope.freq_base_swa {shown(own)} beside rope.freq_base {shown(base)} is not supported "
            "with this architecture"
        )


def scale(known: Metadata, name: str, default: float) -> float:
    """A factor; 0 stands for its default, as in llama.cpp."""
    return default if known.find(name) in (None, 0) else known.number(name)


def _llama(known: Metadata, config: Json) -> Json:
    """Mistral's models have the architecture llama, and may have a window."""
    window = _window(known, config)
    if window is None or config["attention_bias"] or config["mlp_bias"]:
        return no_window(known, config)
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": window,
    }


def _mistral3(known: Metadata, config: Json) -> Json:
    """The files do not say that the mscale of yarn is 1, nor that queries grow after each so many
    positions as the model first had."""
    fields, scaling = no_window(known, config), config.get("rope_scaling", {})
    if (weight := scale(known, "rope.scaling.yarn_log_multiplier", 0.0)) > 0:
        scaling |= {"mscale": 1.0, "mscale_all_dim": weight}
    if (rate := scale(known, "attention.temperature_scale", 0.0)) > 0:
        length = known.whole("rope.scaling.original_context_length")
        scaling |= {"llama_4_scaling_beta": rate, "original_max_position_embeddings": length}
    return fields | {"rope_scaling": {"rope_type": "default"} | scaling}


def _gemma1(known: Metadata, config: Json) -> Json:
    return no_window(known, config) | {"hidden_act": "gelu_pytorch_tanh"}


def _gemma2(known: Metadata, config: Json) -> Json:
    return _gemma(known, config, period=2, layers_of_27b=46) | {
        "attn_logit_softcapping": known.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": known.number("final_logit_softcapping", 30.0),
    }


def gemma3(known: Metadata, config: Json) -> Json:
    fields = _gemma(known, config, period=6, layers_of_27b=62)
    if known.find("final_logit_softcapping") is not None:
        fields["final_logit_softcapping"] = known.number("final_logit_softcapping")
    return fields | {"rope_local_base_freq": known.number("rope.freq_base_swa", 10000.0)}


def _gemma(known: Metadata, config: Json, *, period: int, layers_of_27b: int) -> Json:
    """What both have. Files do not say how scores are scaled, which differs for the models of 27 B
    parameters."""
    scale_of_27b = config["hidden_size"] // config["num_attention_heads"]
    is_27b = config["num_hidden_layers"] == layers_of_27b
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scale_of_27b if is_27b else config["head_dim"],
        "sliding_window": known.whole(WINDOW),
        "layer_types": layer_types(known, config, period),
    }


def _phi3(known: Metadata, config: Json) -> Json:
    return {"sliding_window": _window(known, config)}


def granite(known: Metadata, config: Json) -> Json:
    if not known.flag("rope.scaling.finetuned", True):
        raise known.header.error("Granite without rotary embedding is not supported")
    return no_window(known, config) | granite_factors(known, config)


def granite_factors(known: Metadata, config: Json) -> Json:
    return {
        "attention_multiplier": scale(known, "attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": scale(known, "embedding_scale", 1.0),
        "residual_multiplier": scale(known, "residual_scale", 1.0),
        "logits_scaling": known.number("logit_scale"),
    }


def _smollm3(known: Metadata, config: Json) -> Json:
    return no_window(known, config) | {"no_rope_layer_interval": 4}


def _olmo(known: Metadata, config: Json) -> Json:
    eps = config["layer_norm_eps"]  # transformers has no field of it
    if not math.isclose(eps, 1e-5, rel_tol=1e-5):
        raise known.header.error(f"attention.layer_norm_epsilon {eps:g} is not supported")
    clip = known.number("attention.clamp_kqv") if known.find("attention.clamp_kqv") else None
    return no_window(known, config) | {"clip_qkv": clip}


def _olmo2(known: Metadata, config: Json) -> Json:
    """OLMo 3's models have the architecture olmo2, and windows."""
    if known.find(WINDOW) in (None, 0):
        return {}
    check_one_base(known)
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": known.whole(WINDOW),
        "layer_types": layer_types(known, config, period=4),
    }


def _glm4(known: Metadata, config: Json) -> Json:
    for name in ("rope.dimension_sections", "nextn_predict_layers"):  # GLM-4V, GLM-OCR
        if known.find(name):
            raise known.header.error(f"a GLM-4 with {name} is not supported")
    return no_window(known, config)


def _cohere2(known: Metadata, config: Json) -> Json:
    return {
        "sliding_window": known.whole(WINDOW),  # also where it is longer than the context:
        "layer_types": layer_types(known, config, period=4),  # only these layers rotate
        "logit_scale": known.number("logit_scale"),
    }


def _has_qk_norms(known: Metadata) -> bool:
    return "blk.0.attn_q_norm.weight" in known.header.tensors


def _cohere(known: Metadata, config: Json) -> Json:
    return no_window(known, config) | {
        "logit_scale": known.number("logit_scale"),
        "use_qk_norm": _has_qk_norms(known),
    }


def _relu_squared(known: Metadata, config: Json) -> Json:
    return no_window(known, config) | {"hidden_act": "relu2"}


def ernie(known: Metadata, config: Json) -> Json:
    return no_window(known, config) | {"use_bias": config["attention_bias"]}


def _exaone4(known: Metadata, config: Json) -> Json:
    """A window that no text reaches still says which layers rotate."""
    if known.find(WINDOW) in (None, 0):
        types = ["full_attention"] * config["num_hidden_layers"]
        return {"sliding_window": None, "layer_types": types}
    return {
        "sliding_window": known.whole(WINDOW),
        "layer_types": layer_types(known, config, period=4),
    }


def _seed_oss(known: Metadata, config: Json) -> Json:
    has_bias = "blk.0.attn_output.bias" in known.header.tensors
    return no_window(known, config) | {"attention_out_bias": has_bias}


def _stablelm(known: Metadata, config: Json) -> Json:
    tensors = known.header.tensors
    return no_window(known, config) | {
        "use_qkv_bias": config["attention_bias"],
        "qk_layernorm": _has_qk_norms(known),
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors,
    }


def _phi(known: Metadata, config: Json) -> Json:
    return no_window(known, config) | {"hidden_act": "gelu_new"}


def _gpt_neox(known: Metadata, config: Json) -> Json:
    """Pythia's GELU has the error function, which llama.cpp approximates."""
    return no_window(known, config) | {
        "hidden_act": "gelu",
        "rotary_emb_base": config["rope_theta"],
        "rotary_pct": config["partial_rotary_factor"],
        "use_parallel_residual": known.flag("use_parallel_residual", True),
    }


def _starcoder2(known: Metadata, config: Json) -> Json:
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": _window(known, config),
        "use_bias": config["attention_bias"],
    }


def _gpt2(known: Metadata, config: Json) -> Json:
    return {
        "n_embd": config["hidden_size"],
        "n_head": config["num_attention_heads"],
        "n_inner": config["intermediate_size"],
        "n_layer": config["num_hidden_layers"],
        "n_positions": config["max_position_embeddings"],
        "activation_function": "gelu_new",
    }


def _gpt_bigcode(known: Metadata, config: Json) -> Json:
    if config["num_key_value_heads"] not in (1, config["num_attention_heads"]):
        raise known.header.error("StarCoder 1 with groups of heads that share keys is not known")
    return _gpt2(known, config) | {
        "activation_function": "gelu_pytorch_tanh",
        "multi_query": config["num_key_value_heads"] == 1,
    }


def _falcon(known: Metadata, config: Json) -> Json:
    """The activation has the error function, which llama.cpp approximates. Models whose heads share
    one key have another layout of checkpoints than those with groups, of which one is as good."""
    return no_window(known, config) | {
        "new_decoder_architecture": True,
        "num_kv_heads": config["num_key_value_heads"],
        "num_ln_in_parallel_attn": 2 if known.has_tensors("attn_norm_2.weight") else 1,
        "ffn_hidden_size": config["intermediate_size"],
        "activation": "gelu",
        "bias": config["attention_bias"],
    }


def _check_linear_biases(known: Metadata, config: Json) -> None:
    """Refuses a model with other sizes than those of transformers' class, which has no fields of
    heads of keys, of a width of heads, nor of MLPs."""
    heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
    wanted = {
        "num_key_value_heads": heads,
        "head_dim": hidden_size // heads,
        "intermediate_size": 4 * hidden_size,
    }
    for name, value in wanted.items():
        if config[name] != value:
            raise known.header.error(f"{name} {config[name]} is not supported; supported: {value}")


def _bloom(known: Metadata, config: Json) -> Json:
    _check_linear_biases(known, config)
    return no_window(known, config) | {"seq_length": config["max_position_embeddings"]}


def _mpt(known: Metadata, config: Json) -> Json:
    """The activation has the error function, which llama.cpp approximates."""
    _check_linear_biases(known, config)
    for name in ("attn_q_norm.weight", "attn_qkv.bias"):
        if known.has_tensors(name):
            raise known.header.error(f"an MPT with tensors {name} is not supported")
    steepness = known.number("attention.max_alibi_bias")
    if steepness != int(steepness) or steepness < 1:
        raise known.header.error(f"attention.max_alibi_bias {steepness:g} is not supported")
    return no_window(known, config) | {
        "max_seq_len": config["max_position_embeddings"],
        "attn_config": {
            "alibi_bias_max": int(steepness),
            "clip_qkv": scale(known, "attention.clamp_kqv", 0.0) or None,
        },
    }


OF_FAMILY: dict[str, Callable[[Metadata, Json], Json]] = {
    "llama": _llama,
    "ministral3": _mistral3,
    "gemma": _gemma1,
    "gemma2": _gemma2,
    "gemma3_text": gemma3,
    "phi3": _phi3,
    "granite": granite,
    "smollm3": _smollm3,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "glm": no_window,
    "glm4": _glm4,
    "arcee": _relu_squared,
    "nemotron": _relu_squared,
    "gpt_neox": _gpt_neox,
    "phi": _phi,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "ernie4_5": ernie,
    "exaone4": _exaone4,
    "seed_oss": _seed_oss,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "falcon": _falcon,
    "jais2": _relu_squared,
    "bloom": _bloom,
    "mpt": _mpt,
}
"""By the model's type; a type that no such table has has no fields of its own, and no window."""
