"""Makes config.json and generation_config.json from the metadata of a GGUF file.

The names on one side are llama.cpp's, on the other transformers'. This module refuses what the
engine cannot compute, before an engine starts. It must not know tokenizers.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from shmllm.formats.gguf import GgufHeader, shown
from shmllm.formats.gguf_family import GgufFamily
from shmllm.formats.gguf_model import family_of, layers_of
from shmllm.formats.gguf_places import FUSED_QKV
from shmllm.formats.gguf_projectors import ARCHITECTURE as PROJECTOR
from shmllm.frontend.gguf.encoder_fields import OF_ENCODERS
from shmllm.frontend.gguf.expert_fields import OF_MIXTURE
from shmllm.frontend.gguf.family_fields import OF_FAMILY, no_window
from shmllm.frontend.gguf.latent_fields import OF_LATENTS
from shmllm.frontend.gguf.layer_fields import OF_LAYERS
from shmllm.frontend.gguf.metadata import Metadata
from shmllm.frontend.gguf.recurrent_fields import OF_RECURRENT
from shmllm.frontend.gguf.rope import rope_fields
from shmllm.frontend.gguf.sizes import check_layers, check_shapes

Json = dict[str, Any]

_EMBEDDING = "token_embd.weight"
_MATRIX_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_LAYER_NORM_EPS = {
    **dict.fromkeys(
        ("cohere", "cohere2", "gpt_neox", "phi", "stablelm", "jais2"), "layer_norm_eps"
    ),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "falcon", "bloom", "mpt"), "layer_norm_epsilon"),
    "nemotron": "norm_eps",
    "orion": "rms_norm_eps",
    "olmo": "layer_norm_eps",
    "starcoder2": "norm_epsilon",
    **dict.fromkeys(("bert", "nomic_bert", "jina_bert"), "layer_norm_eps"),
    "modernbert": "norm_eps",
}
"""The field of the models with LayerNorms instead of RMSNorms, by their type."""
_OWN_FIELDS = OF_FAMILY | OF_MIXTURE | OF_LATENTS | OF_RECURRENT | OF_LAYERS | OF_ENCODERS
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>")
_MESSAGE_END, _HARMONY_ENDS = "<|end|>", ("<|return|>", "<|call|>")
"""Harmony, the format of gpt-oss: there _MESSAGE_END is followed by a further message."""
_TOOL_RESPONSE = "<|tool_response>"
"""Where Gemma 4 waits for what a tool returns; files define the token for parsers of replies."""
_CONTROL, _DEFINED = 3, 4
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
    attention = {} if family.has_mixers_alone else _attention_fields(known, family)
    config: Json = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": tensors[_EMBEDDING].shape[0],
        "hidden_size": known.whole("embedding_length"),
        "num_hidden_layers": layers_of(header)[0],
        "max_position_embeddings": known.whole("context_length"),
        **_norm_eps(known, family),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": _dtype(header),
        **_special_ids(header),
        **attention,
    }
    if not known.flag("attention.causal", True):
        config["is_causal"] = False
    check_layers(header, config["num_hidden_layers"])
    config |= _OWN_FIELDS.get(family.model_type, no_window)(known, config)
    check_shapes(header, config, family)
    return config


def _attention_fields(known: Metadata, family: GgufFamily) -> Json:
    """The fields of attention and of the MLPs behind it."""
    lists = {"may_be_absent": family.is_hybrid, "may_differ": family.has_own_widths}
    num_heads = known.whole("attention.head_count", may_be_absent=family.is_hybrid)
    head_dim = _head_dim(known, known.whole("embedding_length") // num_heads, family)
    length = known.whole("context_length")
    return {
        "intermediate_size": known.whole(
            "feed_forward_length",
            known.find("expert_feed_forward_length"),
            **lists,
        ),
        "num_attention_heads": num_heads,
        "num_key_value_heads": known.whole("attention.head_count_kv", num_heads, **lists),
        "head_dim": head_dim,
        "attention_bias": known.has_tensors("attn_q.bias", f"{FUSED_QKV}.bias"),
        "mlp_bias": "blk.0.ffn_up.bias" in known.header.tensors,
        **rope_fields(known, head_dim, length, is_partial=family.is_partial),
    }


def _head_dim(known: Metadata, default: int, family: GgufFamily) -> int:
    """The width of heads, or of that part which carries the position beside a latent."""
    if family.has_latents:
        return known.whole("rope.dimension_count")
    head_dim = known.whole("attention.key_length", default)
    is_other = known.whole("attention.value_length", head_dim) != head_dim
    if is_other and not family.has_value_width:
        raise known.header.error("keys and values of different lengths are not supported")
    return head_dim


def _norm_eps(known: Metadata, family: GgufFamily) -> Json:
    name = _LAYER_NORM_EPS.get(family.model_type)
    if name is not None:
        return {name: known.number("attention.layer_norm_epsilon")}
    return {"rms_norm_eps": known.number("attention.layer_norm_rms_epsilon")}


def _check_kind(header: GgufHeader) -> None:
    """Raises EngineStartError if the file has no model that an engine runs."""
    if header.architecture == PROJECTOR:
        raise header.error(
            "it has a tower of images; give the model that it belongs to, and leave it beside"
        )
    family_of(header)
    table = header.tensors.get(_EMBEDDING)
    if table is None or len(table.shape) != 2:
        raise header.error(f"no matrix {_EMBEDDING}; is it a vocabulary or an adapter?")


def _dtype(header: GgufHeader) -> str:
    """The dtype of most bytes of the matrices; "bfloat16" if these are quantised.

    Blocks have float16 scales, but the models were trained in bfloat16, and some have activations
    that float16 cannot hold.
    """
    sizes: Counter[str] = Counter()
    for each in header.tensors.values():
        if len(each.shape) == 2:
            sizes[each.type_name] += each.num_bytes
    return _MATRIX_TYPES.get(max(sizes, key=sizes.__getitem__), "bfloat16")


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
    ends += _turn_ends(metadata)
    ids = list(dict.fromkeys(token_id for token_id in ends if token_id is not None))
    config: Json = {"eos_token_id": ids} if len(ids) > 1 else {}
    for source, target in SAMPLING.items():
        value = metadata.get(f"general.sampling.{source}")
        if type(value) is int or (isinstance(value, float) and math.isfinite(value)):
            config[target] = value
    return config


def _turn_ends(metadata: Json) -> list[int]:
    """The control tokens that end a chat's turn, by their texts: files from before `eot_token_id`
    name only one token, not always this one."""
    tokens, kinds = (
        metadata.get(f"tokenizer.ggml.{name}", []) for name in ("tokens", "token_type")
    )
    texts: tuple[str, ...] = _TURN_ENDS
    if all(text in tokens for text in _HARMONY_ENDS):
        texts = (*_HARMONY_ENDS, *(text for text in texts if text != _MESSAGE_END))
    allowed = {**dict.fromkeys(texts, (_CONTROL,)), _TOOL_RESPONSE: (_CONTROL, _DEFINED)}
    found = {text: tokens.index(text) for text in allowed if text in tokens}
    return [
        n for text, n in found.items() if any(each in allowed[text] for each in kinds[n : n + 1])
    ]
