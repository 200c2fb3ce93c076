"""ChatGLM and the first GLM-4-9B as their authors publish them: transformers' GLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.model_helpers import (
    assert_logits_close,
    load,
    our_logits,
    reference_logits,
    reference_model,
)
from torch import Tensor
from transformers import PreTrainedModel

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.registry import Purpose, purpose_of

TOKENS = [5, 96, 0, 31, 31, 7, 88, 2, 45, 13, 64, 9, 77, 1, 50, 20, 33]
ROPE = {"rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 0.5}
GLM4: dict[str, Any] = {
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["ChatGLMModel"],
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "eos_token_id": [151329, 151336, 151338],
    "ffn_hidden_size": 13696,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "hidden_size": 4096,
    "kv_channels": 128,
    "layernorm_epsilon": 1.5625e-07,
    "model_type": "chatglm",
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_layers": 40,
    "original_rope": True,
    "pad_token_id": 151329,
    "padded_vocab_size": 151552,
    "post_layer_norm": True,
    "rmsnorm": True,
    "rope_ratio": 500,
    "seq_length": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 151552,
}
"""GLM-4-9B-Chat."""
MODULES = {
    "mlp.down_proj": "mlp.dense_4h_to_h",
    "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "self_attn.o_proj": "self_attention.dense",
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
}


def write(directory: Path, fields: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def published_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of transformers' GLM under the authors' names."""
    stored, found = model.state_dict(), {}
    names = {
        "lm_head.weight": "output_layer.weight",
        "model.embed_tokens.weight": "embedding.word_embeddings.weight",
        "model.norm.weight": "encoder.final_layernorm.weight",
    }
    for index in range(model.config.num_hidden_layers):
        old, new = f"model.layers.{index}", f"encoder.layers.{index}"
        names |= {f"{old}.{a}.weight": f"{new}.{b}.weight" for a, b in MODULES.items()}
        for kind in ("weight", "bias"):
            parts = [stored.pop(f"{old}.self_attn.{part}_proj.{kind}") for part in "qkv"]
            found[f"transformer.{new}.self_attention.query_key_value.{kind}"] = torch.cat(parts)
    return found | {f"transformer.{names[name]}": each.clone() for name, each in stored.items()}


def test_glm4_as_its_authors_write_it(tmp_path: Path) -> None:
    config = ModelConfig.from_directory(write(tmp_path, GLM4))
    [attention], [mlp] = set(config.attentions), set(config.dense_mlps)
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (40, 4096, 151552)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (32, 2, 128)
    assert (attention.bias, attention.output_bias, mlp.inner) == (True, False, 13696)
    assert attention.rope is not None
    assert (attention.rope.theta, attention.rope.rotary_dim) == (5e6, 64)
    assert (config.norm.eps, config.max_position_embeddings) == (1.5625e-07, 131072)
    assert purpose_of(config.architecture) is Purpose.GENERATE


@pytest.mark.parametrize("name", ["ChatGLMModel", "ChatGLMForConditionalGeneration"])
def test_weights_under_the_authors_names_are_those_of_glm(tmp_path: Path, name: str) -> None:
    reference = reference_model("glm", head_dim=16, attention_bias=True, rope_parameters=ROPE)
    sizes = reference.config
    fields = GLM4 | {
        "architectures": [name],
        "ffn_hidden_size": sizes.intermediate_size,
        "hidden_size": sizes.hidden_size,
        "kv_channels": sizes.head_dim,
        "layernorm_epsilon": sizes.rms_norm_eps,
        "multi_query_group_num": sizes.num_key_value_heads,
        "num_attention_heads": sizes.num_attention_heads,
        "num_layers": sizes.num_hidden_layers,
        "padded_vocab_size": sizes.vocab_size,
        "rope_ratio": 3,
    }
    frequencies = {"transformer.rotary_pos_emb.inv_freq": torch.ones(4)}
    save_file(published_weights(reference) | frequencies, tmp_path / "model.safetensors")
    model = load(write(tmp_path, fields))
    assert_logits_close(our_logits(model, TOKENS), reference_logits(reference, TOKENS), 1e-4)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"quantization_bit": 4}, "'quantization_bit' 4 is not supported; supported: 0"),
        ({"pre_seq_len": 128}, "'pre_seq_len' 128 is not supported"),
        ({"original_rope": False}, "'original_rope' False is not supported"),
        ({"rope_ratio": "5"}, "'rope_ratio' must be a number above 0, not '5'"),
        ({"kv_channels": 0}, "'head_dim' must be an integer of at least 1"),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineStartError, match=message):
        ModelConfig.from_directory(write(tmp_path, GLM4 | changed))
