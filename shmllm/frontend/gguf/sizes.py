"""Checks that the sizes in the metadata of a GGUF file are those of its tensors.

An engine allocates what the metadata ask for, before it reads a tensor. Tensors lie within the
file, so that no damaged number asks for more than the file can fill.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shmllm.formats.gguf import GgufHeader
from shmllm.formats.gguf_family import GgufFamily

_LAYER = re.compile(r"blk\.(\d+)\..*")


def check_layers(header: GgufHeader, num_layers: int) -> None:
    """Raises EngineStartError if the file has tensors of fewer layers."""
    found = {match[1] for match in map(_LAYER.fullmatch, header.tensors) if match is not None}
    if num_layers > len(found):
        raise header.error(
            f"{header.architecture}.block_count is {num_layers:,}, and there are tensors of "
            f"{len(found):,} layers"
        )


def check_shapes(header: GgufHeader, config: Mapping[str, Any], family: GgufFamily) -> None:
    """Raises EngineStartError if the tensors of the first layer have other shapes than config.json
    asks for. Those of the others are checked when they are loaded."""
    hidden_size, head_dim = config["hidden_size"], config["head_dim"]
    num_experts = config.get("num_experts", config.get("num_local_experts"))
    width = config.get("moe_intermediate_size", config["intermediate_size"])
    shared_width = config.get("shared_expert_intermediate_size")
    up_width = config["intermediate_size"] * (2 if family.has_fused_gate else 1)
    q_width = config["num_attention_heads"] * head_dim
    kv_width = config["num_key_value_heads"] * head_dim
    expected = {
        "token_embd": (config["vocab_size"], hidden_size),
        "position_embd": (config["max_position_embeddings"], hidden_size),
        "blk.0.attn_qkv": (q_width + 2 * kv_width, hidden_size),
        "blk.0.attn_q": (q_width, hidden_size),
        "blk.0.attn_k": (kv_width, hidden_size),
        "blk.0.ffn_up": (up_width, hidden_size),
        "blk.0.ffn_up_shexp": (shared_width, hidden_size),
        "blk.0.ffn_gate_inp": (num_experts, hidden_size),
        "blk.0.ffn_up_exps": (num_experts, width, hidden_size),
    }
    for module, shape in expected.items():
        entry = header.tensors.get(f"{module}.weight")
        if entry is not None and entry.shape != shape:
            raise header.error(
                f"{module}.weight has the shape {[*entry.shape]}, the metadata ask for {[*shape]}"
            )
