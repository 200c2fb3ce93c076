"""BioGPT (Luo et al., 2022): OPT with a factor of the embeddings."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.opt import NAMES, opt_model
from shmllm.models.fields import Fields
from shmllm.models.readers import read_num_layers, read_positions, read_ungated_mlp
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

OWN_NAMES = NAMES | {"model.decoder.": "model.", "model.final_layer_norm.": "model.layer_norm."}
"""The parts of names that differ from the default ones."""


def configure(fields: Fields) -> ModelConfig:
    """Returns the configuration. ``layer_norm_eps`` decides nothing, as in transformers: all norms
    have 1e-5."""
    mlp = read_ungated_mlp(fields, activation="gelu", bias=True)
    model = opt_model(fields, mlp, read_num_layers(fields), read_positions(fields, 1024))
    scales = fields.flag("scale_embedding", True)
    return replace(model, embedding_scale=math.sqrt(model.hidden_size) if scales else 1.0)


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, OWN_NAMES): views for name, views in weights.items()}
