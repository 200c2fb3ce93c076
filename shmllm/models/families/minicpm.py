"""MiniCPM 1, 2, 4 and 4.1: Llama with factors of embeddings, residual additions and logits.

The attention of MiniCPM 4.1 is sparse from a length on, ``dense_len`` of ``sparse_config``;
requests are shorter here.
"""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.llama import configure as configure_llama
from shmllm.models.fields import Fields
from shmllm.models.readers import read_positions

_FACTORS = {"scale_emb": 1.0, "scale_depth": 1.0, "dim_model_base": 1}


def configure(fields: Fields) -> ModelConfig:
    if fields.values.get("num_experts"):
        raise fields.error("num_experts is not supported: the MLPs are dense")
    fields = fields.with_defaults(_FACTORS).with_absent({"tie_word_embeddings": True})
    model = with_factors(fields, configure_llama(fields))
    return replace(model, max_position_embeddings=_dense_length(fields))


def _dense_length(fields: Fields) -> int:
    positions, sparse = read_positions(fields, 2048), fields.table("sparse_config")
    if not sparse:
        return positions
    return min(positions, Fields(sparse, f"{fields.where}: sparse_config").integer("dense_len"))


def with_factors(fields: Fields, model: ModelConfig) -> ModelConfig:
    """Returns the model with factors that follow from the numbers of layers and of columns (Hu et
    al., "MiniCPM", 2024, section 3). Those whose field is null are 1."""
    depth, base = (fields.optional_number(name) for name in ("scale_depth", "dim_model_base"))
    return replace(
        model,
        embedding_scale=fields.number("scale_emb"),
        residual_scale=1.0 if depth is None else depth / model.num_layers**0.5,
        logits_scale=1.0 if base is None else base / model.hidden_size,
    )
