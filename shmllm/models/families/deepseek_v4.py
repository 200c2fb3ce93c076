"""DeepSeek V4: attention to a window and to entries that stand for several tokens, residual streams
that are mixed, and experts that scores or, in the first layers, a token's id choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.compressed_specs import CompressedAttentionSpec, CompressionSpec
from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import check_choice, read_routed_experts
from shmllm.models.fields import Fields
from shmllm.models.indexer_specs import IndexerSpec
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    SLIDING,
    read_layer_types,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
    read_rope_of_type,
)
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MoESpec, Scoring
from shmllm.models.stream_specs import ConnectionSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

MOST_STREAMS = 8
_MOST_ITERATIONS = 1000
_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_RATES = {_SPARSE: ("compress_rate_csa", 4), _HEAVY: ("compress_rate_hca", 128)}
"""The field of older files and the default of each type of layers that has entries."""
_OF_RATIOS = {0: SLIDING, 4: _SPARSE, 128: _HEAVY}
_HASH, _TOP = "hash_moe", "moe"
_MAIN, _COMPRESS = "main", "compress"
_SAME = {"intermediate_size": "moe_intermediate_size", "num_local_experts": "n_routed_experts"}
"""Other names of fields, which count if there are both."""
_SCORES: dict[str, Scoring] = {"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid"}

_NAMES = {
    ".self_attn.compressor.indexer.scorer.weights_proj.": ".attn.indexer.weights_proj.",
    ".self_attn.compressor.indexer.q_b_proj.": ".attn.indexer.wq_b.",
    ".self_attn.compressor.indexer.": ".attn.indexer.compressor.",
    ".self_attn.": ".attn.",
    ".compressor.kv_norm.": ".compressor.norm.",
    ".compressor.kv_proj.": ".compressor.wkv.",
    ".compressor.gate_proj.": ".compressor.wgate.",
    ".position_bias": ".ape",
    ".attn.kv_proj.": ".attn.wkv.",
    ".q_a_proj.": ".wq_a.",
    ".q_b_proj.": ".wq_b.",
    ".q_a_norm.": ".q_norm.",
    ".o_a_proj.": ".wo_a.",
    ".o_b_proj.": ".wo_b.",
    ".sinks": ".attn_sink",
    ".input_layernorm.": ".attn_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".attn_hc.": ".hc_attn_",
    ".ffn_hc.": ".hc_ffn_",
    ".mlp.": ".ffn.",
    ".gate.e_score_correction_bias": ".gate.bias",
    ".gate_proj.": ".w1.",
    ".down_proj.": ".w2.",
    ".up_proj.": ".w3.",
    "lm_head.": "head.",
}
"""The parts of names that differ from the default ones, in all files."""
_IN_OWN_FILES = _NAMES | {"model.embed_tokens.": "embed.", "model.hc_head.hc_": "hc_head_"}
"""Those in files of the model's authors."""
_IN_OTHER_FILES = _NAMES | {".attn.kv_norm.": ".attn.norm."}
"""Those in files that transformers writes."""


def configure(fields: Fields) -> ModelConfig:
    fields = fields.null_as_false("norm_topk_prob")
    same = {own: fields.values[other] for other, own in _SAME.items() if other in fields.values}
    fields = fields.with_values(fields.values | same)
    _check(fields)
    positions, norm = read_positions(fields, 1_048_576), read_norm(fields)
    num_layers = read_num_layers(fields)
    kinds = _layer_types(fields, num_layers)
    every = _read_attentions(fields, positions, set(kinds))
    mixers = [every[kind] for kind in kinds]
    experts = _read_experts(fields)
    chosen = {
        _TOP: replace(experts, correction_bias=True),
        _HASH: replace(experts, num_tokens=fields.integer("vocab_size")),
    }
    types = _mlp_types(fields, num_layers)
    layers = [
        LayerSpec(mixer=mixer, mlp=chosen[kind]) for mixer, kind in zip(mixers, types, strict=True)
    ]
    connections = ConnectionSpec(
        num_streams=fields.integer("hc_mult", 4, maximum=MOST_STREAMS),
        magnitude=2.0,
        eps=fields.number("hc_eps", 1e-6),
        norm_eps=norm.eps,
        iterations=fields.integer("hc_sinkhorn_iters", 20, maximum=_MOST_ITERATIONS),
    )
    return replace(read_model(fields, layers, positions), norm=norm, connections=connections)


def _check(fields: Fields) -> None:
    """Raises EngineStartError if a field asks for what neither transformers nor this computes."""
    for name, supported in (
        ("num_key_value_heads", 1),
        ("attention_bias", False),
        ("n_shared_experts", 1),
        ("norm_topk_prob", True),
        ("topk_method", "noaux_tc"),
        ("n_group", 1),
        ("topk_group", 1),
    ):
        check_choice(fields, name, supported)


def _layer_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Returns ``layer_types``, or what ``compress_ratios`` of older files says, which may have more
    layers, or the default: two layers with few entries, then both kinds in turns."""
    types = read_layer_types(fields, num_layers, tuple(_OF_RATIOS.values()))
    ratios: Any = fields.values.get("compress_ratios")
    if types is not None:
        return types
    if ratios is None:
        turns = (_SPARSE if index % 2 else _HEAVY for index in range(num_layers - 2))
        return (*(_HEAVY,) * min(num_layers, 2), *turns)
    known = isinstance(ratios, list) and all(type(each) is int for each in ratios)
    if not known or len(ratios) < num_layers or not {*ratios} <= {*_OF_RATIOS}:
        raise fields.error(
            f"'compress_ratios' must list one of {[*_OF_RATIOS]} for each of {num_layers} layers"
        )
    return tuple(_OF_RATIOS[ratio] for ratio in ratios[:num_layers])


def _mlp_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    types = read_layer_types(fields, num_layers, (_HASH, _TOP), "mlp_layer_types")
    num_hash = fields.integer("num_hash_layers", 3, minimum=0)
    return types or tuple(_HASH if index < num_hash else _TOP for index in range(num_layers))


def _read_attentions(
    fields: Fields, positions: int, kinds: set[str]
) -> dict[str, CompressedAttentionSpec]:
    """Returns the attention of each type of layers that the model has."""
    num_heads, head_dim = fields.integer("num_attention_heads", 64), fields.integer("head_dim", 512)
    groups = fields.integer("o_groups", 8)
    if num_heads * head_dim % groups:
        raise fields.error(
            f"o_groups ({groups}) does not divide {num_heads} heads of {head_dim} elements"
        )
    ropes = _read_ropes(fields, positions, head_dim)
    plain = CompressedAttentionSpec(
        num_heads=num_heads,
        head_dim=head_dim,
        query_rank=fields.integer("q_lora_rank", 1024),
        window=min(fields.integer("sliding_window", 128), positions),
        rope=ropes[_MAIN],
        groups=groups,
        group_rank=fields.integer("o_lora_rank", 1024),
        norm_eps=read_norm(fields).eps,
        num_positions=positions,
    )
    found = {SLIDING: plain}
    for kind in sorted(kinds - {SLIDING}):
        rate = _read_rate(fields, kind)
        made = CompressionSpec(rate=rate, overlaps=kind == _SPARSE)
        found[kind] = replace(plain, rope=ropes[_COMPRESS], compression=made)
    if _SPARSE in found:
        rotary_dim, rate = ropes[_COMPRESS].rotary_dim, _read_rate(fields, _SPARSE)
        indexer = _read_indexer(fields, max(positions // rate, 1), rotary_dim)
        found[_SPARSE] = replace(found[_SPARSE], indexer=indexer)
    return found


def _read_rate(fields: Fields, kind: str) -> int:
    """Returns the number of tokens of an entry in layers of a type."""
    older, default = _RATES[kind]
    if fields.values.get(older) is not None:
        return fields.integer(older)
    rates = fields.table("compress_rates")
    return Fields(rates, f"{fields.where}: compress_rates").integer(
        kind, None if rates else default
    )


def _read_indexer(fields: Fields, most: int, rotary_dim: int) -> IndexerSpec:
    """Returns what chooses entries, of which a request has no more than `most`."""
    head_dim = fields.integer("index_head_dim", 128)
    if head_dim < rotary_dim:
        raise fields.error(
            f"index_head_dim ({head_dim}) is less than the {rotary_dim} elements that rotate"
        )
    return IndexerSpec(
        num_heads=fields.integer("index_n_heads", 64),
        head_dim=head_dim,
        top_k=min(fields.integer("index_topk", 512), most),
        interleaved=True,
    )


def _read_ropes(fields: Fields, positions: int, head_dim: int) -> dict[str, RopeConfig]:
    """Returns the rotation of layers without entries, and that of the others."""
    given = fields.table("rope_scaling") or fields.table("rope_parameters")
    if not all(isinstance(given.get(label), dict) for label in (_MAIN, _COMPRESS)):
        given = _both_ropes(fields, given, head_dim)
    own = Fields(
        {"rope_parameters": {each: given[each] for each in (_MAIN, _COMPRESS)}}, fields.where
    )
    ropes = {
        label: read_rope_of_type(own, positions, head_dim, label, {}, partial=1.0)
        for label in (_MAIN, _COMPRESS)
    }
    return {label: replace(rope, interleaved=True) for label, rope in ropes.items()}


def _both_ropes(
    fields: Fields, given: Mapping[str, Any], head_dim: int
) -> dict[str, dict[str, Any]]:
    """Returns the parameters of both rotations of files that have those of one extension alone,
    which is that of layers with entries; yarn then has no factor of cosines and sines."""
    default = fields.integer("qk_rope_head_dim", head_dim // 8) / head_dim
    partial = fields.optional_number("partial_rotary_factor")
    common = {"partial_rotary_factor": default if partial is None else partial}
    theta = {"rope_theta": fields.number("rope_theta", 10_000.0)}
    extended = {name: value for name, value in given.items() if name not in (_MAIN, _COMPRESS)}
    if extended.get("rope_type", extended.get("type")) == "yarn":
        extended = {"attention_factor": 1.0} | extended
    extended |= {"rope_theta": fields.number("compress_rope_theta", 160_000.0)}
    return {_MAIN: {"rope_type": "default"} | theta | common, _COMPRESS: extended | common}


def _read_experts(fields: Fields) -> MoESpec:
    experts = read_routed_experts(
        fields.with_values({k: v for k, v in fields.values.items() if k != "scoring_func"}),
        inner=2048,
        num_experts=256,
        top_k=6,
        num_shared=1,
    )
    assert experts.shared is not None, "there is one"
    bound = fields.number("swiglu_limit", 10.0)
    return replace(
        experts,
        router_float32=False,
        activation="silu_clamped",
        bound=bound,
        scoring=fields.meaning("scoring_func", _SCORES, "sqrtsoftplus"),
        renormalize=True,
        weight_scale=fields.number("routed_scaling_factor", 1.5),
        shared=replace(experts.shared, activation="silu_clamped", bound=bound),
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _IN_OWN_FILES): views for name, views in weights.items()}


def other_names(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations of the names in transformers' modules, and in files that it
    writes."""
    modules = {name: views for name, views in weights.items() if ".mlp.experts." not in name}
    return modules | {renamed(name, _IN_OTHER_FILES): views for name, views in weights.items()}
