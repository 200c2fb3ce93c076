"""Refusing a model by the name of what a device cannot compute, before weights are read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shmllm.config.engine import LoadConfig
from shmllm.errors import EngineStartError
from shmllm.models import llama
from shmllm.models.config import ModelConfig
from shmllm.models.features import Feature, check_features, features_of
from shmllm.models.fields import Fields
from shmllm.models.specs import LayerNorms, MLPSpec, MoESpec, NormSpec
from shmllm.worker.cpu import program as cpu

PLAIN = llama.configure(
    Fields(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 100,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
        },
        "config.json",
    )
)
LAYER = PLAIN.layers[0]
ROPE = LAYER.attention.rope
assert ROPE is not None


def of_layer(**options: Any) -> ModelConfig:
    return replace(PLAIN, layers=(LAYER, replace(LAYER, **options), LAYER))


def of_attention(**options: Any) -> ModelConfig:
    return of_layer(attention=replace(LAYER.attention, **options))


USES = {
    Feature.LAYER_NORM: replace(PLAIN, norm=NormSpec(kind="layer")),
    Feature.LAYER_QK_NORM: replace(of_attention(qk_norm="head"), norm=NormSpec(kind="layer")),
    Feature.NORM_OFFSET: replace(PLAIN, norm=NormSpec(offset=1.0)),
    Feature.BARE_INPUT: of_layer(norms=LayerNorms(after_attention="a", after_mlp="b")),
    Feature.PARALLEL: of_layer(norms=LayerNorms(before_attention="a"), parallel=True),
    Feature.RESIDUAL_SCALE: replace(PLAIN, residual_scale=0.2),
    Feature.EMBEDDING_SCALE: replace(PLAIN, embedding_scale=8.0),
    Feature.POSITIONS: replace(PLAIN, num_learned_positions=7),
    Feature.LOGITS_SCALE: replace(PLAIN, logits_cap=30.0),
    Feature.ATTENTION_SCALE: of_attention(scale=1.0),
    Feature.ATTENTION_CAP: of_attention(soft_cap=50.0),
    Feature.SINKS: of_attention(sinks=True),
    Feature.ROW_QK_NORM: of_attention(qk_norm="row"),
    Feature.NO_ROPE: of_attention(rope=None),
    Feature.PARTIAL_ROPE: of_attention(rope=replace(ROPE, rotary_dim=4)),
    Feature.INTERLEAVED_ROPE: of_attention(rope=replace(ROPE, interleaved=True)),
    Feature.GELU: of_layer(mlp=MLPSpec(inner=5, activation="gelu")),
    Feature.GELU_TANH: of_layer(mlp=MLPSpec(inner=5, activation="gelu_tanh")),
    Feature.PLAIN_MLP: of_layer(mlp=MLPSpec(inner=5, gated=False)),
    Feature.EXPERTS: of_layer(mlp=MoESpec(num_experts=4, top_k=2, inner=5)),
    Feature.TRANSPOSED: replace(PLAIN, transposed=True),
}
IMPLIED = {Feature.LAYER_QK_NORM: [Feature.LAYER_NORM]}
"""The features that another one needs."""


def test_every_feature_has_a_case_and_the_first_families_use_none() -> None:
    assert set(USES) == set(Feature)
    assert features_of(PLAIN) == []


@pytest.mark.parametrize("feature", Feature)
def test_a_feature_of_one_layer_is_found(feature: Feature) -> None:
    assert features_of(USES[feature]) == [*IMPLIED.get(feature, ()), feature]


def test_transposed_experts_count_as_transposed() -> None:
    experts = MoESpec(num_experts=4, top_k=2, inner=5, transposed=True)
    assert features_of(of_layer(mlp=experts)) == [Feature.EXPERTS, Feature.TRANSPOSED]


def test_a_device_refuses_what_it_lacks_by_name_and_nothing_else() -> None:
    config = replace(USES[Feature.SINKS], residual_scale=0.2)
    with pytest.raises(EngineStartError) as caught:
        check_features(config, "the GPU", frozenset(Feature))
    assert str(caught.value) == (
        "LlamaForCausalLM needs what the GPU cannot compute yet: a factor of the residual "
        "additions; attention sinks"
    )
    check_features(config, "the GPU", frozenset(Feature) - {Feature.SINKS, Feature.RESIDUAL_SCALE})


def test_the_cpu_computes_every_feature_but_a_layer_norm_of_queries_and_keys() -> None:
    for feature in set(Feature) - {Feature.LAYER_QK_NORM}:
        cpu.check_model(USES[feature], LoadConfig("nowhere"))
    with pytest.raises(EngineStartError, match="cannot compute yet: LayerNorm of queries and keys"):
        cpu.check_model(USES[Feature.LAYER_QK_NORM], LoadConfig("nowhere"))


def test_layers_with_different_heads_are_refused_with_both() -> None:
    with pytest.raises(EngineStartError) as caught:
        of_attention(num_kv_heads=4, head_dim=16)
    assert "layer 0 has 8 heads and 8 key-value heads with a head_dim of 8" in str(caught.value)
    assert "layer 1 has 8 heads and 4 key-value heads with a head_dim of 16" in str(caught.value)
