"""Reading config.json of LFM2: defaults, the names of the first files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.recurrent_specs import ShortConvolutionSpec
from shmllm.models.specs import MLPSpec

BASE: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
}


def read(directory: Path, **fields: Any) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(BASE | fields))
    return ModelConfig.from_directory(directory)


def inner_of(config: ModelConfig) -> int:
    (mlp,) = {layer.mlp for layer in config.layers}
    assert isinstance(mlp, MLPSpec)
    return mlp.inner


def test_absent_fields_have_transformers_defaults(tmp_path: Path) -> None:
    config, expected = read(tmp_path), Lfm2Config(**BASE)
    assert config.tie_word_embeddings is expected.tie_word_embeddings
    assert config.max_position_embeddings == expected.max_position_embeddings
    assert config.norm.eps == expected.norm_eps
    attentions = config.attentions
    assert len(attentions) == len(config.layers) == 4
    assert attentions[0].num_kv_heads == expected.num_key_value_heads
    assert attentions[0].qk_norm == "head"
    assert attentions[0].rope is not None
    assert attentions[0].rope.theta == expected.rope_parameters["rope_theta"]
    other = read(tmp_path, layer_types=["conv"] * 4)
    spec = ShortConvolutionSpec(width=64, taps=expected.conv_L_cache, bias=expected.conv_bias)
    assert other.mixers == (spec,) * 4


def test_the_first_files_have_other_names(tmp_path: Path) -> None:
    """As LFM2-1.2B: `block_ff_dim`, `tie_embedding` and `full_attn_idxs`."""
    old = {"block_ff_dim": 384, "tie_embedding": False, "full_attn_idxs": [1, 3]}
    config = read(tmp_path, intermediate_size=999, block_multiple_of=16, **old)
    assert config.tie_word_embeddings is False
    assert [isinstance(each, AttentionSpec) for each in config.mixers] == [False, True] * 2
    assert inner_of(config) == 256


@pytest.mark.parametrize("multiplier", [1.0, 1.3])
@pytest.mark.parametrize("adjusts", [True, False])
def test_the_width_of_mlps_is_transformers(
    multiplier: float, adjusts: bool, tmp_path: Path
) -> None:
    fields = {"intermediate_size": 1000, "block_multiple_of": 24}
    fields |= {"block_ffn_dim_multiplier": multiplier, "block_auto_adjust_ff_dim": adjusts}
    expected = Lfm2MLP(Lfm2Config(**BASE | fields)).w1.out_features
    assert inner_of(read(tmp_path, **fields)) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"conv_L_cache": 9}, "'conv_L_cache' must be an integer of at most 8"),
        ({"conv_L_cache": 1}, "'conv_L_cache' must be an integer of at least 2"),
        ({"hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 4}, "multiple of 16"),
        ({"layer_types": ["conv", "mamba", "conv", "conv"]}, "layer type 'mamba'"),
        ({"layer_types": None, "full_attn_idxs": "2"}, "'full_attn_idxs' must be a list"),
        ({"is_causal": False}, "is_causal False"),
    ],
)
def test_what_is_not_computed_is_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=message) as raised:
        read(tmp_path, **{"layer_types": ["conv"] * 4} | fields)
    assert "\n" not in str(raised.value)
