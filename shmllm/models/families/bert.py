"""BERT: tokens attend to all of their text, norms behind the additions, learned positions, types of
tokens. A classifier reads the first token through the pooler (Devlin et al., 2019)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.config_file import architecture_name
from shmllm.models.fields import Fields
from shmllm.models.head_specs import DenseSpec, HeadNormSpec, HeadSpec
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.pooled import classifier, read_labels
from shmllm.models.readers import (
    read_activation,
    read_attention,
    read_model,
    read_num_layers,
    read_ungated_mlp,
)
from shmllm.models.registry import Purpose, purpose_of
from shmllm.models.specs import Activation, NormSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

NORMS = LayerNorms(
    after_mixer="attention.output.LayerNorm", after_mlp="output.LayerNorm", of_sums=True
)

NAMES = {
    "model.layers.": "encoder.layer.",
    "model.embed_tokens.": "embeddings.word_embeddings.",
    "model.embed_positions.": "embeddings.position_embeddings.",
    "model.embed_token_types.": "embeddings.token_type_embeddings.",
    "model.embed_norm.": "embeddings.LayerNorm.",
    ".self_attn.q_proj.": ".attention.self.query.",
    ".self_attn.k_proj.": ".attention.self.key.",
    ".self_attn.v_proj.": ".attention.self.value.",
    ".self_attn.o_proj.": ".attention.output.dense.",
    ".mlp.up_proj.": ".intermediate.dense.",
    ".mlp.down_proj.": ".output.dense.",
}


def configure(fields: Fields) -> ModelConfig:
    head = read_head(fields, tanh_dense(fields, "pooler.dense"))
    return replace(
        read_encoder(fields),
        head=head,
        num_token_types=fields.integer("type_vocab_size", 2),
        skipped_prefixes=("pooler.", "cls.") if head is None else ("cls.",),
    )


def read_encoder(fields: Fields) -> ModelConfig:
    """Returns the configuration of BERT's layers and embeddings, without types and a head."""
    kind = fields.values.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise fields.error(f"position_embedding_type {kind!r} is not supported")
    if fields.flag("is_decoder", False):
        raise fields.error("is_decoder True is not supported")
    plain = {"num_key_value_heads": None, "head_dim": None}  # BERT has no such fields
    fields = Fields(fields.values | plain, fields.where)
    attention = replace(read_attention(fields, bias=True, output_bias=True), ahead=None)
    mlp = read_ungated_mlp(fields, activation="gelu", bias=True)
    layer = LayerSpec(mixer=attention, mlp=mlp, norms=NORMS)
    positions = fields.integer("max_position_embeddings", 512)
    model = as_encoder(fields, [layer] * read_num_layers(fields), positions)
    return replace(model, num_learned_positions=positions)


def as_encoder(fields: Fields, layers: Iterable[LayerSpec], positions: int) -> ModelConfig:
    """Returns the configuration of layers whose norms are behind the additions, as the embeddings'
    norm is, without types, a table of positions and a head.

    Args:
        fields: the fields of config.json.
        layers: the layers.
        positions: the largest number of positions.
    """
    return replace(
        read_model(fields, layers, positions, tied=True),
        norm=NormSpec(kind="layer", eps=fields.number("layer_norm_eps", 1e-12), bias=True),
        embedding_norm=True,
        final_norm=False,
        lm_head=False,
        pooling="CLS",
        eos_token_ids=(),
    )


def tanh_dense(fields: Fields, name: str) -> DenseSpec:
    """Returns a projection of a hidden state, with the hyperbolic tangent behind it."""
    width = fields.integer("hidden_size")
    return DenseSpec(name=name, inputs=width, outputs=width, bias=True, activation="tanh")


def read_head(fields: Fields, pooled: DenseSpec, name: str = "classifier") -> HeadSpec | None:
    """Returns the classifier that the architecture has, if it has one.

    Args:
        fields: the fields of config.json.
        pooled: the projection that a classifier of texts has first; that of tokens has none.
        name: the name of the last projection of a classifier of texts.
    """
    match purpose_of(architecture_name(fields)):
        case Purpose.CLASSIFY:
            return with_labels(fields, pooled, name=name)
        case Purpose.CLASSIFY_TOKENS:
            return with_labels(fields)
    return None


def with_labels(
    fields: Fields, *before: DenseSpec | HeadNormSpec, name: str = "classifier"
) -> HeadSpec:
    """Returns a classifier whose last step, with a row for each label, has this name."""
    width, labels = fields.integer("hidden_size"), len(read_labels(fields))
    return classifier(
        fields, *before, DenseSpec(name=name, inputs=width, outputs=labels, bias=True)
    )


def with_mlm_head(model: ModelConfig, fields: Fields) -> ModelConfig:
    """Returns the configuration with the head that predicts masked tokens."""
    names = "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"
    activation = read_activation(fields, default="gelu")
    head = mlm_head(model, fields, names, activation, "cls.predictions")
    skipped = ("pooler.", "cls.predictions.decoder.", "cls.seq_relationship.")
    return replace(model, head=head, skipped_prefixes=skipped)


def mlm_head(
    model: ModelConfig,
    fields: Fields,
    names: tuple[str, str],
    activation: Activation,
    last: str,
) -> HeadSpec:
    """Returns a head that predicts masked tokens, as what makes sparse vectors.

    Args:
        model: the model without it.
        fields: the fields of config.json.
        names: those of the projection and of the norm.
        activation: the activation behind the projection.
        last: the name of the bias, without its end, of the product with the table of embeddings.
    """
    if not model.tie_word_embeddings:
        raise fields.error("tie_word_embeddings False is not supported with sparse vectors")
    if activation == "relu_squared":
        raise fields.error("the activation 'relu2' is not supported with sparse vectors")
    width, (dense, norm) = model.hidden_size, names
    named = DenseSpec(name=dense, inputs=width, outputs=width, bias=True)
    return HeadSpec(
        kind="sparse",
        steps=(
            replace(named, activation=activation),
            HeadNormSpec(name=norm, width=width, norm=model.norm),
            replace(named, name=last, outputs=model.vocab_size, tied=True),
        ),
        activation="log1p_relu",
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, NAMES): views for name, views in weights.items()}
