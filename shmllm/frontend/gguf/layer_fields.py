"""The fields of config.json of types whose layers have other heads or widths than each other: more
of `family_fields`.

A type is a function and a line in OF_LAYERS, as there.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist

from shmllm.formats.gguf import TensorEntry, shown
from shmllm.formats.gguf_places import FUSED_QKV
from shmllm.frontend.gguf.expert_fields import routed_experts
from shmllm.frontend.gguf.family_fields import WINDOW, Json, layer_types
from shmllm.frontend.gguf.metadata import Metadata

_FULL, _SLIDING = "full_attention", "sliding_attention"


def _of_each(known: Metadata, name: str, count: int) -> list[int]:
    """A positive whole number for each layer."""
    value = known.find(name)
    if not isinstance(value, list):
        return [known.whole(name)] * count
    numbers = value[:count]
    if len(numbers) < count or any(type(each) is not int or each < 1 for each in numbers):
        raise known.header.error(f"{name} must have a number for each layer, found {shown(value)}")
    return numbers


def _number_of(known: Metadata, name: str) -> int:
    """A whole number; 0 if the file does not say it."""
    return 0 if known.find(name) in (None, 0) else known.whole(name)


def _matrix(known: Metadata, module: str) -> TensorEntry:
    """The entry of a matrix that the file must have."""
    name = f"{module}.weight"
    entry = known.header.tensors.get(name)
    if entry is None or len(entry.shape) != 2:
        raise known.header.error(f"no matrix {name}")
    return entry


def _gemma4(known: Metadata, config: Json) -> Json:
    """Layers of two types have heads of two widths, and may have other numbers of key heads."""
    count, tensors = config["num_hidden_layers"], known.header.tensors
    types = layer_types(known, config, period=6)
    widths = {_FULL: config["head_dim"], _SLIDING: _width_in_windows(known, config["head_dim"])}
    heads = [
        {"head_dim": widths[kind], "num_key_value_heads": number}
        for kind, number in zip(
            types, _of_each(known, "attention.head_count_kv", count), strict=True
        )
    ]
    num_shared = _number_of(known, "attention.shared_kv_layers")
    if num_shared >= count:
        raise known.header.error(
            f"attention.shared_kv_layers must be below {count}, found {num_shared:,}"
        )
    own_full = [layer for layer in range(count - num_shared) if types[layer] == _FULL]
    table = tensors.get("per_layer_token_embd.weight")
    return (
        heads[0]
        | _gemma4_feed_forward(known, config, num_shared)
        | {
            "per_layer_config": {
                str(layer): each for layer, each in enumerate(heads) if each != heads[0]
            },
            "attention_k_eq_v": not any(
                f"blk.{layer}.{module}.weight" in tensors
                for layer in own_full
                for module in ("attn_v", FUSED_QKV)
            ),
            "num_kv_shared_layers": num_shared,
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": known.whole(WINDOW),
            "layer_types": types,
            "rope_parameters": _gemma4_rope(known, config),
            "rope_scaling": None,
            "hidden_size_per_layer_input": _number_of(known, "embedding_length_per_layer_input"),
            "vocab_size_per_layer_input": config["vocab_size"] if table is None else table.shape[0],
            "final_logit_softcapping": known.find("final_logit_softcapping"),
        }
    )


def _width_in_windows(known: Metadata, default: int) -> int:
    """The width of the heads of layers with a window."""
    width = known.whole("attention.key_length_swa", default)
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if known.whole(name, width) != width:
            raise known.header.error(
                f"{name} {known.whole(name)} beside keys of {width} is not supported"
            )
    return width


def _gemma4_rope(known: Metadata, config: Json) -> Json:
    """Layers without a window rotate a part of each head."""
    whole = {"rope_type": "proportional", "partial_rotary_factor": 1.0}
    scaling = config.get("rope_scaling", whole)
    if scaling["rope_type"] != "proportional":
        raise known.header.error(f"rope scaling {scaling['rope_type']} is not supported")
    base = known.number("rope.freq_base_swa", 10000.0)
    return {
        _FULL: scaling | {"rope_theta": config["rope_theta"]},
        _SLIDING: {"rope_type": "default", "rope_theta": base},
    }


def _gemma4_feed_forward(known: Metadata, config: Json, num_shared: int) -> Json:
    """The MLPs of the last layers may have twice the width."""
    count = config["num_hidden_layers"]
    widths = _of_each(known, "feed_forward_length", count)
    is_wide = num_shared > 0 and widths[-1] == 2 * widths[0]
    last = widths[0] * (2 if is_wide else 1)
    if widths != [widths[0]] * (count - num_shared) + [last] * num_shared:
        raise known.header.error(f"feed_forward_length {shown(widths)} is not supported")
    fields: Json = {"intermediate_size": widths[0], "use_double_wide_mlp": is_wide}
    if not known.find("expert_count"):
        return fields
    return fields | {
        "enable_moe_block": True,
        "num_experts": known.whole("expert_count"),
        "top_k_experts": known.whole("expert_used_count"),
        "moe_intermediate_size": known.whole("expert_feed_forward_length"),
    }


def _gemma3n(known: Metadata, config: Json) -> Json:
    """The first layers have sparse MLPs. Files do not say the rank of the branch beside attention,
    and the first ones not from which layer on keys and values are shared."""
    count = config["num_hidden_layers"]
    num_shared = _number_of(known, "attention.shared_kv_layers")
    if known.find("attention.shared_kv_layers") is None:
        num_shared = max(count - _GEMMA3N_OWN_KEYS, 0)
    table, branch = (_matrix(known, name) for name in ("per_layer_token_embd", "blk.0.laurel_l"))
    fields: Json = {
        "intermediate_size": _of_each(known, "feed_forward_length", count),
        "num_kv_shared_layers": num_shared,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": known.whole(WINDOW),
        "layer_types": layer_types(known, config, period=5),
        "rope_local_base_freq": known.number("rope.freq_base_swa", 10000.0),
        "hidden_size_per_layer_input": known.whole("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": table.shape[0],
        "laurel_rank": branch.shape[0],
        "altup_num_inputs": known.whole("altup.num_inputs", 4),
        "altup_active_idx": _number_of(known, "altup.active_idx"),
        "final_logit_softcapping": known.number("final_logit_softcapping", 30.0),
    }
    return fields | _gemma3n_sparsity(known, count)


_GEMMA3N_OWN_KEYS = 20
"""How many of the first layers have keys and values of their own."""


def _gemma3n_sparsity(known: Metadata, count: int) -> Json:
    """Files say by how many deviations gates have to exceed the mean: -inf where they need not."""
    name = "activation_sparsity_scale"
    scales = known.find(name)
    if scales is None:
        return {}
    if not isinstance(scales, list) or len(scales) < count:
        raise known.header.error(f"{name} must have a number for each layer, found {shown(scales)}")
    normal = NormalDist()
    return {"activation_sparsity_pattern": [normal.cdf(each) for each in scales[:count]]}


def _mimo2(known: Metadata, config: Json) -> Json:
    """Layers with a window have another number of key heads, another base of their rotation, and
    sinks. llama.cpp divides the weights of experts by their sum, whatever a file says."""
    count, tensors = config["num_hidden_layers"], known.header.tensors
    types = layer_types(known, config, period=6)
    every = _of_each(known, "attention.head_count_kv", count)
    heads = {kind: _common(known, types, every, kind) for kind in (_FULL, _SLIDING)}
    rotation = {
        "partial_rotary_factor": config["partial_rotary_factor"],
        **(config.get("rope_scaling") or {"rope_type": "default"}),
    }
    bases = {_FULL: config["rope_theta"], _SLIDING: known.number("rope.freq_base_swa", 10000.0)}
    sinks = {
        kind for layer, kind in enumerate(types) if f"blk.{layer}.attn_sinks.weight" in tensors
    }
    return routed_experts(known) | {
        "rope_scaling": None,
        "rope_parameters": {kind: rotation | {"rope_theta": bases[kind]} for kind in bases},
        "num_key_value_heads": heads[_FULL],
        "swa_num_key_value_heads": heads[_SLIDING],
        "v_head_dim": known.whole("attention.value_length", config["head_dim"]),
        "layer_types": types,
        "mlp_layer_types": [
            "sparse" if f"blk.{layer}.ffn_gate_inp.weight" in tensors else "dense"
            for layer in range(count)
        ],
        "sliding_window": known.whole(WINDOW),
        "n_shared_experts": None,
        "n_group": known.whole("expert_group_count", 1),
        "topk_group": known.whole("expert_group_used_count", 1),
        "norm_topk_prob": True,
        "attention_value_scale": known.find("attention.value_scale"),
        "add_full_attention_sink_bias": _FULL in sinks,
        "add_swa_attention_sink_bias": _SLIDING in sinks,
    }


def _common(known: Metadata, types: list[str], numbers: list[int], kind: str) -> int:
    """The number of all layers of a type; the first one if there is no such layer."""
    found = {number for number, each in zip(numbers, types, strict=True) if each == kind}
    if len(found) > 1:
        raise known.header.error(f"layers of type {kind} have other numbers of key heads")
    return next(iter(found), numbers[0])


OF_LAYERS: dict[str, Callable[[Metadata, Json], Json]] = {
    "gemma3n_text": _gemma3n,
    "gemma4_text": _gemma4,
    "mimo_v2_flash": _mimo2,
}
"""By the model's type."""
