"""HY V4: names of files, adapters, and what is refused. test_architectures.py compares logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import lora_adapters
from support.model_helpers import (
    assert_logits_close,
    load,
    our_logits,
    reference_logits,
    reference_model,
    save,
)
from support.reference_models import INDEXER, draw_weights

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.lora import make_lora, read_files
from shmllm.models.lora_targets import LoraTargets

TOKENS = [5, 61, 2, 33, 90, 17, 8, 8, 41, 3, 77, 20, 64, 1]
SIZES: dict[str, Any] = INDEXER | {
    **{"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"], "hc_mult": 3},
    **{"kv_lora_rank": 20, "q_lora_rank": 28, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8},
    **{"v_head_dim": 10, "n_routed_experts": 4, "num_experts_per_tok": 4},
    **{"moe_intermediate_size": 24, "swiglu_limit": 0.5},
}
NOT_ADAPTED = ("lm_head", "kv_b_proj", ".indexer.")
OTHER_NAMES = {
    ".hc_pre.hc_attn_layer.hc_": ".hc_attn_layer.hc_pre.hc_",
    ".hc_pre.hc_mlp_layer.hc_": ".ffn_hc.",
    ".hc_pre.hc_head.hc_head_": ".hc_head.hc_pre.hc_head_",
    "mlp.linear_gate": "mlp.gate_proj",
    "shared_experts.linear_gate": "shared_experts.gate_proj",
    "self_attn.linear_gate": "self_attn.gate_proj",
    "learnable_sink_param": "sinks",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """transformers' model, and its directory."""
    model = reference_model("hy_v4", **SIZES)
    return model, save(model, tmp_path_factory.mktemp("hy_v4"))


def test_names_of_all_kinds_of_files_are_known_and_further_layers_left_out(
    made: tuple[Any, Path], tmp_path: Path
) -> None:
    directory = made[1]
    tensors = load_file(directory / "model.safetensors")
    for part, other in OTHER_NAMES.items():
        assert any(part in name for name in tensors), part
        tensors = {name.replace(part, other): tensor for name, tensor in tensors.items()}
    tensors["model.mtp_layers.0.eh_proj.weight"] = torch.ones(2, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    logits = [our_logits(load(each), TOKENS) for each in (directory, tmp_path)]
    assert torch.equal(*logits)


def test_an_update_has_the_names_of_transformers_modules(made: tuple[Any, Path]) -> None:
    reference, directory = made
    model, expected = load(directory), our_logits(load(directory), TOKENS)
    model.weights_lost()
    model.load_weights(reference.named_parameters())
    assert all(name.endswith("e_score_correction_bias") for name in model.missing)
    model.load_weights(pair for pair in reference.named_buffers() if "correction" in pair[0])
    assert not model.missing
    assert torch.equal(our_logits(model, TOKENS), expected)


def test_the_language_model_of_one_that_sees_images_equals_transformers(
    made: tuple[Any, Path], tmp_path: Path
) -> None:
    """Its neighbours rotate together, and norms of latents have the eps of others."""
    own = {"model_type", "architectures", "transformers_version", "head_dim"}
    fields = {name: value for name, value in made[0].config.to_dict().items() if name not in own}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.HYV4VLConfig(
        text_config=fields | {"rope_parameters": rope, "rms_norm_eps": 0.1},
        vision_config=vision | {"num_attention_heads": 2, "out_hidden_size": 48},
    )
    torch.manual_seed(3)
    model = transformers.HYV4VLForConditionalGeneration(config).eval()
    draw_weights(model)
    found = our_logits(load(save(model, tmp_path)), TOKENS)
    assert_logits_close(found, reference_logits(model, TOKENS), 1e-4)


def test_adapters_equal_merged_weights(made: tuple[Any, Path], tmp_path: Path) -> None:
    reference, directory = made
    shapes = {
        name: shape
        for name, shape in lora_adapters.linear_modules(reference).items()
        if not any(part in name for part in NOT_ADAPTED)
    }
    assert "model.layers.1.self_attn.gate_proj" in shapes
    tensors = lora_adapters.draw(shapes)
    base, files = load(directory), read_files(lora_adapters.write(tmp_path, tensors))
    weights = make_lora(*files, LoraTargets(base), 32, torch.float32)
    expected = reference_logits(lora_adapters.merged(reference, tensors, 2.0), TOKENS)
    assert_logits_close(our_logits(base, TOKENS, weights), expected, 1e-4)
    assert (expected - our_logits(base, TOKENS)).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_limit": 0}, "'swiglu_limit' must be a positive number"),
        ({"hc_mult": 9}, "'hc_mult' must be an integer of at most 8"),
        ({"layer_types": ["full_attention"] * 3}, "layer type 'full_attention' is not"),
        ({"indexer_types": ["shared", "full", "full"]}, "begins with a layer that has no choice"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"q_lora_rank": None}, "q_lora_rank is null"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    changes: dict[str, Any], message: str, made: tuple[Any, Path], tmp_path: Path
) -> None:
    fields = json.loads((made[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | changes))
    with pytest.raises(EngineStartError, match=message):
        ModelConfig.from_directory(tmp_path)
