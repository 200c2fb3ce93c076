"""Small models that `shmllm quantize` can write in every format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.reference_models import make_model

BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
TIED = {"tie_word_embeddings": True}
GEMMA: dict[str, Any] = {"query_pre_attn_scalar": 16} | TIED
"""llama.cpp takes head_dim, and a file cannot say another one; Gemma 2 has no LM head in a file."""
WRITABLE: dict[str, dict[str, Any]] = {
    "gemma": TIED,
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "cohere": TIED,  # has no LM head in a file
    "cohere2": TIED,
    "gpt2": TIED,
    "glm4": {"attention_bias": True},
    "qwen2_moe": {"shared_expert_intermediate_size": 64},  # whole blocks
    "granite_moe_shared": {"shared_intermediate_size": 64},
    "minimax_m2": {"num_mtp_modules": 3},  # which a checkpoint has beside the model
    "llama4": {"attention_chunk_size": 8192, "floor_scale": 8192},  # a file cannot say others
    "olmoe": {"num_key_value_heads": 4},  # llama.cpp reads no others
    "falcon": {"ffn_hidden_size": 96, "bias": False},  # likewise
    "falcon_mamba": {"mixer_rms_eps": 1e-5},  # that of the layers' norms
    "dots1": {"num_key_value_heads": 4},
    "minicpm3": {"kv_lora_rank": 64, "q_lora_rank": 64},
}
"""What differs from `make_model`, by its names of families."""


def writable_model(kind: str, directory: Path, **config: Any) -> Any:
    """A random model of transformers' with a tokenizer that llama.cpp knows, GPT-2's."""
    model = make_model(kind, directory, **(WRITABLE.get(kind, {}) | config))
    change_tokenizer(directory, pre_tokenizer=BYTE_LEVEL)
    return model


def change_tokenizer(directory: Path, **parts: Any) -> None:
    """Replace parts of tokenizer.json."""
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))


def change_config(directory: Path, **fields: Any) -> None:
    """Replace fields of config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
