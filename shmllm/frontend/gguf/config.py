"""Makes config.json and generation_config.json from the metadata of a GGUF file.

The names on one side are llama.cpp's, on the other transformers'. This module refuses what the
engine cannot compute, before an engine starts. It must not know tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from shmllm.formats.gguf import GgufHeader, shown
from shmllm.formats.gguf_families import family_of
from shmllm.frontend.gguf.metadata import Metadata
from shmllm.frontend.gguf.rope import rope_fields
from shmllm.frontend.gguf.sizes import check_layers, check_shapes

Json = dict[str, Any]

_EMBEDDING = "token_embd.weight"
_MATRIX_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
_CONTROL = 3
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""The sampling defaults by their names in `general.sampling` and in generation_config.json."""


def model_config(header: GgufHeader) -> Json:
    """The content of config.json.

    Raises:
        EngineStartError: the metadata are incomplete, or the model needs what no engine has.
    """
    _check_kind(header)
    family, known, tensors = family_of(header), Metadata(header), header.tensors
    num_heads = known.whole("attention.head_count")
    hidden_size = known.whole("embedding_length")
    head_dim = known.whole("attention.key_length", hidden_size // num_heads)
    if known.whole("attention.value_length", head_dim) != head_dim:
        raise header.error("keys and values of different lengths are not supported")
    if known.whole("rope.dimension_count", head_dim) != head_dim:
        raise header.error("rotary embedding of a part of each head is not supported")
    length = known.whole("context_length")
    config: Json = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": tensors[_EMBEDDING].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": known.whole("feed_forward_length"),
        "num_hidden_layers": known.whole("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": known.whole("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": length,
        "rms_norm_eps": known.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "dtype": _dtype(header),
        **rope_fields(known, head_dim, length),
        **_special_ids(header),
    }
    check_layers(header, config["num_hidden_layers"])
    config |= _OF_FAMILY.get(family.model_type, _no_window)(known, config)
    check_shapes(header, config)
    return config


def _check_kind(header: GgufHeader) -> None:
    """Raises EngineStartError if the file has no model that an engine runs."""
    family_of(header)
    table = header.tensors.get(_EMBEDDING)
    if table is None or len(table.shape) != 2:
        raise header.error(f"no matrix {_EMBEDDING}; is it a vocabulary or an adapter?")


def _dtype(header: GgufHeader) -> str:
    """The dtype of the matrices; "bfloat16" if they are quantised.

    Blocks have float16 scales, but the models were trained in bfloat16, and some have activations
    that float16 cannot hold. On a CPU the dtype "auto" is float32 in any case.
    """
    matrices = {each.type_name for each in header.tensors.values() if len(each.shape) == 2}
    (kind, *others) = matrices or {"BF16"}
    return "bfloat16" if others else _MATRIX_TYPES.get(kind, "bfloat16")


def _window(known: Metadata, config: Json) -> int | None:
    """The number of positions that attention sees; None: all."""
    if known.find("attention.sliding_window") is None:
        return None
    window = known.whole("attention.sliding_window")
    return window if window < config["max_position_embeddings"] else None


def _no_window(known: Metadata, config: Json) -> Json:
    window = _window(known, config)
    if window is not None:
        raise known.header.error(
            f"a sliding window of {window:,} positions is not supported with this architecture"
        )
    return {}


def _llama(known: Metadata, config: Json) -> Json:
    """Mistral's models have the architecture llama, and may have a window."""
    window = _window(known, config)
    if window is None or config["attention_bias"] or config["mlp_bias"]:
        return _no_window(known, config)
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": window,
    }


def _mixtral(known: Metadata, config: Json) -> Json:
    return _no_window(known, config) | {
        "num_local_experts": known.whole("expert_count"),
        "num_experts_per_tok": known.whole("expert_used_count"),
    }


def _qwen3_moe(known: Metadata, config: Json) -> Json:
    # Files do not say whether the weights are divided by their sum; llama.cpp always does it.
    return _no_window(known, config) | {
        "num_experts": known.whole("expert_count"),
        "num_experts_per_tok": known.whole("expert_used_count"),
        "moe_intermediate_size": known.whole("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma2(known: Metadata, config: Json) -> Json:
    return _gemma(known, config, pattern=2, layers_of_27b=46) | {
        "attn_logit_softcapping": known.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": known.number("final_logit_softcapping", 30.0),
    }


def _gemma3(known: Metadata, config: Json) -> Json:
    fields = _gemma(known, config, pattern=6, layers_of_27b=62)
    if known.find("final_logit_softcapping") is not None:
        fields["final_logit_softcapping"] = known.number("final_logit_softcapping")
    return fields | {"rope_local_base_freq": known.number("rope.freq_base_swa", 10000.0)}


def _gemma(known: Metadata, config: Json, *, pattern: int, layers_of_27b: int) -> Json:
    """What both have. Files say neither the pattern of windows, unless it is another one, nor how
    scores are scaled, which differs for the models of 27 B parameters: llama.cpp knows both."""
    own = known.find("attention.sliding_window_pattern")
    if isinstance(own, list):
        types = [bool(is_sliding) for is_sliding in own]
    else:
        pattern = known.whole("attention.sliding_window_pattern", pattern)
        types = [(layer + 1) % pattern > 0 for layer in range(config["num_hidden_layers"])]
    scale_of_27b = config["hidden_size"] // config["num_attention_heads"]
    is_27b = config["num_hidden_layers"] == layers_of_27b
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scale_of_27b if is_27b else config["head_dim"],
        "sliding_window": known.whole("attention.sliding_window"),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in types],
    }


_OF_FAMILY: dict[str, Callable[[Metadata, Json], Json]] = {
    "llama": _llama,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}
"""The fields that only models of one type have."""


def _token_id(header: GgufHeader, name: str) -> int | None:
    """The id of a special token, by llama.cpp's name; None if the file does not say it."""
    key = f"tokenizer.ggml.{name}_token_id"
    value = header.metadata.get(key)
    if value is not None and type(value) is not int:
        raise header.error(f"{key} must be a token's id, found {shown(value)}")
    return value


def _special_ids(header: GgufHeader) -> Json:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {key: _token_id(header, name) for key, name in names.items()}
    return {key: value for key, value in found.items() if value is not None}


def generation_config(header: GgufHeader) -> Json:
    """The content of generation_config.json: the tokens that end a text if there are several, and
    the author's sampling defaults. Empty if there is nothing to say.

    Raises:
        EngineStartError: the id of a token is no number.
    """
    metadata = header.metadata
    ends = [_token_id(header, name) for name in ("eos", "eot", "eom")]
    tokens, kinds = (
        metadata.get(f"tokenizer.ggml.{name}", []) for name in ("tokens", "token_type")
    )
    for text in _TURN_ENDS:
        # Files from before `eot_token_id` name only one token, not always that of a chat's turns.
        if text in tokens:
            token_id = tokens.index(text)
            ends += [token_id] if kinds[token_id : token_id + 1] == [_CONTROL] else []
    ids = list(dict.fromkeys(token_id for token_id in ends if token_id is not None))
    config: Json = {"eos_token_id": ids} if len(ids) > 1 else {}
    for source, target in SAMPLING.items():
        value = metadata.get(f"general.sampling.{source}")
        if type(value) is int or (isinstance(value, float) and math.isfinite(value)):
            config[target] = value
    return config
