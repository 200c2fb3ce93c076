"""A null in the place of a boolean of config.json means what it means in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.model_helpers import (
    CONFIGS,
    assert_logits_close,
    load,
    our_logits,
    reference_logits,
    reference_model,
    save,
)
from support.reference_models import SHAPE, VARIANTS
from transformers import AutoConfig, AutoModelForCausalLM

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig

TOKENS = [(7 * position * position + 5) % 97 for position in range(60)]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "beta_fast": 8.0, "beta_slow": 0.3}
YARN |= {"original_max_position_embeddings": 64}
ROUTED = VARIANTS["deepseek_v3"][1] | {"num_hidden_layers": 2}
ACCEPTED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "deepseek_v3": (ROUTED, ["rope_interleave", "norm_topk_prob"]),
    "youtu": (
        {name: ROUTED[name] for name in ROUTED if "rank" in name or name.endswith("head_dim")}
        | {"num_key_value_heads": 4},
        ["rope_interleave"],
    ),
    "bamba": (VARIANTS["bamba"][1], ["mamba_conv_bias"]),
    "falcon_h1": (VARIANTS["falcon_h1"][1], ["mamba_conv_bias"]),
    "granite_moe_hybrid": (VARIANTS["granite_moe_hybrid"][1], ["mamba_conv_bias"]),
    "llama": ({"rope_parameters": YARN | {"truncate": None}}, ["rope_parameters.truncate"]),
}
"""What transformers takes, by family: a model, and the fields that are null."""
REFUSED = [
    ("glm4", "attention_bias"),
    ("glm4_moe", "norm_topk_prob"),
    ("glm4_moe_lite", "norm_topk_prob"),
    ("glm4_moe_lite", "rope_interleave"),
    ("gpt_oss", "attention_bias"),
    ("mamba", "use_conv_bias"),
    ("mamba2", "use_conv_bias"),
    ("nemotron_h", "norm_topk_prob"),
    ("nemotron_h", "use_conv_bias"),
    ("qwen2_moe", "qkv_bias"),
    ("qwen3_next", "norm_topk_prob"),
    ("cohere2", "tie_word_embeddings"),
]
"""Fields whose default is true and that transformers does not take as null."""


def change(directory: Path, fields: dict[str, Any]) -> Path:
    """The directory, whose config.json has these values; a name may be that of a nested field."""
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for name, value in fields.items():
        *outer, inner = name.split(".")
        (config[outer[0]] if outer else config)[inner] = value
    path.write_text(json.dumps(config), encoding="utf-8")
    return directory


def with_nulls(directory: Path, names: list[str]) -> Path:
    return change(directory, dict.fromkeys(names))


@pytest.mark.parametrize("family", ACCEPTED)
def test_null_is_false_where_transformers_takes_it(family: str, tmp_path: Path) -> None:
    options, names = ACCEPTED[family]
    nulls = {name: None for name in names if "." not in name}
    model = reference_model(family, scale=4.0, **SHAPE | options | nulls)
    directory = with_nulls(save(model, tmp_path), names)
    wanted = reference_logits(model, TOKENS)
    assert_logits_close(our_logits(load(directory), TOKENS), wanted, 1e-4)
    change(directory, dict.fromkeys(names, True))
    if "mamba_conv_bias" in names:
        with pytest.raises(EngineStartError, match=r"conv1d\.bias"):
            load(directory)
    else:  # true is something else
        difference = (our_logits(load(directory), TOKENS) - wanted).abs().max()
        assert difference > 0.01 * wanted.abs().max()


def test_attention_that_is_null_instead_of_causal_looks_ahead(tmp_path: Path) -> None:
    model = reference_model("llama", scale=4.0)
    directory = with_nulls(save(model, tmp_path), ["is_causal"])
    auto: Any = AutoModelForCausalLM
    reference = auto.from_pretrained(directory, attn_implementation="eager").eval()
    changed = [*TOKENS[:-1], TOKENS[-1] + 1]
    first, other = (reference_logits(reference, each)[0] for each in (TOKENS, changed))
    assert not torch.equal(first, other)
    assert ModelConfig.from_directory(directory).both_ways


@pytest.mark.parametrize(("family", "name"), REFUSED)
def test_null_is_an_error_where_transformers_refuses_it(
    family: str, name: str, tmp_path: Path
) -> None:
    config = CONFIGS[family](**SHAPE | VARIANTS[family][1])
    config.architectures = [CLASSES[family]]
    config.save_pretrained(tmp_path)
    ModelConfig.from_directory(tmp_path)
    with_nulls(tmp_path, [name])
    with pytest.raises(Exception, match=name):
        AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(EngineStartError, match=f"config.json: '{name}' must be true or false"):
        ModelConfig.from_directory(tmp_path)


CLASSES = {family: f"{VARIANTS[family][0]}ForCausalLM" for family, _ in REFUSED}


def test_null_is_false_where_false_is_the_default(tmp_path: Path) -> None:
    directory = save(reference_model("llama"), tmp_path)
    wanted = ModelConfig.from_directory(directory)
    assert ModelConfig.from_directory(with_nulls(directory, ["attention_bias"])) == wanted
