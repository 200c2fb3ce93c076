"""ChatGLM2, ChatGLM3 and the first GLM-4-9B as their authors publish them, beside code of their
own: what transformers has as GLM, with other names of fields and weights.

This module owns the fields; it must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shmllm.errors import EngineStartError

ARCHITECTURE = "ChatGLMForCausalLM"
"""The family's own name."""
NAMES = frozenset({"ChatGLMModel", "ChatGLMForConditionalGeneration"})
"""The authors' names."""
THETA = 10_000
"""The base of rotations for a ``rope_ratio`` of 1."""

_FIELDS: dict[str, tuple[str, Any]] = {
    "add_qkv_bias": ("attention_bias", False),
    "ffn_hidden_size": ("intermediate_size", 13_696),
    "hidden_size": ("hidden_size", 4096),
    "kv_channels": ("head_dim", 128),
    "layernorm_epsilon": ("rms_norm_eps", 1e-5),
    "num_attention_heads": ("num_attention_heads", 32),
    "num_layers": ("num_hidden_layers", 28),
    "padded_vocab_size": ("vocab_size", 65_024),
    "seq_length": ("max_position_embeddings", 2048),
}
"""GLM's name of each field, and the authors' default."""
_ONLY: dict[str, Any] = {
    "add_bias_linear": False,
    "apply_residual_connection_post_layernorm": False,
    "interleaved_qkv": False,
    "original_rope": True,
    "post_layer_norm": True,
    "pre_seq_len": None,
    "quantization_bit": 0,
    "rmsnorm": True,
}
"""The only value that is computed, which is also the default."""


def in_terms_of_transformers(values: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Returns the content of a config.json with GLM's fields if it is such a model's; any other as
    it is.

    Raises:
        EngineStartError: a field has a value that is not computed.
    """
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in NAMES:
        return dict(values)
    where = directory / "config.json"
    for name, only in _ONLY.items():
        if (value := values.get(name, only)) != only:
            problem = f"{name!r} {value!r} is not supported; supported: {only}"
            raise EngineStartError(f"{where}: {problem}")
    ratio = values.get("rope_ratio", 1)
    if type(ratio) not in (int, float) or not ratio > 0:
        raise EngineStartError(f"{where}: 'rope_ratio' must be a number above 0, not {ratio!r}")
    heads = values.get("num_attention_heads", _FIELDS["num_attention_heads"][1])
    has_groups = values.get("multi_query_attention", False)
    return {
        **values,
        "architectures": [ARCHITECTURE],
        "hidden_act": "silu",
        "num_key_value_heads": values.get("multi_query_group_num", 1) if has_groups else heads,
        "partial_rotary_factor": 0.5,
        "rope_theta": THETA * ratio,
        **{own: values.get(name, default) for name, (own, default) in _FIELDS.items()},
    }
