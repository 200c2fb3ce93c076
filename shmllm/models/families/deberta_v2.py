"""DeBERTa v2 and v3: BERT whose attention adds products of queries and keys with embeddings of
their distance, and has no table of positions as a rule (He et al., 2021 and 2023)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.bias_specs import MOST_BIASED_POSITIONS, RelationBiases
from shmllm.models.config import ModelConfig
from shmllm.models.families.bert import NAMES, read_encoder, read_head, tanh_dense
from shmllm.models.fields import Fields
from shmllm.models.head_specs import DenseSpec
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.readers import read_activation
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_DEFAULTS: dict[str, Any] = {
    "hidden_size": 1536,
    "num_attention_heads": 24,
    "num_hidden_layers": 24,
    "intermediate_size": 6144,
    "layer_norm_eps": 1e-7,
    "vocab_size": 128_100,
}

_TYPES = {"c2p", "p2c"}

_NAMES = NAMES | {
    f".self_attn.{each}_proj.": f".attention.self.{name}_proj."
    for each, name in (("q", "query"), ("k", "key"), ("v", "value"))
}
_NAMES[".self_attn.pos_"] = ".attention.self.pos_"


def configure(fields: Fields) -> ModelConfig:
    return read_related(fields.with_absent(_DEFAULTS))


def read_related(fields: Fields) -> ModelConfig:
    """Returns the configuration of either generation, whose own defaults the fields have."""
    fields.integer("max_position_embeddings", 512, maximum=MOST_BIASED_POSITIONS)
    _refuse_others(fields)
    model = read_encoder(fields)
    (attention,) = set(model.attentions)
    attention = _related(fields, attention, model.max_position_embeddings)
    has_table = fields.flag("position_biased_input", True)
    head = read_head(fields, _pooler(fields))
    skipped = ["cls.", "lm_predictions.", "mask_predictions."]
    skipped += [] if has_table else ["embeddings.position_embeddings."]
    skipped += ["pooler."] if head is None else []
    if attention.biases is None:
        skipped += ["encoder.rel_embeddings.", "encoder.LayerNorm."]
    return replace(
        model.with_mixers(lambda _: attention),
        head=head,
        num_learned_positions=model.num_learned_positions if has_table else 0,
        num_token_types=fields.integer("type_vocab_size", 0, minimum=0),
        skipped_prefixes=tuple(skipped),
    )


def _refuse_others(fields: Fields) -> None:
    """Refuses what xlarge models and some others have."""
    width = fields.integer("hidden_size")
    own = fields.integer("embedding_size", width)
    if own != width:
        raise fields.error(f"embedding_size {own} is not supported; supported: {width}")
    heads = fields.integer("num_attention_heads")
    if width % heads:
        raise fields.error(f"num_attention_heads {heads} does not divide hidden_size {width}")
    size = fields.integer("attention_head_size", width // heads)
    if size != width // heads:
        supported = width // heads
        raise fields.error(f"attention_head_size {size} is not supported; supported: {supported}")
    if kernel := fields.integer("conv_kernel_size", 0, minimum=0):
        raise fields.error(f"conv_kernel_size {kernel} is not supported: deberta-v2-xlarge")


def _pooler(fields: Fields) -> DenseSpec:
    """Returns what a classifier of texts has first."""
    width = fields.integer("hidden_size")
    own = fields.integer("pooler_hidden_size", width)
    if own != width:
        raise fields.error(f"pooler_hidden_size {own} is not supported; supported: {width}")
    activation: Any = fields.text("pooler_hidden_act", "gelu")
    if activation != "tanh":
        activation = read_activation(fields, "pooler_hidden_act", "gelu")
    if activation == "relu_squared":
        raise fields.error("pooler_hidden_act 'relu2' is not supported")
    return replace(tanh_dense(fields, "pooler.dense"), activation=activation)


def _related(fields: Fields, attention: AttentionSpec, positions: int) -> AttentionSpec:
    """Returns the attention with what it adds to scores."""
    types = _types(fields)
    scale = (attention.head_dim * (1 + len(types))) ** -0.5
    if not fields.flag("relative_attention", False) or not types:
        return replace(attention, scale=scale)
    furthest = fields.integer("max_relative_positions", -1, minimum=-1)
    furthest = furthest if furthest > 0 else positions
    buckets = fields.integer("position_buckets", -1, minimum=-1)
    span = buckets if buckets > 0 else furthest
    if span < 2 or (buckets > 0 and furthest - 1 <= buckets // 2):
        raise fields.error(
            f"position_buckets {buckets} with max_relative_positions {furthest} is not supported"
        )
    norms = {each.strip() for each in fields.text("norm_rel_ebd", "none").lower().split("|")}
    if unknown := norms - {"layer_norm", "none"}:
        raise fields.error(f"norm_rel_ebd {unknown.pop()!r} is not supported")
    biases = RelationBiases(
        num_positions=positions,
        span=span,
        furthest=furthest if buckets > 0 else None,
        of_queries="c2p" in types,
        of_keys="p2c" in types,
        shared=fields.flag("share_att_key", False),
        normed="layer_norm" in norms,
    )
    return replace(attention, scale=scale, biases=biases)


def _types(fields: Fields) -> set[str]:
    """Returns the products with embeddings of distances: "c2p", of queries, "p2c", of keys."""
    given = fields.values.get("pos_att_type")
    given = given.lower().split("|") if isinstance(given, str) else given or []
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise fields.error(f"'pos_att_type' must be a list of texts, not {given!r}")
    types = {each.strip() for each in given} - {""}
    if unknown := types - _TYPES:
        raise fields.error(
            f"pos_att_type {min(unknown)!r} is not supported; supported: {sorted(_TYPES)}"
        )
    return types


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.fused_names import with_shared

    own = {renamed(name, _NAMES): views for name, views in weights.items()}
    own = with_shared(own, ".self_attn.rel_embeddings.", "encoder.rel_embeddings.weight")
    for kind in ("weight", "bias"):
        own = with_shared(own, f".self_attn.rel_norm.{kind}", f"encoder.LayerNorm.{kind}")
    return own
