"""Qwen 2 MoE: Qwen 2 with experts in some layers, and an MLP with a gate that all tokens go to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    FULL,
    SLIDING,
    read_activation,
    read_attention,
    read_experts,
    read_layer_types,
    read_mlp,
    read_model,
    read_num_layers,
    read_positions,
    read_window,
    windows_by_type,
    with_rope,
    with_windows,
)
from shmllm.models.specs import MLPSpec, MoESpec


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 32768)
    bias = fields.flag("qkv_bias", True)
    attention = with_rope(read_attention(fields, num_kv_heads=16, bias=bias), fields, positions)
    experts = read_experts_and_shared(
        fields,
        inner=1408,
        shared_inner=5632,
        num_experts=60,
        top_k=4,
        renormalize=fields.flag("norm_topk_prob", False),
    )
    layers = with_windows(LayerSpec(mixer=attention, mlp=experts), _windows(fields))
    return read_model(fields, with_dense_mlps(fields, layers), positions)


def read_experts_and_shared(
    fields: Fields,
    *,
    inner: int,
    shared_inner: int,
    num_experts: int,
    top_k: int,
    renormalize: bool,
) -> MoESpec:
    """Returns experts and an MLP with a gate that all tokens go to.

    Args:
        fields: the fields of config.json.
        inner: the default of ``moe_intermediate_size``.
        shared_inner: the default of ``shared_expert_intermediate_size``.
        num_experts: the default of ``num_experts``.
        top_k: the default of ``num_experts_per_tok``.
        renormalize: see `MoESpec`.
    """
    inner = fields.integer("moe_intermediate_size", inner)
    shared_inner = fields.integer("shared_expert_intermediate_size", shared_inner)
    return replace(
        read_experts(fields, inner, num_experts=num_experts, top_k=top_k),
        renormalize=renormalize,
        shared=MLPSpec(inner=shared_inner, activation=read_activation(fields)),
        shared_gate=True,
    )


def with_dense_mlps(fields: Fields, layers: Iterable[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Returns layers with an MLP in place of experts in those that ``mlp_only_layers`` lists and
    those that ``decoder_sparse_step`` leaves out. Without such layers config.json needs no
    ``intermediate_size``."""
    dense, step = _dense_layers(fields), fields.integer("decoder_sparse_step", 1)
    return tuple(
        replace(layer, mlp=read_mlp(fields)) if index in dense or (index + 1) % step else layer
        for index, layer in enumerate(layers)
    )


def _dense_layers(fields: Fields) -> list[int]:
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(index) is not int for index in dense):
        raise fields.error(f"'mlp_only_layers' must list numbers of layers, not {dense!r}")
    return dense


def _windows(fields: Fields) -> tuple[int | None, ...]:
    num_layers = read_num_layers(fields)
    enabled = fields.flag("use_sliding_window", False)
    types = read_layer_types(fields, num_layers)
    if types is None:
        below = fields.integer("max_window_layers", 28, minimum=0) if enabled else 0
        types = tuple(
            SLIDING if index % 2 == 0 and index < below else FULL for index in range(num_layers)
        )
    return windows_by_type(fields, types, read_window(fields, 4096) if enabled else None)
