"""Dense decoders whose repositories bring code of their own: the fields of published files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.head_specs import DenseSpec


def read(directory: Path, fields: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(fields))
    return ModelConfig.from_directory(directory)


def sizes_of(config: ModelConfig) -> tuple[int, ...]:
    """The layers, heads, key heads and the width of heads, and the largest number of positions."""
    [attention] = {(each.num_heads, each.num_kv_heads, each.head_dim) for each in config.attentions}
    return config.num_layers, *attention, config.max_position_embeddings


INTERNLM2: dict[str, Any] = {
    "architectures": ["InternLM2ForCausalLM"],
    "attn_implementation": "eager",
    "bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "internlm2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 2.0, "type": "dynamic"},
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 92544,
}
"""InternLM 2.5 7B."""


def test_internlm2_as_its_authors_write_it(tmp_path: Path) -> None:
    config = read(tmp_path, INTERNLM2)
    [attention] = set(config.attentions)
    assert sizes_of(config) == (32, 32, 8, 128, 32768)
    assert not attention.bias
    assert not attention.output_bias
    assert attention.rope is not None
    assert (attention.rope.theta, config.norm.eps) == (1e6, 1e-5)
    absent = read(tmp_path, {k: v for k, v in INTERNLM2.items() if k != "bias"})
    assert absent.attentions[0].bias


def test_a_reward_model_of_internlm2_has_one_projection(tmp_path: Path) -> None:
    config = read(tmp_path, INTERNLM2 | {"architectures": ["InternLM2ForRewardModel"]})
    assert config.head is not None
    assert config.head.steps == (DenseSpec(name="v_head", inputs=4096, outputs=1),)
    assert not config.lm_head


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (INTERNLM2 | {"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
        (INTERNLM2 | {"rope_scaling": {"type": "su"}}, "rope type 'su'|'su'"),
        (INTERNLM2 | {"num_key_value_heads": 5}, "num_attention_heads"),
    ],
)
def test_what_is_not_computed_is_refused(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=reason):
        read(tmp_path, fields)
