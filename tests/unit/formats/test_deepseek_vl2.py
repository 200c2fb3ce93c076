"""The configurations of DeepSeek-VL2 as its authors publish them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.config_file import read_fields
from shmllm.models.mixer_specs import AttentionSpec, LatentAttentionSpec
from shmllm.models.vision.deepseek_vl2_specs import DeepseekVL2Tower

COMMON: dict[str, Any] = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "lm_head": True,
    "max_position_embeddings": 4096,
    "n_group": 1,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "q_lora_rank": None,
    "rm_head": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "model_type": "deepseek_v2",
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
TINY = COMMON | {
    "hidden_size": 1280,
    "intermediate_size": 6848,
    "kv_lora_rank": None,
    "moe_intermediate_size": 896,
    "n_routed_experts": 64,
    "num_attention_heads": 10,
    "num_hidden_layers": 12,
    "num_key_value_heads": 10,
    "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 0,
    "use_mla": False,
    "v_head_dim": 0,
    "vocab_size": 129280,
}
SMALL = (
    COMMON
    | LATENT
    | {
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "vocab_size": 102400,
    }
)
LARGE = (
    COMMON
    | LATENT
    | {
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 72,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_hidden_layers": 30,
        "num_key_value_heads": 32,
        "routed_scaling_factor": 2.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "vocab_size": 129280,
    }
)
VISION: dict[str, Any] = {
    "layers": 27,
    "mlp_ratio": 3.7362,
    "model_name": "siglip_so400m_patch14_384",
    "model_type": "vision",
    "patch_size": 14,
    "width": 1152,
}


def whole_of(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekVLV2ForCausalLM"],
        "candidate_resolutions": [[384, 384], [384, 768], [768, 384]],
        "global_view_pos": "head",
        "language_config": text,
        "model_type": "deepseek_vl_v2",
        "projector_config": {"model_type": "mlp_projector", "n_embed": text["hidden_size"]},
        "tile_tag": "2D",
        "torch_dtype": "bfloat16",
        "vision_config": VISION,
    }


def read(directory: Path, whole: dict[str, Any]) -> ModelConfig:
    tokens = {"added_tokens": [{"id": 100_003, "content": "<image>"}]}
    (directory / "tokenizer.json").write_text(json.dumps(tokens))
    (directory / "config.json").write_text(json.dumps(whole))
    return ModelConfig.from_directory(directory)


@pytest.mark.parametrize(
    ("text", "kind", "scoring"),
    [
        (TINY, AttentionSpec, "softmax"),
        (SMALL, LatentAttentionSpec, "softmax"),
        (LARGE, LatentAttentionSpec, "sigmoid"),
    ],
)
def test_published_fields(text: dict[str, Any], kind: type, scoring: str, tmp_path: Path) -> None:
    config = read(tmp_path, whole_of(text))
    assert (config.hidden_size, config.num_layers) == (
        text["hidden_size"],
        text["num_hidden_layers"],
    )
    assert (config.vocab_size, config.dtype, config.eos_token_ids) == (
        text["vocab_size"],
        "bfloat16",
        (1,),
    )
    assert {type(layer.mixer) for layer in config.layers} == {kind}
    (experts,) = set(config.mixtures)
    assert (experts.num_experts, experts.scoring) == (text["n_routed_experts"], scoring)
    assert experts.weight_scale == text.get("routed_scaling_factor", 1.0)
    assert not config.further_layers
    if kind is LatentAttentionSpec:
        latent: Any = config.layers[0].mixer
        assert (latent.rank, latent.query_rank, latent.nope_dim) == (512, None, 128)
    vision = config.vision
    assert vision is not None
    assert vision.image_token == 100_003
    tower = vision.tower
    assert isinstance(tower, DeepseekVL2Tower)
    assert (tower.encoder.inner, tower.encoder.num_heads, tower.encoder.side) == (4304, 16, 27)
    assert (tower.side, tower.depth, tower.inner) == (14, 2, text["hidden_size"])
    assert vision.num_embeddings((2, 1, 1)) == 421
    assert vision.num_embeddings((7, 2, 3)) == 14 * 15 + 1 + 28 * 43
    assert vision.num_embeddings((1, 1, 1)) == vision.num_embeddings((1, 0, 0)) == 0


def test_overrides_may_have_the_names_of_the_authors_or_of_transformers(tmp_path: Path) -> None:
    read(tmp_path, whole_of(SMALL))
    for name in ("language_config", "text_config"):
        overrides = {name: {"max_position_embeddings": 64}}
        config = ModelConfig.from_fields(read_fields(tmp_path, overrides), tmp_path)
        assert (config.max_position_embeddings, config.num_layers) == (64, 27)


def test_a_model_without_a_tower_needs_no_token(tmp_path: Path) -> None:
    whole = whole_of(SMALL)
    del whole["vision_config"]
    read(tmp_path, whole)
    (tmp_path / "tokenizer.json").unlink()
    assert ModelConfig.from_directory(tmp_path).vision is None
    (tmp_path / "config.json").write_text(json.dumps(whole_of(SMALL)))
    with pytest.raises(EngineStartError, match="no file of the tokenizer has the token '<image>'"):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        ("", {"tile_tag": "1D"}, "tile_tag '1D' is not supported; supported: '2D'"),
        ("", {"global_view_pos": "tail"}, "global_view_pos 'tail' is not supported"),
        ("", {"language_config": 3}, "'language_config' must be an object, not 3"),
        ("vision_config", {"class_token": True}, "class_token True is not supported"),
        ("vision_config", {"global_pool": "avg"}, "global_pool 'avg' is not supported"),
        ("vision_config", {"ignore_head": False}, "ignore_head False is not supported"),
        ("vision_config", {"heads": 7}, r"heads \(7\) must divide width \(1152\)"),
        ("vision_config", {"model_type": "siglip"}, "model_type 'siglip' is not supported"),
        ("vision_config", {"image_size": 8}, "'image_size' must be an integer of at least 14"),
        ("projector_config", {"projector_type": "linear"}, "projector_type 'linear' is not"),
        ("projector_config", {"token_pooling": True}, "token_pooling True is not supported"),
        ("projector_config", {"input_dim": 9}, "input_dim 9 is not supported; supported: 1152"),
        ("projector_config", {"n_embed": 9}, "n_embed 9 is not supported; supported: 2048"),
        ("projector_config", {"depth": 1}, "'depth' must be an integer of at least 2"),
        ("projector_config", {"downsample_ratio": 0}, "'downsample_ratio' must be an integer"),
        ("language_config", {"model_type": "qwen2"}, "model_type 'qwen2' is not supported"),
        ("language_config", {"topk_method": "best"}, "topk_method 'best' is not supported"),
        ("language_config", {"kv_lora_rank": "a"}, "'kv_lora_rank' must be an integer"),
    ],
)
def test_what_is_not_computed_is_refused(
    place: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    whole = whole_of(SMALL)
    whole |= {place: whole[place] | change} if place else change
    with pytest.raises(EngineStartError, match=message) as caught:
        read(tmp_path, whole)
    assert "\n" not in str(caught.value)
