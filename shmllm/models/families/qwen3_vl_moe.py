"""Qwen 3 VL with experts: the tower and the positions of `qwen3_vl`, and the layers of Qwen 3 MoE.

The files of the model's authors have the weights of all experts of a layer in one tensor as
[experts, in, out], those that transformers writes as [experts, out, in].
"""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import qwen3_moe, qwen3_vl
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.specs import MoESpec
from shmllm.models.vision.qwen_fields import with_vision
from shmllm.models.vision.specs import VisionSpec

_DEFAULTS = {
    "max_position_embeddings": 128000,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 16,
    "rope_theta": 500000.0,
}
_NUM_EXPERTS = 60


def configure(fields: Fields) -> ModelConfig:
    if not fields.flag("norm_topk_prob", True):
        raise fields.error("norm_topk_prob false is not supported; supported: true")
    names = "num_experts", "num_local_experts"
    given = any(fields.values.get(name) is not None for name in names)
    defaults = _DEFAULTS | {"norm_topk_prob": True} | ({} if given else {names[0]: _NUM_EXPERTS})
    config = qwen3_moe.configure(fields.with_defaults(defaults))
    config = replace(config, layers=tuple(map(_with_two_layouts, config.layers)))
    vision = read_vision(fields, config)
    return with_vision(config, fields, vision, qwen3_vl.SECTIONS, mixes_axes=True)


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    return qwen3_vl.read_vision(fields, config, ("qwen3_vl_moe_vision", "qwen3_vl_moe"))


def _with_two_layouts(layer: LayerSpec) -> LayerSpec:
    mixture = layer.mlp
    if not isinstance(mixture, MoESpec):
        return layer
    return replace(layer, mlp=replace(mixture, two_layouts=True))
