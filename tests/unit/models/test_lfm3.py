"""LFM3: its fields, and the names of its files and of transformers' modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.model_helpers import load, our_logits, reference_model, save
from support.module_updates import update_from_modules
from support.published_configs import SIZES, read
from transformers import Lfm3Config

from shmllm.errors import EngineStartError
from shmllm.models.layer_specs import LayerNorms
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.recurrent_specs import ShortConvolutionSpec

NAME = "Lfm3ForCausalLM"
TOKENS = [(7 * position * position + 5) % 97 for position in range(40)]


def test_absent_fields_have_transformers_defaults(tmp_path: Path) -> None:
    sizes = {"vocab_size": 97, "hidden_size": 2048, "num_attention_heads": 16}
    sizes |= {"num_hidden_layers": 9}
    expected = Lfm3Config(**sizes)
    config = read(tmp_path, NAME, **sizes, intermediate_size=None, num_key_value_heads=4)
    assert config.max_position_embeddings == expected.max_position_embeddings
    assert (config.norm.eps, config.tie_word_embeddings) == (expected.norm_eps, True)
    kinds = {"conv": ShortConvolutionSpec}
    assert [type(each) for each in config.mixers] == [
        kinds.get(name, AttentionSpec) for name in expected.layer_types
    ]
    full, windowed = config.attentions[0], config.attentions[1]
    assert (full.window, windowed.window) == (None, expected.sliding_window)
    assert (full.head_dim, full.num_kv_heads) == (expected.head_dim, 4)
    assert full.rope is not None
    assert windowed.rope is not None
    assert (full.rope.theta, full.rope.num_pairs) == (1e6, 32)
    assert (windowed.rope.theta, windowed.rope.type) == (1e4, "default")
    convolution = config.mixers[0]
    assert convolution == ShortConvolutionSpec(width=2048, taps=expected.conv_L_cache)
    assert {mlp.inner for mlp in config.dense_mlps} == {expected.intermediate_size}
    assert config.layers[0].norms == LayerNorms(
        before_mixer="operator_norm",
        after_mixer="post_operator_norm",
        before_mlp="ffn_norm",
        after_mlp="post_ffn_norm",
    )


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"conv_L_cache": 9}, "'conv_L_cache' must be an integer of at most 8"),
        ({"conv_L_cache": 1}, "'conv_L_cache' must be an integer of at least 2"),
        ({"hidden_size": 40}, r"hidden_size \(40\) must be a multiple of 16"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"layer_types": ["conv"] * 3}, "must list one type for each of 4 layers"),
        ({"layer_types": ["chunked_attention"] * 4}, "'chunked_attention' is not supported"),
        ({"layer_types": ["sliding_attention"] * 4, "sliding_window": None}, "no sliding window"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "must have an object 'full_attention'"),
        ({"use_attention_gate": "no"}, "'use_attention_gate' must be true or false"),
        ({"norm_eps": -1}, "'norm_eps' must be a positive number"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=reason) as caught:
        read(tmp_path, NAME, **SIZES | {"head_dim": 16} | fields)
    assert "\n" not in str(caught.value)


def test_modules_name_gates_otherwise(tmp_path: Path) -> None:
    types = ["conv", "full_attention", "sliding_attention"]
    reference = reference_model("lfm3", 4.0, head_dim=16, sliding_window=7, layer_types=types)
    model = load(save(reference, tmp_path))
    expected = our_logits(model, TOKENS)
    update_from_modules(model, reference)
    assert torch.equal(our_logits(model, TOKENS), expected)
