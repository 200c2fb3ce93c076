"""Refusing a model by the name of what a device cannot compute, before weights are read."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from shmllm.config.load import LoadConfig
from shmllm.errors import EngineStartError
from shmllm.models.compressed_specs import CompressedAttentionSpec
from shmllm.models.config import ModelConfig
from shmllm.models.families import llama
from shmllm.models.features import Feature, check_features, features_of
from shmllm.models.fields import Fields
from shmllm.models.indexer_specs import IndexerSpec
from shmllm.models.layer_specs import PRE_NORMS
from shmllm.models.mixer_specs import Encoded, LatentAttentionSpec
from shmllm.models.shard import Shard
from shmllm.models.specs import MoESpec, NormSpec
from shmllm.worker.cpu import program as cpu
from shmllm.worker.gpu import program as gpu

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


WITH_POSTS = replace(PRE_NORMS, after_mixer="a", after_mlp="b")
EXPERTS = MoESpec(num_experts=4, top_k=2, inner=8)


def of_layer(**options: Any) -> ModelConfig:
    return replace(PLAIN, layers=(LAYER, replace(LAYER, **options), LAYER))


def of_attention(**options: Any) -> ModelConfig:
    return of_layer(mixer=replace(LAYER.mixer, **options))


USES = {
    Feature.LAYER_QK_NORM: replace(of_attention(qk_norm="row"), norm=NormSpec(kind="layer")),
    Feature.TRANSPOSED: replace(PLAIN, transposed=True),
    Feature.INDEXER: of_layer(
        mixer=LatentAttentionSpec(
            num_heads=8,
            rank=16,
            nope_dim=8,
            rope_dim=4,
            value_dim=8,
            query_rank=12,
            rope=LAYER.mixer.rope,
            scale=1.0,
            indexer=IndexerSpec(num_heads=2, head_dim=8, top_k=3, interleaved=False),
        )
    ),
    Feature.COMPRESSED: of_layer(
        mixer=CompressedAttentionSpec(
            num_heads=8,
            head_dim=8,
            query_rank=12,
            window=4,
            rope=LAYER.mixer.rope,
            groups=2,
            group_rank=8,
            norm_eps=1e-6,
            num_positions=64,
        )
    ),
    Feature.DIVIDED_ENCODER: replace(of_attention(ahead=Encoded(16), source=0), shard=Shard(1, 2)),
}
EXPERTS = of_layer(mlp=MoESpec(num_experts=4, top_k=2, inner=5, transposed=True))


def test_every_feature_has_a_case_and_the_first_families_use_none() -> None:
    assert set(USES) == set(Feature)
    assert features_of(PLAIN) == []
    assert features_of(of_attention(qk_norm="row")) == []


@pytest.mark.parametrize("feature", Feature)
def test_a_feature_of_one_layer_is_found(feature: Feature) -> None:
    assert features_of(USES[feature]) == [feature]


def test_transposed_experts_need_nothing() -> None:
    assert features_of(EXPERTS) == []


def test_a_device_refuses_what_it_lacks_by_name_and_nothing_else() -> None:
    config = replace(USES[Feature.LAYER_QK_NORM], transposed=True)
    with pytest.raises(EngineStartError) as caught:
        check_features(config, "the GPU", frozenset(Feature))
    assert str(caught.value) == (
        "LlamaForCausalLM needs what the GPU cannot compute yet: LayerNorm of all queries or keys "
        "side by side; matrices that checkpoints store transposed"
    )
    check_features(config, "the GPU", ())


@pytest.mark.parametrize("program", [cpu, gpu])
def test_a_device_computes_all_but_a_layer_norm_of_queries_and_keys(program: ModuleType) -> None:
    program.check_model(USES[Feature.TRANSPOSED], LoadConfig("nowhere"), "float32")
    with pytest.raises(EngineStartError, match="compute yet: LayerNorm of all queries or keys"):
        program.check_model(USES[Feature.LAYER_QK_NORM], LoadConfig("nowhere"), "float32")


@pytest.mark.parametrize("feature", [Feature.COMPRESSED, Feature.INDEXER])
def test_a_gpu_keeps_some_keys_in_the_dtype_of_the_weights(feature: Feature) -> None:
    gpu.check_model(USES[feature], LoadConfig("nowhere"), "bfloat16")
    message = f"what kv_cache_dtype='fp8' cannot compute yet: {feature.value}"
    with pytest.raises(EngineStartError, match=message):
        gpu.check_model(USES[feature], LoadConfig("nowhere", kv_cache_dtype="fp8"), "bfloat16")


@pytest.mark.parametrize("head_dim", [9, 514])
def test_a_gpu_refuses_keys_that_are_no_pairs_or_too_wide(head_dim: int) -> None:
    mixer = USES[Feature.COMPRESSED].layers[1].mixer
    config = of_layer(mixer=replace(mixer, head_dim=head_dim))
    cpu.check_model(config, LoadConfig("nowhere"), "float32")
    with pytest.raises(EngineStartError, match=f"keys of {head_dim} elements are no even number"):
        gpu.check_model(config, LoadConfig("nowhere"), "float32")


def test_an_option_for_another_device_or_other_weights_is_refused_before_they_are_read() -> None:
    for name, value in (
        ("activation_dtype", "int8"), ("kv_cache_dtype", "int8"), ("quantization", "int4"),
        ("cpu_instructions", "vectors"),
    ):  # fmt: skip
        with pytest.raises(EngineStartError, match=f"{name}='{value}' is for the CPU"):
            gpu.check_model(PLAIN, LoadConfig("nowhere", **{name: value}), "bfloat16")
    load = LoadConfig("nowhere", activation_dtype="bfloat16")
    with pytest.raises(EngineStartError, match="is not possible: the weights are float32"):
        cpu.check_model(PLAIN, load, "float32")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (replace(PLAIN, norm=NormSpec(kind="layer")), "its norms are no RMSNorms"),
        (replace(PLAIN, scales_layers=True), "its layers have inputs or factors of their own"),
        (of_layer(mixer=None), "the kernel does not compute the mixer of layer 1"),
        (of_layer(mlp=EXPERTS), "the kernel does not compute the feed-forward of layer 1"),
        (of_layer(parallel=True), "the kernel takes norms before both blocks, and behind both or"),
        (of_attention(head_dim=512), "heads of at most 256 elements fit into its registers, not "),
        (of_attention(gated=True), "the kernel does not compute the attention of layer 1"),
        (of_attention(num_kv_heads=1), "its layers differ in norms, heads, rotation or MLP"),
        (of_layer(norms=WITH_POSTS), "its layers differ in norms, heads, rotation or MLP"),
    ],
)
def test_a_model_whose_layers_cannot_be_one_kernel_is_refused_with_the_reason(
    config: ModelConfig, reason: str
) -> None:
    load = LoadConfig("nowhere", decode_kernel="persistent")
    gpu.check_model(PLAIN, load, "bfloat16")
    message = f"decode_kernel='persistent' is not possible for LlamaForCausalLM: {reason}"
    with pytest.raises(EngineStartError, match=message):
        gpu.check_model(config, load, "bfloat16")
    with pytest.raises(EngineStartError, match="some of its matrices are packed; leave it out"):
        gpu.check_model(PLAIN, load, "bfloat16", ["q4_0"])
    with pytest.raises(EngineStartError, match="decode_kernel='persistent' is for a GPU"):
        cpu.check_model(PLAIN, load, "float32")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"source": 1},
            "reads those of layer 1, which is no earlier layer with attention of its own",
        ),
        ({"source": 0, "num_kv_heads": 2}, "reads those of layer 0, which has other heads or"),
        ({"source": 0, "window": 3}, "reads those of layer 0, which has other heads or"),
    ],
)
def test_a_layer_reads_only_keys_and_values_like_its_own(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(EngineStartError, match=f"layer 1 has no keys and values and {reason}"):
        of_attention(**changes)
