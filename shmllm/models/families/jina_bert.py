"""JinaBERT, jina-embeddings-v2: BERT with gated MLPs, whose attention falls with the distance in
place of learned positions (Günther et al., "Jina Embeddings 2", 2023)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.bias_specs import MOST_BIASED_POSITIONS, LinearBiases
from shmllm.models.config import ModelConfig, Pooled
from shmllm.models.config_file import architecture_name
from shmllm.models.families.bert import NAMES, as_encoder
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.readers import read_attention, read_num_layers
from shmllm.models.registry import Purpose, purpose_of
from shmllm.models.specs import Activation, MLPSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

NORMS = LayerNorms(
    after_mixer="attention.output.LayerNorm", after_mlp="mlp.layernorm", of_sums=True
)
_NAMES = {**NAMES, ".mlp.down_proj.": ".mlp.wo."}
_GATE_UP = "gated_layers", ("gate_proj", "up_proj")
_GATES: dict[str, Activation] = {"geglu": "gelu", "reglu": "relu"}
_POOLINGS: dict[str, Pooled] = {"mean": "MEAN", "cls": "CLS"}
_OTHER_CODE = "qk-post-norm"
"""What ``auto_map`` has of jina-embeddings-v2-base-code, with norms of queries and keys."""


def configure(fields: Fields) -> ModelConfig:
    if purpose_of(name := architecture_name(fields)) is not Purpose.EMBED:
        raise fields.error(f"{name} is not supported; supported: JinaBertModel")
    if _OTHER_CODE in str(fields.values.get("auto_map")):
        raise fields.error(f"norms of queries and keys ({_OTHER_CODE}) are not supported")
    kind = fields.text("position_embedding_type", "absolute")
    if kind != "alibi":
        raise fields.error(f"position_embedding_type {kind!r} is not supported; supported: 'alibi'")
    gate = fields.meaning("feed_forward_type", _GATES, "original")
    plain = {"num_key_value_heads": None, "head_dim": None}  # it has no such fields
    fields = fields.with_values(fields.values | plain)
    positions = fields.integer("max_position_embeddings", 512, maximum=MOST_BIASED_POSITIONS)
    attention = read_attention(fields, bias=True, output_bias=True)
    biases = LinearBiases(positions, attention.num_heads)
    mlp = MLPSpec(
        inner=fields.integer("intermediate_size"), activation=gate, bias=True, up_bias=False
    )
    layer = LayerSpec(mixer=replace(attention, ahead=None, biases=biases), mlp=mlp, norms=NORMS)
    return replace(
        as_encoder(fields, [layer] * read_num_layers(fields), positions),
        num_token_types=fields.integer("type_vocab_size", 2),
        pooling=fields.meaning("emb_pooler", _POOLINGS, "mean"),
        skipped_prefixes=("pooler.", "cls."),
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.fused_names import with_fused

    return {renamed(name, _NAMES): views for name, views in with_fused(weights, _GATE_UP).items()}
