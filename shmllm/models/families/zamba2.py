"""Zamba2 (Glorioso et al., 2024): layers of Mamba 2, some of which also read what attention and an
MLP make of the residual stream and the embeddings; these layers share the weights of both."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.branch_specs import BranchSpec
from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.mamba_fields import LINEAR, Names, read_mamba2
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.readers import (
    MOST_LAYERS,
    read_activation,
    read_attention,
    read_layer_types,
    read_model,
    read_norm,
    read_positions,
    with_rope,
)
from shmllm.models.recurrent_specs import Mamba2Spec
from shmllm.models.specs import MLPSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

HYBRID = "hybrid"
_DEFAULT = (6, 12, 18, 24, 30, 36, 42, 47, 51)
"""Those of 54 layers that are HYBRID where config.json does not say it."""
_MAMBA: Names = {
    "heads": ("n_mamba_heads", 8),
    "head_dim": ("mamba_headdim", "auto"),
    "groups": ("mamba_ngroups", 1),
    "state_size": ("mamba_d_state", 64),
    "taps": ("mamba_d_conv", 4),
    "bias": ("add_bias_linear", False),
    "convolution_bias": ("use_conv_bias", True),
    "expand": ("mamba_expand", 2),
    "activation": ("mamba_hidden_act", "silu"),
}
_NAMES = {
    "self_attn.q_adapter.": "self_attn.linear_q_adapter_list.{}.",
    "self_attn.k_adapter.": "self_attn.linear_k_adapter_list.{}.",
    "self_attn.v_adapter.": "self_attn.linear_v_adapter_list.{}.",
    "mlp.adapter.": "feed_forward.gate_up_proj_adapter_list.{}.",
    "mlp.": "feed_forward.",
}
"""Parts of names in a branch; the number is that of the branch."""


def configure(fields: Fields) -> ModelConfig:
    """Returns the configuration, in which a layer of the checkpoint with attention is two: a
    branch, and Mamba 2 behind it. All convolutions have a bias, whatever ``use_conv_bias`` says,
    as in transformers."""
    if not fields.flag("tie_word_embeddings", True):  # transformers then ties no layers, either
        raise fields.error("tie_word_embeddings false is not supported")
    positions = read_positions(fields, 4096)
    if fields.flag("use_long_context", False):
        positions = 16_384
    mamba = LayerSpec(
        mixer=_read_mamba(fields), mlp=None, norms=LayerNorms(before_mixer="input_layernorm")
    )
    attention, mlp = _read_attention(fields, positions), _read_mlp(fields)
    num_blocks = fields.integer("num_mem_blocks", 1)
    layers: list[LayerSpec] = []
    branches: list[int] = []
    for kind in _read_types(fields):
        if kind == HYBRID:
            branches.append(len(layers))
            branch = BranchSpec(
                branches[(len(branches) - 1) % num_blocks],
                fields.integer("adapter_rank", 128),
                fields.flag("use_shared_attention_adapter", False),
            )
            norms = LayerNorms(before_mlp="pre_ff_layernorm")
            layers.append(LayerSpec(mixer=attention, mlp=mlp, norms=norms, branch=branch))
        layers.append(replace(mamba, behind_branch=kind == HYBRID))
    model = read_model(fields, layers, positions, tied=True)
    numbers = _numbers(model)
    copies = [f"model.layers.{numbers[index]}.shared_transformer." for index in branches]
    return replace(
        model,
        norm=read_norm(fields, default=1e-5),
        skipped_prefixes=tuple(copies[num_blocks:]),
    )


def _read_types(fields: Fields) -> tuple[str, ...]:
    """Returns LINEAR or HYBRID for each layer of the checkpoint."""
    name = "layer_types" if fields.values.get("layers_block_type") is None else "layers_block_type"
    found = fields.values.get(name)
    if isinstance(found, list):
        found = [LINEAR if each == "mamba" else each for each in found]
        fields = fields.with_values(fields.values | {name: found})
    count = fields.integer("num_hidden_layers", 54, maximum=MOST_LAYERS)
    types = read_layer_types(fields, count, (LINEAR, HYBRID), name)
    if types is None and count != 54:
        raise fields.error(f"'layers_block_type' must list a type for each of {count} layers")
    default = tuple(HYBRID if index in _DEFAULT else LINEAR for index in range(count))
    return default if types is None else types


def _read_mamba(fields: Fields) -> Mamba2Spec:
    fields = fields.with_values(fields.values | {"time_step_limit": None})
    return replace(
        read_mamba2(fields, _MAMBA),
        convolution_bias=True,
        limits=(fields.number("time_step_min", 0.001), math.inf),
        norm_eps=1e-5,
    )


def _read_attention(fields: Fields, positions: int) -> AttentionSpec:
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if 2 * hidden % heads:
        raise fields.error(f"num_attention_heads ({heads}) does not divide 2 * hidden_size")
    width = 2 * hidden // heads
    attention = read_attention(fields.with_values(fields.values | {"head_dim": width}))
    if fields.flag("use_shared_attention_adapter", False) and attention.num_kv_heads != heads:
        raise fields.error(
            f"use_shared_attention_adapter with {attention.num_kv_heads} num_key_value_heads is "
            f"not supported, only with {heads}"
        )
    attention = replace(attention, scale=(width / 2) ** -0.5, input_width=2 * hidden)
    has_rope = fields.flag("use_mem_rope", False)
    return with_rope(attention, fields, positions) if has_rope else attention


def _read_mlp(fields: Fields) -> MLPSpec:
    fields = fields.with_defaults({"intermediate_size": 4 * fields.integer("hidden_size")})
    return MLPSpec(
        inner=fields.integer("intermediate_size"),
        activation=read_activation(fields, default="gelu"),
        bias=fields.flag("add_bias_linear", False),
    )


def _numbers(config: ModelConfig) -> list[int]:
    """Returns for each layer the number of that which it is a part of in a checkpoint."""
    found, count = list[int](), 0
    for layer in config.layers:
        found.append(count)
        count += layer.branch is None
    return found


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.fused_names import GATE_UP, with_fused

    names, found = _NamesInFiles(config), {}
    for name, views in with_fused(weights, GATE_UP).items():
        found[names.of(name)] = views
    return found


class _NamesInFiles:
    """The names of weights in checkpoints."""

    def __init__(self, config: ModelConfig) -> None:
        self._layers, self._numbers = config.layers, _numbers(config)
        self._branches = [i for i, layer in enumerate(config.layers) if layer.branch is not None]

    def of(self, name: str) -> str:
        """Returns the name for a default name."""
        _, is_of_layer, rest = name.partition("model.layers.")
        if not is_of_layer:
            return name.replace("model.norm.", "model.final_layernorm.")
        number, _, rest = rest.partition(".")
        index = int(number)
        branch, own = self._layers[index].branch, f"model.layers.{self._numbers[index]}"
        if branch is None:
            part = "mamba_decoder." if self._layers[index].behind_branch else ""
            return f"{own}.{part}{rest}"
        if rest.startswith("linear."):
            return f"{own}.{rest}"
        rest = renamed(rest, _NAMES).format(self._branches.index(index))
        return f"model.layers.{self._numbers[branch.source]}.shared_transformer.{rest}"
