"""OLMo Hybrid: gated delta nets behind norms, beside OLMo 3's attention, which has its norms behind
it; the published model rotates nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.olmo2 import NORMS, read_olmo_attention
from shmllm.models.families.qwen3_5 import LINEAR, read_delta_net
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.readers import (
    FULL,
    read_layer_types,
    read_mlp,
    read_model,
    read_num_layers,
    read_positions,
    with_rope,
)
from shmllm.models.recurrent_specs import DeltaNetSpec
from shmllm.models.shard import Shard
from shmllm.models.weight_names import OTHER_LAYOUT

if TYPE_CHECKING:
    from torch import Tensor

    from shmllm.models.layers import NamedWeights
    from shmllm.models.matrices import Destination, Matrix

NORM_EPS = 1e-5
"""That of the norm behind a delta net, whatever ``rms_norm_eps`` says."""
_NORMS_IN_FILES = {
    "input_layernorm": "attention_layer_norm",
    "post_attention_layernorm": "feedforward_layer_norm",
}
"""The names of norms in published files, by those of transformers' modules."""


def configure(fields: Fields) -> ModelConfig:
    positions, num_layers = read_positions(fields, 65536), read_num_layers(fields)
    mlp = read_mlp(fields)
    layers = {FULL: LayerSpec(mixer=_read_attention(fields, positions), mlp=mlp, norms=NORMS)}
    types = _read_types(fields, num_layers)
    if LINEAR in types:
        layers[LINEAR] = LayerSpec(mixer=_read_net(fields), mlp=mlp)
    return read_model(fields, [layers[kind] for kind in types], positions)


def _read_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    types = read_layer_types(fields, num_layers, (LINEAR, FULL))
    if types is None:
        types = tuple(FULL if index % 4 == 3 else LINEAR for index in range(num_layers))
        if FULL not in types:
            types = (*types[:-1], FULL)
    return types


def _read_attention(fields: Fields, positions: int) -> AttentionSpec:
    attention = read_olmo_attention(fields)
    parameters = fields.table("rope_parameters")
    if "rope_theta" in parameters and parameters["rope_theta"] is None:
        return attention
    return with_rope(attention, fields, positions)


def _read_net(fields: Fields) -> DeltaNetSpec:
    heads = fields.integer("num_attention_heads")
    key_heads = fields.integer("linear_num_key_heads", heads)
    key_dim = fields.integer(
        "linear_key_head_dim", max(int(0.75 * fields.integer("hidden_size") / key_heads), 1)
    )
    defaults = {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": 2 * key_dim,
    }
    may_be_negative = fields.flag("linear_allow_neg_eigval", True)
    return replace(
        read_delta_net(fields.with_defaults(defaults)),
        most_rate=2.0 if may_be_negative else 1.0,
        norm_eps=NORM_EPS,
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations under this family's names: queries, keys and values have projections
    and convolutions of their own."""
    from shmllm.models.matrices import matrix_of

    for index, layer in enumerate(config.layers):
        if not isinstance(net := layer.mixer, DeltaNetSpec):
            continue
        prefix = f"model.layers.{index}."
        of_net = f"{prefix}linear_attn."
        for old, end in (("in_proj_qkv", "proj"), ("conv1d", "conv1d")):
            rows = matrix_of(weights.pop(f"{of_net}{old}.weight"))
            parts = rows.split_with_sizes(list(net.convolved_parts))
            for part, own in zip(parts, "qkv", strict=True):
                weights[f"{of_net}{own}_{end}.weight"] = (part,)
        for old, own in (
            *(("in_proj_z", "g_proj"), ("in_proj_b", "b_proj"), ("in_proj_a", "a_proj")),
            *(("norm", "o_norm"), ("out_proj", "o_proj")),
        ):
            weights[f"{of_net}{own}.weight"] = weights.pop(f"{of_net}{old}.weight")
        for old, own in _NORMS_IN_FILES.items():
            weights[f"{prefix}{own}.weight"] = weights.pop(f"{prefix}{old}.weight")
    return weights


def other_names(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations of the names of transformers' modules, of those that its files give
    the norms behind attention, and of convolutions as its files have them, in three equal parts."""
    from shmllm.models.matrices import matrix_of

    found: NamedWeights = {}
    for index, layer in enumerate(config.layers):
        prefix = f"model.layers.{index}."
        if not isinstance(net := layer.mixer, DeltaNetSpec):
            norm = weights[f"{prefix}post_attention_layernorm.weight"]
            found[f"{prefix}feedforward_layer_norm.weight"] = norm
            continue
        convolution = f"{prefix}linear_attn.conv1d.weight"
        for name in (convolution, *(f"{prefix}{norm}.weight" for norm in _NORMS_IN_FILES)):
            found[name] = weights[name]
        if len(set(net.convolved_parts)) > 1:
            rows = matrix_of(weights[convolution])
            thirds = _equal_parts(rows, net.convolved_parts, config.shard)
            for part, own in zip(thirds, "qkv", strict=True):
                name = convolution.replace(".conv1d.", f".{own}_conv1d.")
                found[f"{name}{OTHER_LAYOUT}"] = (part,)
    return found


def _equal_parts(rows: Matrix, sizes: tuple[int, ...], shard: Shard) -> Iterator[Destination]:
    """Yields a rank's rows of each third of a convolution.

    Args:
        rows: the rows that the rank has, those of queries, of keys and of values.
        sizes: how many of each.
        shard: the rank.
    """
    from shmllm.models.matrices import Elsewhere, joined

    num_rows = sum(sizes) * shard.size
    size = -(-num_rows // len(sizes))
    for begin in range(0, num_rows, size):
        end, first, found = min(begin + size, num_rows), 0, []
        for part, count in zip(rows.split_with_sizes(list(sizes)), sizes, strict=True):
            own = range(first + shard.rank * count, first + (shard.rank + 1) * count)
            low, high = max(begin, own.start), min(end, own.stop)
            if low < high:
                cuts = [low - own.start, high - low, own.stop - high]
                found.append(part.split_with_sizes(cuts)[1])
            first += count * shard.size
        yield joined(found) if found else Elsewhere(_without_memory(end - begin, rows))


def _without_memory(num_rows: int, like: Matrix) -> Tensor:
    import torch

    return torch.empty((num_rows, *like.shape[1:]), dtype=like.dtype, device="meta")
