"""Reads the fields of config.json that families share.

Each function checks its fields; a family puts the results together and changes what differs. This
module must not import torch: front ends import it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.config_file import architecture_name
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import Activation, MLPSpec, MoESpec, NormSpec
from shmllm_kernels.windows import Window

MOST_LAYERS = 4096
"""Thirty times those of the largest models; each layer of a damaged file would take time."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""Types of layers, as in the field ``layer_types``."""

DENSE, SPARSE = "dense", "sparse"
"""Types of feed-forwards, as in the field ``mlp_layer_types``."""

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu_squared",
}


def read_attention(
    fields: Fields,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    bias: bool = False,
    output_bias: bool = False,
) -> AttentionSpec:
    """Returns an attention over all positions, without rotation.

    Args:
        fields: the fields of config.json.
        num_kv_heads: the default of ``num_key_value_heads``; None: ``num_attention_heads``.
        head_dim: the default of ``head_dim``; None: hidden_size / num_attention_heads.
        bias: see `AttentionSpec`.
        output_bias: see `AttentionSpec`.
    """
    num_heads = fields.integer("num_attention_heads")
    width = _head_dim(fields, num_heads, head_dim)
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, num_heads, num_kv_heads),
        head_dim=width,
        scale=width**-0.5,
        bias=bias,
        output_bias=output_bias,
    )


def with_rope(attention: AttentionSpec, fields: Fields, max_positions: int) -> AttentionSpec:
    """Returns the attention with the rotation that is the same in all layers, of whole heads. Other
    families call `RopeConfig.from_fields` themselves."""
    rope = RopeConfig.from_fields(fields, max_positions, attention.head_dim)
    return replace(attention, rope=rope)


def read_rope_of_windows(
    fields: Fields, positions: int, head_dim: int, *, theta: float
) -> RopeConfig:
    """Returns the rotation of layers with a window: the one that ``rope_parameters`` has for them.
    The fields ``rope_scaling`` and ``rope_theta`` are those of full layers.

    Args:
        fields: the fields of config.json.
        positions: the largest number of positions.
        head_dim: the width of a head.
        theta: the default of the base of the wavelengths.
    """
    parameters = Fields(fields.table("rope_parameters"), f"{fields.where}: rope_parameters")
    own = {"rope_parameters": {SLIDING: parameters.table(SLIDING)}, "rope_theta": theta}
    return RopeConfig.from_fields(
        Fields(own, fields.where), positions, head_dim, layer_type=SLIDING
    )


def read_rope_of_type(
    fields: Fields,
    positions: int,
    head_dim: int,
    layer_type: str,
    defaults: Mapping[str, Mapping[str, Any]],
    *,
    partial: float | None = None,
) -> RopeConfig:
    """Returns the rotation that ``rope_parameters`` has for layers of a type.

    Args:
        fields: the fields of config.json.
        positions: the largest number of positions.
        head_dim: the width of a head.
        layer_type: the type.
        defaults: the parameters of each type where the field is absent.
        partial: see `RopeConfig.from_fields`.
    """
    parameters = fields.table("rope_parameters") or dict(defaults)
    if not isinstance(parameters.get(layer_type), dict):
        raise fields.error(f"'rope_parameters' must have an object {layer_type!r}")
    own = Fields({"rope_parameters": parameters}, fields.where)
    return RopeConfig.from_fields(own, positions, head_dim, layer_type=layer_type, partial=partial)


def read_activation(fields: Fields, name: str = "hidden_act", default: str = "silu") -> Activation:
    """Returns the activation that the field `name` asks for."""
    found = fields.text(name, default)
    if found not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise fields.error(f"{name} {found!r} is not supported; supported: {known}")
    return _ACTIVATIONS[found]


def read_mlp(fields: Fields, *, bias: bool = False) -> MLPSpec:
    """Returns a gated MLP with the activation ``hidden_act``."""
    inner, activation = fields.integer("intermediate_size"), read_activation(fields)
    return MLPSpec(inner=inner, activation=activation, bias=bias)


def read_ungated_mlp(fields: Fields, *, activation: str, bias: bool) -> MLPSpec:
    """Returns an MLP without a gate, whose ``hidden_act`` is by default `activation`."""
    return MLPSpec(
        inner=fields.integer("intermediate_size"),
        activation=read_activation(fields, default=activation),
        gated=False,
        bias=bias,
    )


def read_experts(fields: Fields, inner: int, *, num_experts: int, top_k: int) -> MoESpec:
    """Returns experts without biases; those of a token are the first of the softmax of all.

    Args:
        fields: the fields of config.json.
        inner: the width of an expert's activation's output.
        num_experts: the default of ``num_experts``, or ``num_local_experts``.
        top_k: the default of ``num_experts_per_tok``.
    """
    activation = read_activation(fields)
    if activation != "silu":
        raise fields.error(f"experts with hidden_act {activation!r} are not supported, only silu")
    name = "num_experts" if "num_experts" in fields.values else "num_local_experts"
    num_experts = fields.integer(name, num_experts)
    top_k = fields.integer("num_experts_per_tok", top_k)
    if top_k > num_experts:
        raise fields.error(f"num_experts_per_tok ({top_k}) is more than {name} ({num_experts})")
    return MoESpec(num_experts=num_experts, top_k=top_k, inner=inner)


def read_norm(fields: Fields, name: str = "rms_norm_eps", default: float = 1e-6) -> NormSpec:
    """Returns an RMSNorm whose eps is the field `name`."""
    return NormSpec(eps=fields.number(name, default))


def read_positions(fields: Fields, default: int) -> int:
    """Returns ``max_position_embeddings``."""
    return fields.integer("max_position_embeddings", default)


def read_num_layers(fields: Fields) -> int:
    """Returns ``num_hidden_layers``."""
    return fields.integer("num_hidden_layers", maximum=MOST_LAYERS)


def read_model(
    fields: Fields, layers: Iterable[LayerSpec], max_positions: int, *, tied: bool = False
) -> ModelConfig:
    """Returns the configuration of a model with RMSNorms and plain embeddings and logits; families
    change others with `dataclasses.replace`.

    Args:
        fields: the fields of config.json.
        layers: its layers.
        max_positions: the result of `read_positions`.
        tied: the default of ``tie_word_embeddings``.
    """
    layers = tuple(layers)
    return ModelConfig(
        architecture=architecture_name(fields),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        max_position_embeddings=max(max_positions, _stretched_positions(layers)),
        layers=layers,
        norm=read_norm(fields),
        tie_word_embeddings=fields.flag("tie_word_embeddings", tied),
    )


def _stretched_positions(layers: Iterable[LayerSpec]) -> int:
    """Returns to how many positions yarn stretches the rotations of layers, as in vLLM; 0: to none.

    A user extends a model by ``rope_scaling`` alone, beside the ``max_position_embeddings`` of its
    training.
    """
    ropes = (getattr(layer.mixer, "rope", None) for layer in layers)
    found = [rope for rope in ropes if isinstance(rope, RopeConfig) and rope.type == "yarn"]
    return min((int(each.original_max_positions * each.factor) for each in found), default=0)


def read_window(fields: Fields, default: int | None) -> int | None:
    """Returns ``sliding_window``, which null switches off.

    Args:
        fields: the fields of config.json.
        default: its meaning where it is absent.
    """
    if "sliding_window" not in fields.values:
        return default
    return fields.optional_integer("sliding_window")


def read_layer_types(
    fields: Fields,
    num_layers: int,
    known: tuple[str, ...] = (FULL, SLIDING),
    name: str = "layer_types",
) -> tuple[str, ...] | None:
    """Returns the field `name`, a known type for each layer; None if the field is absent."""
    types: Any = fields.values.get(name)
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.error(f"{name!r} must list one type for each of {num_layers} layers")
    unknown = [each for each in types if each not in known]
    if unknown:
        raise fields.error(
            f"layer type {unknown[0]!r} is not supported; supported: {', '.join(known)}"
        )
    return tuple(types)


def read_mlp_types(fields: Fields, num_layers: int) -> tuple[str, ...] | None:
    """Returns ``mlp_layer_types``: DENSE, or SPARSE for experts; None if the field is absent."""
    return read_layer_types(fields, num_layers, (DENSE, SPARSE), "mlp_layer_types")


def read_own_fields(fields: Fields, index: int, known: Set[str]) -> Fields:
    """Returns what ``per_layer_config`` has for a layer, which are known fields. Its names are
    numbers of layers, with zeros in front of them where others have more digits."""
    every = Fields(fields.table("per_layer_config"), f"{fields.where}: per_layer_config")
    names = [name for name in every.values if name.isdecimal() and int(name) == index]
    strange = [name for name in every.values if not name.isdecimal()]
    if strange or len(names) > 1:
        raise every.error(f"{(strange or names)[-1]!r} is not the number of one layer")
    own = Fields(every.table(names[0]) if names else {}, f"{every.where}: {index}")
    if unknown := own.values.keys() - known:
        raise own.error(f"{min(unknown)!r} is not supported")
    return own


def windows_by_type(
    fields: Fields, types: Iterable[str], window: int | None
) -> tuple[int | None, ...]:
    """Returns the window of each layer: that of SLIDING layers, none for FULL ones."""
    types = tuple(types)
    if SLIDING in types and window is None:
        raise fields.error(f"'layer_types' has {SLIDING} but no sliding window is enabled")
    return tuple(window if name == SLIDING else None for name in types)


def with_windows(layer: LayerSpec, windows: Iterable[Window | None]) -> tuple[LayerSpec, ...]:
    """Returns layers that differ in the windows of their attention alone."""
    attention = layer.mixer
    assert isinstance(attention, AttentionSpec)
    return tuple(replace(layer, mixer=replace(attention, window=window)) for window in windows)


def _num_kv_heads(fields: Fields, num_heads: int, default: int | None) -> int:
    if "num_key_value_heads" in fields.values:
        default = num_heads  # the meaning of null
    num_kv_heads = fields.integer("num_key_value_heads", default or num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            f"num_attention_heads ({num_heads}) must be a multiple of "
            f"num_key_value_heads ({num_kv_heads})"
        )
    return num_kv_heads


def _head_dim(fields: Fields, num_heads: int, default: int | None) -> int:
    head_dim = fields.optional_integer("head_dim") or default
    if head_dim is None:
        hidden_size = fields.integer("hidden_size")
        if hidden_size % num_heads:
            raise fields.error(
                f"without 'head_dim', hidden_size ({hidden_size}) must be a multiple of "
                f"num_attention_heads ({num_heads})"
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise fields.error(f"head_dim must be even for rotary embedding, not {head_dim}")
    return head_dim
