"""Makes config.json and generation_config.json from the metadata of a GGUF file.

The names on one side are llama.cpp's, on the other transformers'. This module refuses what the
engine cannot compute, before an engine starts. It must not know tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmllm.formats.gguf import GgufHeader
from shmllm.frontend.gguf.metadata import Metadata
from shmllm.frontend.gguf.rope import rope_fields

Json = dict[str, Any]

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
"""transformers' class and model type for each architecture of llama.cpp that runs. Mistral's models
have the architecture llama."""

_EMBEDDING = "token_embd.weight"
_MATRIX_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
_CONTROL = 3
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def model_config(header: GgufHeader) -> Json:
    """The content of config.json.

    Raises:
        EngineStartError: the metadata are incomplete, or the model needs what no engine has.
    """
    _check_kind(header)
    known, tensors = Metadata(header), header.tensors
    architecture, model_type = ARCHITECTURES[header.architecture]
    num_heads = known.whole("attention.head_count")
    hidden_size = known.whole("embedding_length")
    head_dim = known.whole("attention.key_length", hidden_size // num_heads)
    if known.whole("attention.value_length", head_dim) != head_dim:
        raise header.error("keys and values of different lengths are not supported")
    if known.whole("rope.dimension_count", head_dim) != head_dim:
        raise header.error("rotary embedding of a part of each head is not supported")
    length = known.whole("context_length")
    config: Json = {
        "architectures": [architecture],
        "model_type": model_type,
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
        **_special_ids(header.metadata),
    }
    return config | _window(known, config)


def _check_kind(header: GgufHeader) -> None:
    """Raises EngineStartError if the file has no model that an engine runs."""
    name, known = header.architecture, Metadata(header)
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise header.error(
            f"one of {header.metadata['split.count']} parts of a model; merge them with "
            "llama-gguf-split --merge"
        )
    if name not in ARCHITECTURES:
        raise header.error(
            f"architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)} "
            "(Llama, Mistral, Qwen 2 and 3)"
        )
    if known.find("expert_count"):
        raise header.error(f"mixtures of experts ({name}.expert_count) are not supported")
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


def _window(known: Metadata, config: Json) -> Json:
    """The fields of a sliding window over the last positions."""
    if known.find("attention.sliding_window") is None:
        return {}
    window = known.whole("attention.sliding_window")
    if window >= config["max_position_embeddings"]:
        return {}
    if config["model_type"] != "llama" or config["attention_bias"] or config["mlp_bias"]:
        raise known.header.error(
            f"a sliding window of {window:,} positions is not supported with this architecture"
        )
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": window,
    }


def _special_ids(metadata: Mapping[str, Any]) -> Json:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {key: metadata.get(f"tokenizer.ggml.{name}_token_id") for key, name in names.items()}
    return {key: value for key, value in found.items() if value is not None}


def generation_config(header: GgufHeader) -> Json:
    """The content of generation_config.json: the tokens that end a text if there are several, and
    the author's sampling defaults. Empty if there is nothing to say."""
    metadata = header.metadata
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
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
    for source, target in _SAMPLING.items():
        value = metadata.get(f"general.sampling.{source}")
        if type(value) in (int, float):
            config[target] = value
    return config
