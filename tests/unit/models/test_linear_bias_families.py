"""BLOOM and MPT: the fields of published files, and what transformers does not compute of them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.model_helpers import (
    assert_logits_close,
    load,
    our_logits,
    reference_logits,
    reference_model,
    save,
)

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig

TOKENS = [5, 96, 0, 31, 31, 7, 88, 2, 45, 13, 64, 9, 77, 1, 50, 20, 33]
BLOOM: dict[str, Any] = {
    "architectures": ["BloomForCausalLM"],
    "apply_residual_connection_post_layernorm": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "layer_norm_epsilon": 1e-05,
    "masked_softmax_fusion": True,
    "model_type": "bloom",
    "n_embed": 1024,
    "n_inner": None,
    "n_layer": 24,
    "num_attention_heads": 16,
    "offset_alibi": 100,
    "pretraining_tp": 1,
    "seq_length": 2048,
    "slow_but_exact": False,
    "vocab_size": 250880,
}
"""BLOOM 560M."""
MPT: dict[str, Any] = {
    "architectures": ["MPTForCausalLM"],
    "attn_config": {
        "alibi": True,
        "alibi_bias_max": 16,
        "attn_impl": "torch",
        "attn_pdrop": 0,
        "attn_type": "multihead_attention",
        "attn_uses_sequence_id": False,
        "clip_qkv": 6,
        "prefix_lm": False,
        "qk_ln": False,
        "softmax_scale": None,
    },
    "d_model": 4096,
    "embedding_fraction": 1.0,
    "expansion_ratio": 4,
    "learned_pos_emb": True,
    "logit_scale": None,
    "max_seq_len": 65536,
    "model_type": "mpt",
    "n_heads": 32,
    "n_layers": 32,
    "no_bias": True,
    "norm_type": "low_precision_layernorm",
    "vocab_size": 50432,
}
"""MPT 7B StoryWriter."""


def read(directory: Path, fields: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(fields))
    return ModelConfig.from_directory(directory)


def test_bloom_as_its_authors_write_it(tmp_path: Path) -> None:
    config = read(tmp_path, BLOOM)
    [attention], [mlp] = set(config.attentions), set(config.dense_mlps)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (16, 16, 64)
    assert (config.num_layers, config.hidden_size, mlp.inner) == (24, 1024, 4096)
    assert (config.max_position_embeddings, config.embedding_norm) == (2048, True)
    assert config.tie_word_embeddings
    absent = {"seq_length": None, "layer_norm_epsilon": None, "n_embed": None, "hidden_size": 1024}
    assert read(tmp_path, BLOOM | absent) == config


def test_mpt_as_its_authors_write_it(tmp_path: Path) -> None:
    config = read(tmp_path, MPT)
    [attention] = set(config.attentions)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (32, 32, 128)
    assert (attention.clip, attention.scale, attention.bias) == (6.0, 128**-0.5, False)
    assert attention.biases is not None
    assert (attention.biases.num_positions, attention.biases.steepness) == (65536, 16)
    assert (config.num_layers, config.norm.bias, config.tie_word_embeddings) == (32, False, True)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (BLOOM | {"apply_residual_connection_post_layernorm": True}, "post_layernorm true is not"),
        (BLOOM | {"n_inner": 5}, "n_inner 5 is not supported"),
        (BLOOM | {"seq_length": 2**20}, "'seq_length' must be an integer"),
        (MPT | {"no_bias": False}, "no_bias False is not supported"),
        (MPT | {"expansion_ratio": 3}, "expansion_ratio 3 is not supported"),
        (MPT | {"logit_scale": "inv_sqrt_d_model"}, "logit_scale 'inv_sqrt_d_model'"),
        (MPT | {"attn_config": {"alibi": False}}, "attn_config: alibi False is not supported"),
        (MPT | {"attn_config": {"qk_ln": True}}, "attn_config: qk_ln True is not supported"),
        (MPT | {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type"),
    ],
)
def test_what_they_do_not_compute_is_refused(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=reason):
        read(tmp_path, fields)


def test_biases_of_mpt_have_the_steepness_that_its_file_says(tmp_path: Path) -> None:
    """transformers ignores ``alibi_bias_max``; its function takes it."""
    options = {"n_heads": 6, "attn_config": {"alibi_bias_max": 16}}
    reference = reference_model("mpt", 4.0, **options)
    model: Any = reference.transformer
    model.build_mpt_alibi_tensor = partial(model.build_mpt_alibi_tensor, alibi_bias_max=16)
    ours = our_logits(load(save(reference, tmp_path)), TOKENS)
    assert_logits_close(ours, reference_logits(reference, TOKENS), 1e-4)


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_files_of_the_bare_model(family: str, tmp_path: Path) -> None:
    """As BLOOM's are published."""
    reference = reference_model(family, 4.0)
    path = save(reference, tmp_path) / "model.safetensors"
    tensors = {name.removeprefix("transformer."): each for name, each in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    ours = our_logits(load(tmp_path), TOKENS)
    assert_logits_close(ours, reference_logits(reference, TOKENS), 1e-4)


def test_layers_share_their_biases(tmp_path: Path) -> None:
    model = load(save(reference_model("bloom"), tmp_path))
    tables = {layer.mixer.biases.data_ptr() for layer in model.layers}
    assert len(model.layers) > 1 == len(tables)
    assert torch.isfinite(model.layers[0].mixer.biases).all()
