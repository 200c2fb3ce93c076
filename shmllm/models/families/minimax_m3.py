"""MiniMax M3: an attention in which each key-value head reads the blocks of keys that an indexer
has chosen for it; experts chosen by sigmoids behind dense layers, with gpt-oss's product of gates
and ups; norms of ``(1 + weight)``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import check_choice
from shmllm.models.families.mimo_v2_flash import read_pattern
from shmllm.models.fields import Fields
from shmllm.models.indexer_specs import BlockIndexerSpec
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.readers import (
    DENSE,
    FULL,
    SPARSE,
    read_attention,
    read_experts,
    read_layer_types,
    read_model,
    read_num_layers,
    read_positions,
)
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MLPSpec, MoESpec
from shmllm.models.vision.fields import (
    MOST_LAYERS,
    read_item_token,
    read_num_heads,
    read_theta,
    read_vision_activation,
    vision_fields,
)
from shmllm.models.vision.minimax_m3_specs import MiniMaxM3Tower
from shmllm.models.vision.specs import VisionSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_CHOSEN = "minimax_m3_sparse"
_ONLY: dict[str, str | float | None] = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "use_gemma_norm": True,
    "attention_output_gate": False,
    "n_shared_experts": 1,
    "swiglu_alpha": 1.702,
    "swiglu_beta": 1.0,
}
"""What fields have to say if they are there; transformers reads one of them."""
_OF_INDEXER = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
"""What fields of ``sparse_attention_config`` are called by transformers."""
_ONLY_OF_INDEXER: dict[str, str | float | None] = {
    "use_sparse_attention": True,
    "sparse_score_type": "max",
    "sparse_init_block": 0,
}
_IN_FILES = {
    ".mlp.gate.e_score": ".block_sparse_moe.e_score",
    ".mlp.gate.": ".block_sparse_moe.gate.",
    ".mlp.experts.": ".block_sparse_moe.experts.",
    ".mlp.shared_experts.": ".block_sparse_moe.shared_experts.",
    ".self_attn.indexer.": ".self_attn.index_",
}
_OF_EXPERTS = {".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}


def configure(fields: Fields) -> ModelConfig:
    sparse = _read_sparse(fields)
    new = {name: sparse.values[old] for old, name in _OF_INDEXER.items() if old in sparse.values}
    fields = fields.with_values(fields.values | new)
    for name, supported in _ONLY.items():
        check_choice(fields, name, supported)
    if (activation := fields.text("hidden_act", "silu")) not in ("silu", "swigluoai"):
        raise fields.error(f"hidden_act {activation!r} is not supported; supported: 'swigluoai'")
    positions, num_layers = read_positions(fields, 524_288), read_num_layers(fields)
    attention = read_attention(fields, num_kv_heads=4, head_dim=128)
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, theta=5e6, partial=1.0)
    attention = replace(attention, rope=rope, qk_norm="head")
    older = sparse, "sparse_attention_freq"
    kinds = _read_types(fields, "layer_types", (FULL, _CHOSEN), older, num_layers)
    kinds = kinds or (FULL,) * num_layers
    without_values = read_pattern(sparse, "sparse_disable_index_value", num_layers)
    if without_values not in (None, [kind == _CHOSEN for kind in kinds]):
        raise sparse.error("'sparse_disable_index_value' 0 is not supported in layers that choose")
    mixers = {FULL: attention}
    if _CHOSEN in kinds:
        mixers[_CHOSEN] = replace(attention, indexer=_read_indexer(fields, attention))
    bound = fields.number("swiglu_limit", 7.0)
    dense = _mlp(fields.integer("dense_intermediate_size", 12_288), bound)
    mlps: dict[str, MLPSpec | MoESpec] = {DENSE: dense, SPARSE: _read_experts(fields, bound)}
    older = fields, "moe_layer_freq"
    types = _read_types(fields, "mlp_layer_types", (DENSE, SPARSE), older, num_layers)
    every = zip(kinds, types or (SPARSE,) * num_layers, strict=True)
    layers = [LayerSpec(mixer=mixers[kind], mlp=mlps[mlp]) for kind, mlp in every]
    model = read_model(fields, layers, positions)
    vision = read_vision(fields, model)
    return replace(model, norm=replace(model.norm, offset=1.0), vision=vision)


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``. Videos, whose
    frames attend to one another, are not taken."""
    vision, whole = vision_fields(fields, "minimax_m3_vl_vision"), fields.whole
    if vision is None:
        return None
    hidden_size = vision.integer("hidden_size", 1280)
    num_heads = read_num_heads(vision, "num_attention_heads", 16, hidden_size)
    if (head_dim := hidden_size // num_heads) < 6:
        raise vision.error(f"heads of {head_dim} elements cannot be rotated by three axes")
    merge_size = vision.integer("spatial_merge_size", 2)
    return VisionSpec(
        image_token=read_item_token(
            fields, ("image_token_index", "image_token_id"), 200_025, config.vocab_size
        ),
        tower=MiniMaxM3Tower(
            hidden_size=hidden_size,
            num_layers=vision.integer("num_hidden_layers", 32, maximum=MOST_LAYERS),
            num_heads=num_heads,
            inner=vision.integer("intermediate_size", 5120),
            patch_size=vision.integer("patch_size", 14),
            merge_size=merge_size,
            activation=read_vision_activation(vision, "hidden_act", "gelu"),
            num_frames=vision.integer("temporal_patch_size", 2),
            theta=read_theta(vision),
            eps=vision.number("layer_norm_eps", 1e-5),
            projected=whole.integer("projector_hidden_size", 6144),
        ),
        merge_size=merge_size,
    )


def _read_sparse(fields: Fields) -> Fields:
    """Returns ``sparse_attention_config``, what published files say of an indexer."""
    sparse = Fields(
        fields.table("sparse_attention_config"), f"{fields.where}: sparse_attention_config"
    )
    for name, supported in _ONLY_OF_INDEXER.items():
        check_choice(sparse, name, supported)
    return sparse


def _read_types(
    fields: Fields, name: str, kinds: tuple[str, str], older: tuple[Fields, str], num_layers: int
) -> tuple[str, ...] | None:
    """Returns the field `name`, one of two kinds for each layer; None: it is absent.

    Args:
        fields: the fields of config.json.
        name: the field.
        kinds: the kinds.
        older: where published files have 0 and 1 in their place.
        num_layers: the number of layers.
    """
    types = read_layer_types(fields, num_layers, kinds, name)
    pattern = read_pattern(*older, num_layers)
    if types is None and pattern is not None:
        return tuple(kinds[each] for each in pattern)
    return types


def _read_indexer(fields: Fields, attention: AttentionSpec) -> BlockIndexerSpec:
    heads = fields.integer("index_n_heads", 4)
    if heads != attention.num_kv_heads:
        raise fields.error(
            f"index_n_heads ({heads}) must be num_key_value_heads ({attention.num_kv_heads})"
        )
    head_dim, rope = fields.integer("index_head_dim", 128), attention.rope
    if head_dim % 2:
        raise fields.error(f"index_head_dim must be even for rotary embedding, not {head_dim}")
    if rope is not None and head_dim < rope.rotary_dim:
        raise fields.error(
            f"index_head_dim ({head_dim}) is less than the {rope.rotary_dim} elements that rotate"
        )
    top_k = fields.integer("index_topk_blocks", 16)
    num_local = fields.integer("index_local_blocks", 1)
    if num_local > top_k:
        raise fields.error(
            f"index_local_blocks ({num_local}) is more than index_topk_blocks ({top_k})"
        )
    size = fields.integer("index_block_size", 128)
    return BlockIndexerSpec(head_dim=head_dim, size=size, top_k=top_k, num_local=num_local)


def _mlp(inner: int, bound: float) -> MLPSpec:
    return MLPSpec(inner=inner, activation="silu_shifted", bound=bound)


def _read_experts(fields: Fields, bound: float) -> MoESpec:
    inner = fields.integer("intermediate_size", 3072)
    plain = fields.with_values(fields.values | {"hidden_act": "silu"})
    return replace(
        read_experts(plain, inner, num_experts=128, top_k=4),
        activation="silu_shifted",
        bound=bound,
        scoring="sigmoid",
        renormalize=True,
        weight_scale=fields.number("routed_scaling_factor", 2.0),
        correction_bias=True,
        router_float32=True,
        shared=_mlp(fields.integer("shared_intermediate_size", 3072), bound),
        shared_name="shared_experts",
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {_name_in_files(name): views for name, views in weights.items()}


def other_names(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations of what transformers' modules name otherwise."""
    from shmllm.models.fused_names import GATE_UP, with_fused

    others = {name: views for name, views in weights.items() if ".mlp.experts." not in name}
    return {
        name: views
        for name, views in with_fused(others, GATE_UP).items()
        if ".mlp." in name or _name_in_files(name) != name
    }


def _name_in_files(name: str) -> str:
    own = renamed(name, _IN_FILES)
    return renamed(own, _OF_EXPERTS) if ".experts." in own else own
