"""DeBERTa 1: as DeBERTa v2, with one projection to queries, keys and values, of which keys have no
bias, and with an embedding for each distance (He et al., 2021)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.bias_specs import RelationBiases
from shmllm.models.config import ModelConfig
from shmllm.models.families import deberta_v2
from shmllm.models.families.deberta_v2 import read_related
from shmllm.models.fields import Fields
from shmllm.models.mixer_specs import AttentionSpec, MixerSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50_265,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-7,
}
_OF_V2 = ("share_att_key", "norm_rel_ebd", "position_buckets", "conv_kernel_size")
"""Fields that have no meaning for it."""

_QKV = "in_proj", ("query_proj", "key_proj", "value_proj")
_NAMES = {
    ".self.query_proj.bias": ".self.q_bias",
    ".self.value_proj.bias": ".self.v_bias",
    ".self.pos_key_proj.": ".self.pos_proj.",
    ".self.pos_query_proj.": ".self.pos_q_proj.",
}


def configure(fields: Fields) -> ModelConfig:
    if fields.flag("talking_head", False):
        raise fields.error("talking_head True is not supported")
    known = {name: value for name, value in fields.values.items() if name not in _OF_V2}
    model = read_related(fields.with_values(known).with_absent(_DEFAULTS))

    def without_key_bias(mixer: MixerSpec) -> MixerSpec:
        assert isinstance(mixer, AttentionSpec), "its layers have attention"
        if not isinstance(mixer.biases, RelationBiases):
            return mixer
        return replace(mixer, biases=replace(mixer.biases, key_bias=False))

    return model.with_mixers(without_key_bias)


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.arranged import BeforeZeros
    from shmllm.models.fused_names import with_fused_groups
    from shmllm.models.matrices import joined, matrix_of

    own = deberta_v2.named_weights(weights, config)
    biases: NamedWeights = {}
    for name in [name for name in own if name.endswith("self.key_proj.bias")]:
        of_queries = name.replace("key_proj", "query_proj")
        both = joined([matrix_of(own.pop(each)) for each in (of_queries, name)])
        biases[of_queries] = (BeforeZeros(both),)
    own = {renamed(name, _NAMES): views for name, views in (own | biases).items()}
    return with_fused_groups(own, _QKV, config.attentions[0].num_heads)
