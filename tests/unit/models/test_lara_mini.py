"""Lara Mini: its fields, and the names of its files and of transformers' modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.model_helpers import load, our_logits, reference_model, save
from support.module_updates import update_from_modules
from support.published_configs import SIZES, read
from transformers import LaraMiniConfig

from shmllm.errors import EngineStartError
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.recurrent_specs import DeltaNetSpec
from shmllm.models.specs import MLPSpec

NAME = "LaraMiniForCausalLM"
TOKENS = [(7 * position * position + 5) % 97 for position in range(40)]
SMALL: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
    "sliding_window": 7,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 36,
}


def test_absent_fields_have_transformers_defaults(tmp_path: Path) -> None:
    sizes = {"vocab_size": 97, "hidden_size": 1024, "num_attention_heads": 16}
    sizes |= {"num_hidden_layers": 7, "num_key_value_heads": 4}
    expected, config = LaraMiniConfig(**sizes), read(tmp_path, NAME, **sizes)
    assert (config.norm.eps, config.norm.offset) == (expected.rms_norm_eps, 0)
    assert config.max_position_embeddings == expected.max_position_embeddings
    assert config.tie_word_embeddings
    kinds = {"linear_attention": DeltaNetSpec}
    assert [type(each) for each in config.mixers] == [
        kinds.get(name, AttentionSpec) for name in expected.layer_types
    ]
    windowed, full = config.attentions[:2]
    assert (full.window, full.rope) == (None, None)
    assert windowed.rope is not None
    assert windowed.rope.theta == expected.rope_parameters["rope_theta"]
    assert (windowed.window, windowed.head_dim) == (expected.sliding_window, expected.head_dim)
    assert config.mixers[0] == DeltaNetSpec(
        key_heads=expected.linear_num_key_heads,
        key_dim=expected.linear_key_head_dim,
        value_heads=expected.linear_num_value_heads,
        value_dim=expected.linear_value_head_dim,
        taps=expected.linear_conv_kernel_dim,
    )
    [experts] = set(config.mixtures)
    assert (experts.num_experts, experts.top_k) == (128, expected.num_experts_per_tok)
    assert (experts.inner, experts.renormalize) == (512, expected.norm_topk_prob)
    assert (experts.shared, experts.shared_gate) == (MLPSpec(inner=512), False)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"linear_num_value_heads": 3}, r"\(3\) must be a multiple of linear_num_key_heads"),
        ({"linear_conv_kernel_dim": 5}, "linear_conv_kernel_dim must be at most 4, not 5"),
        ({"sliding_window": None}, "no sliding window is enabled"),
        ({"layer_types": ["conv"] * 4}, "layer type 'conv' is not supported"),
        ({"num_experts": 2}, r"num_experts_per_tok \(4\) is more than num_experts \(2\)"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' are not supported"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=reason) as caught:
        read(tmp_path, NAME, **SIZES | {"linear_num_key_heads": 2} | fields)
    assert "\n" not in str(caught.value)


def test_modules_have_a_nets_projections_apart(tmp_path: Path) -> None:
    reference = reference_model("lara_mini", 4.0, **SMALL)
    model = load(save(reference, tmp_path))
    expected = our_logits(model, TOKENS)
    update_from_modules(model, reference)
    assert torch.equal(our_logits(model, TOKENS), expected)
