"""LongCat-Flash: names of modules, FP8 weights, pipelines, and what is refused.
test_architectures.py compares logits."""

from __future__ import annotations

import json
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
from support.reference_models import VARIANTS

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.sharding import stage_config

TOKENS = [5, 61, 2, 33, 90, 17, 8, 8, 41, 3, 77, 20, 64, 1]
SIZES: dict[str, Any] = VARIANTS["longcat_flash"][1] | {"num_key_value_heads": 6}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """transformers' model, and its directory."""
    model = reference_model("longcat_flash", 4.0, **SIZES)
    return model, save(model, tmp_path_factory.mktemp("longcat_flash"))


@pytest.mark.parametrize(("expected", "largest"), [("experts", -99.0), ("identities", 99.0)])
def test_tokens_of_experts_or_identities_alone(
    expected: str, largest: float, tmp_path: Path
) -> None:
    model = reference_model("longcat_flash", 4.0, **SIZES)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer[SIZES["n_routed_experts"] :] = largest
    ours = our_logits(load(save(model, tmp_path)), TOKENS)
    assert_logits_close(ours, reference_logits(model, TOKENS), 1e-4)


def test_tensors_of_identities_are_skipped(made: tuple[Any, Path]) -> None:
    model = load(made[1])
    experts, identities = SIZES["n_routed_experts"], SIZES["zero_expert_num"]
    skipped = [
        (layer, expert)
        for layer in range(4)
        for expert in range(experts + identities + 2)
        if model.known_name(f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight") is None
    ]
    unread = range(experts, experts + identities)
    assert skipped == [(layer, expert) for layer in range(2) for expert in unread]
    assert model.known_name("model.mtp.layers.0.embed_tokens.weight") is None


def test_stages_have_both_halves_of_a_layer(made: tuple[Any, Path]) -> None:
    config = ModelConfig.from_directory(made[1])
    stages = [stage_config(config, index, 2).stage.layers for index in range(2)]
    assert stages == [range(2), range(2, 4)]
    with pytest.raises(EngineStartError, match="it has 2 layers; possible: 1 to 2"):
        stage_config(config, 0, 4)


def test_fp8_weights_equal_the_same_numbers(made: tuple[Any, Path], tmp_path: Path) -> None:
    tensors = load_file(made[1] / "model.safetensors")
    stored, plain = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            codes = (8 * tensor).to(torch.float8_e4m3fn)
            blocks = -(-tensor.shape[0] // 16), -(-tensor.shape[1] // 16)
            stored |= {name: codes, f"{name}_scale_inv": torch.full(blocks, 0.125)}
            plain[name] = codes.float() / 8
    method = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    fields = json.loads((made[1] / "config.json").read_text())
    logits = []
    for kind, weights, more in (
        ("plain", plain, {}),
        ("fp8", stored, {"quantization_config": method}),
    ):
        directory = tmp_path / kind
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(fields | more))
        save_file(weights, directory / "model.safetensors")
        logits.append(our_logits(load(directory), TOKENS))
    assert_logits_close(logits[1], logits[0], 1e-4)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"zero_expert_type": "copy"}, "zero_expert_type 'copy' is not supported"),
    ({"mla_scale_q_lora": False}, "mla_scale_q_lora False is not supported"),
    ({"mla_scale_kv_lora": False}, "mla_scale_kv_lora False is not supported"),
    ({"attention_bias": True}, "attention_bias True is not supported"),
    ({"router_bias": True}, "router_bias True is not supported"),
    ({"norm_topk_prob": True}, "norm_topk_prob True is not supported"),
    ({"q_lora_rank": None}, "q_lora_rank null is not supported"),
    ({"qk_head_dim": 40}, "qk_head_dim 40 is not supported; supported: 24"),
    ({"head_dim": 16}, "head_dim 16 is not supported; supported: 8"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' are not supported"),
    ({"zero_expert_num": -1}, "'zero_expert_num' must be"),
    ({"num_hidden_layers": 6}, r"num_hidden_layers \(6\)"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_is_not_computed_is_refused(
    made: tuple[Any, Path], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    fields = json.loads((made[1] / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(EngineStartError, match=message):
        ModelConfig.from_directory(tmp_path)
