"""CodeGen (Nijkamp et al., 2022): GPT-J, whose checkpoints have queries, values and keys in one
matrix, in four groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.gptj import configure as configure_gptj
from shmllm.models.families.gptj import named_weights as gptj_weights
from shmllm.models.fields import Fields

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_QKV = "qkv_proj", ("q_proj", "v_proj", "k_proj")
_NUM_GROUPS = 4


def configure(fields: Fields) -> ModelConfig:
    model = configure_gptj(fields)
    head_dim = model.attentions[0].head_dim
    if head_dim % _NUM_GROUPS:
        raise fields.error(f"heads of {head_dim} elements are not supported: no multiple of 4")
    return model


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.fused_names import with_fused_groups

    return gptj_weights(with_fused_groups(weights, _QKV, _NUM_GROUPS), config)
