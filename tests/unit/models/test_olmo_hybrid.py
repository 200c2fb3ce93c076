"""OLMo Hybrid: its fields, and the files of its authors and of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.model_helpers import load, our_logits, reference_model, save
from transformers import OlmoHybridConfig

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.recurrent_specs import DeltaNetSpec

FIELDS: dict[str, Any] = {
    "architectures": ["OlmoHybridForCausalLM"],
    "vocab_size": 100352,
    "hidden_size": 3840,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 30,
}
NO_ROTATION = {"rope_type": "default", "rope_theta": None}
SMALL = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 32,
    "rope_parameters": NO_ROTATION,
}
TOKENS = [5, 9, 17, 40, 3, 8]


def read(directory: Path, **fields: Any) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(FIELDS | fields))
    return ModelConfig.from_directory(directory)


def test_absent_fields_get_transformers_defaults(tmp_path: Path) -> None:
    sizes = {name: value for name, value in FIELDS.items() if name != "architectures"}
    expected, config = OlmoHybridConfig(**sizes), read(tmp_path)
    kinds = {"linear_attention": DeltaNetSpec, "full_attention": AttentionSpec}
    assert [type(each) for each in config.mixers] == [kinds[t] for t in expected.layer_types]
    net, attention = config.mixers[0], config.attentions[0]
    assert isinstance(net, DeltaNetSpec)
    assert net.key_heads == expected.linear_num_key_heads
    assert net.key_dim == expected.linear_key_head_dim
    assert net.value_heads == expected.linear_num_value_heads
    assert net.value_dim == expected.linear_value_head_dim
    assert net.taps == expected.linear_conv_kernel_dim
    assert (net.most_rate, net.norm_eps, config.norm.eps) == (2.0, 1e-5, expected.rms_norm_eps)
    assert attention.num_kv_heads == expected.num_key_value_heads
    assert attention.rope is not None
    assert attention.rope.theta == expected.rope_parameters["rope_theta"]
    assert config.max_position_embeddings == expected.max_position_embeddings
    assert read(tmp_path, rope_parameters=NO_ROTATION).attentions[0].rope is None
    few = read(tmp_path, num_hidden_layers=3)
    assert [mixer.kv is not None for mixer in few.mixers] == [False, False, True]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"hidden_act": "gelu"}, "delta nets with hidden_act 'gelu' are not supported"),
        ({"linear_key_head_dim": 20}, "linear_key_head_dim must be a multiple of 16, not 20"),
        ({"linear_num_value_heads": 31}, r"linear_num_value_heads \(31\) must be a multiple of"),
        ({"linear_conv_kernel_dim": 5}, "linear_conv_kernel_dim must be at most 4, not 5"),
        ({"linear_allow_neg_eigval": "yes"}, "'linear_allow_neg_eigval' must be true or false"),
        ({"layer_types": ["mamba"] * 32}, "layer type 'mamba' is not supported"),
        ({"linear_num_key_heads": 10**9}, "linear_key_head_dim must be a multiple of 16, not 1"),
    ],
)
def test_what_it_does_not_compute_is_refused(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=reason):
        read(tmp_path, **fields)


def test_files_of_its_authors_and_of_transformers(tmp_path: Path) -> None:
    """Those have the convolution of queries, of keys and of values, these equal parts of all."""
    model = save(reference_model("olmo_hybrid", **SMALL), tmp_path)
    path = tmp_path / "model.safetensors"
    expected, tensors = our_logits(load(model), TOKENS), load_file(path)
    names = [f"model.layers.0.linear_attn.{each}_conv1d.weight" for each in "qkv"]
    assert [len(tensors[name]) for name in names] == [43, 43, 42]
    for prefix in (name.removesuffix("q_conv1d.weight") for name in [*tensors] if "q_conv" in name):
        own = [f"{prefix}{each}_conv1d.weight" for each in "qkv"]
        parts = torch.cat([tensors[name] for name in own]).split([32, 32, 64])
        tensors |= {name: part.clone() for name, part in zip(own, parts, strict=True)}
    save_file(tensors, path)
    assert torch.equal(our_logits(load(model), TOKENS), expected)


def test_a_third_of_a_convolution_is_missing(tmp_path: Path) -> None:
    model = save(reference_model("olmo_hybrid", **SMALL), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.linear_attn.v_conv1d.weight"]
    save_file(tensors, path)
    with pytest.raises(EngineStartError, match=r"lacks model.layers.0.linear_attn.v_conv1d.weight"):
        load(model)


def test_updates_have_the_names_of_transformers_modules(tmp_path: Path) -> None:
    reference = reference_model("olmo_hybrid", 4.0, **SMALL)
    model = load(save(reference, tmp_path))
    expected = our_logits(model, TOKENS)
    other = create_model(model.config, torch.float32, lambda s, d: torch.zeros(s, dtype=d))
    other.weights_lost()
    other.load_weights(reference.named_parameters())
    assert not other.missing
    assert torch.equal(our_logits(other, TOKENS), expected)
