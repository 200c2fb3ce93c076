"""DBRX: what config.json may say, and matrices that have a projection of all experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.model_helpers import (
    allocate,
    assert_logits_close,
    our_logits,
    reference_logits,
    reference_model,
    save,
)

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model
from shmllm.models.decoder import DecoderModel
from shmllm.models.weights import load_weights

TOKENS = [5, 96, 0, 31, 31, 7, 88]
OPTIONS: dict[str, Any] = {
    "d_model": 48,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.25, "rope_theta": 1e4},
    "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
}
FIELDS = {
    "architectures": ["DbrxForCausalLM"],
    "d_model": 6144,
    "n_heads": 48,
    "n_layers": 2,
    "max_seq_len": 32768,
    "vocab_size": 100,
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
    "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
}
"""Those of the published models, but for their sizes."""


def read(directory: Path, **fields: Any) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(FIELDS | fields))
    return ModelConfig.from_directory(directory)


def test_the_published_fields_are_read(tmp_path: Path) -> None:
    config = read(tmp_path)
    attention, mixture = config.attentions[0], config.mixtures[0]
    assert attention.rope is not None
    assert (attention.clip, attention.num_kv_heads, attention.rope.theta) == (8.0, 8, 500000.0)
    assert (mixture.num_experts, mixture.top_k, mixture.renormalize) == (16, 4, True)
    assert config.max_position_embeddings == 32768


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"moe_normalize_expert_weights": 2.0}, "moe_normalize_expert_weights 2 is not supported"),
        ({"ffn_act_fn": {"name": "gelu"}}, "ffn_act_fn 'gelu' is not supported, only silu"),
        ({"moe_top_k": 5}, r"moe_top_k \(5\) is more than moe_num_experts \(4\)"),
    ],
)
def test_what_is_not_computed_is_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=message):
        read(tmp_path, ffn_config=fields)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_an_update_has_the_names_and_shapes_of_transformers_module(
    quantization: str | None, tmp_path: Path
) -> None:
    first, other = (reference_model("dbrx", scale, **OPTIONS) for scale in (1.0, 4.0))
    config = ModelConfig.from_directory(save(first, tmp_path))
    model = create_model(config, torch.float32, allocate, quantization)
    assert isinstance(model, DecoderModel)
    load_weights(model, tmp_path)
    model.weights_lost()
    model.load_weights(other.named_parameters())
    assert not model.missing
    limit = 1e-4 if quantization is None else 0.1
    assert_logits_close(our_logits(model, TOKENS), reference_logits(other, TOKENS), limit)
    views = model.destinations()
    for name, values in other.named_parameters():
        if ".experts." in name:
            assert views[name][0].shape == values.shape
            error = (views[name][0].clone() - values).abs().max() / values.abs().max()
            assert error < (1e-7 if quantization is None else 0.01), name
