"""Checks that the sizes in the metadata of a GGUF file are those of its tensors.

An engine allocates what the metadata ask for, before it reads a tensor. Tensors lie within the
file, so that no damaged number asks for more than the file can fill.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shmllm.formats.gguf import GgufHeader
from shmllm.formats.gguf_family import GgufFamily

Shapes = dict[str, tuple[int, ...]]

_LAYER = re.compile(r"blk\.(\d+)\..*")
_NUM_EXPERTS = "num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts"
_SHARED_WIDTHS = (
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
)
_NUM_SHARED = "num_shared_experts", "moe_num_shared_experts", "n_shared_experts"
"""The fields of models with experts: how many, the width of the MLP that all tokens go to, or how
many experts that MLP is as wide as."""


def check_layers(header: GgufHeader, num_layers: int) -> None:
    """Raises EngineStartError if the file has tensors of fewer layers."""
    found = {match[1] for match in map(_LAYER.fullmatch, header.tensors) if match is not None}
    if num_layers > len(found):
        raise header.error(
            f"{header.architecture}.block_count is {num_layers:,}, and there are tensors of "
            f"{len(found):,} layers"
        )


def check_shapes(header: GgufHeader, config: Mapping[str, Any], family: GgufFamily) -> None:
    """Raises EngineStartError if a tensor of the first layer that has one has another shape than
    config.json asks for. Those of the others are checked when they are loaded, and so are all but
    the first layer's where layers have widths of their own."""
    hidden_size = config["hidden_size"]
    layers = range(1 if family.has_own_widths else config["num_hidden_layers"])
    expected: Shapes = {"token_embd": (config["vocab_size"], hidden_size)}
    if not family.has_mixers_alone:
        expected |= _attention_shapes(config, family)
    if family.has_delta_nets:
        attending, nets = expected.pop("attn_qkv"), _delta_net_shape(config)
        for layer in layers:
            shape = attending if str(layer) in family.attention_layers else nets
            _check(header, "attn_qkv", shape, [layer])
    else:
        expected |= _mamba_shapes(header, hidden_size)
    for module, shape in expected.items():
        _check(header, module, shape, layers)


def _delta_net_shape(config: Mapping[str, Any]) -> tuple[int, int]:
    """The shape of queries, keys and values of a delta net."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    return 2 * keys + values, config["hidden_size"]


def _mamba_shapes(header: GgufHeader, hidden_size: int) -> Shapes:
    """The shapes of a Mamba or, which has groups, a Mamba 2; empty for other models."""
    prefix = f"{header.architecture}.ssm"
    names = ("inner_size", "state_size", "time_step_rank", "group_count")
    sizes: list[Any] = [header.metadata.get(f"{prefix}.{name}") for name in names]
    inner, state, rank, groups = sizes
    if inner is None:
        return {}
    out = {"ssm_out": (hidden_size, inner)}
    if groups is None:
        return {**out, "ssm_in": (2 * inner, hidden_size), "ssm_x": (rank + 2 * state, inner)}
    return {**out, "ssm_in": (2 * (inner + groups * state) + rank, hidden_size)}


def _attention_shapes(config: Mapping[str, Any], family: GgufFamily) -> Shapes:
    """The shapes of attention, MLPs and experts."""
    hidden_size, head_dim = config["hidden_size"], config["head_dim"]
    num_experts, inner = _first_of(config, _NUM_EXPERTS), config["intermediate_size"]
    inner = inner[0] if isinstance(inner, list) else inner
    width = config.get("moe_intermediate_size", inner)
    of_experts = config.get("moe_latent_size") or hidden_size
    shared_width = _first_of(config, _SHARED_WIDTHS)
    if shared_width is None:
        shared_width = width * (_first_of(config, _NUM_SHARED) or 0)
    dense_width = config.get("intermediate_size_mlp", inner)
    up_width = dense_width * (2 if family.has_fused_gate else 1)
    q_width = config["num_attention_heads"] * head_dim
    num_kv_heads, value_dim = config["num_key_value_heads"], config.get("v_head_dim") or head_dim
    kv_width = num_kv_heads * head_dim
    q_rows = 2 * q_width if family.has_delta_nets else q_width
    expected = {
        "position_embd": (config["max_position_embeddings"], hidden_size),
        "attn_qkv": (q_rows + kv_width + num_kv_heads * value_dim, hidden_size),
        "attn_q": (q_rows, hidden_size),
        "attn_k": (kv_width, hidden_size),
        "ffn_up": (up_width, hidden_size),
        "ffn_up_shexp": (shared_width, hidden_size),
        "ffn_gate_inp": (num_experts, hidden_size),
        "ffn_latent_down": (of_experts, hidden_size),
        "ffn_up_exps": (num_experts, width, of_experts),
        "ffn_gate_up_exps": (num_experts, 2 * width, of_experts),
    }
    if family.has_latents:
        del expected["attn_q"], expected["attn_qkv"]
    return expected


def _check(header: GgufHeader, module: str, shape: tuple[int, ...], layers: Iterable[int]) -> None:
    """Raises EngineStartError if the weight of a module has another shape: the model's, or that of
    the first of these layers that has one."""
    places = itertools.chain([module], (f"blk.{layer}.{module}" for layer in layers))
    names = (f"{place}.weight" for place in places)
    name = next(filter(header.tensors.__contains__, names), None)
    if name is not None and header.tensors[name].shape != shape:
        raise header.error(
            f"{name} has the shape {[*header.tensors[name].shape]}, the metadata ask for {[*shape]}"
        )


def _first_of(config: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The first of these fields that config.json has, or None."""
    return next((config[name] for name in names if name in config), None)
