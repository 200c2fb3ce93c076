"""The configuration of InternVL as its authors publish it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shmllm.errors import EngineStartError
from shmllm.formats.image_settings import read_image_settings
from shmllm.models.config import ModelConfig
from shmllm.models.config_file import read_fields
from shmllm.models.vision.projected_specs import InternVLTower

VISION = {
    "architectures": ["InternVisionModel"],
    "hidden_act": "gelu",
    "hidden_size": 1024,
    "image_size": 448,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-06,
    "model_type": "intern_vit_6b",
    "norm_type": "layer_norm",
    "num_attention_heads": 16,
    "num_channels": 3,
    "num_hidden_layers": 24,
    "patch_size": 14,
    "qk_normalization": False,
    "qkv_bias": True,
}
LANGUAGE = {
    "architectures": ["Qwen2ForCausalLM"],
    "eos_token_id": 151643,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "model_type": "qwen2",
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151674,
}
WHOLE: dict[str, Any] = {
    "architectures": ["InternVLChatModel"],
    "downsample_ratio": 0.5,
    "dynamic_image_size": True,
    "force_image_size": 448,
    "llm_config": LANGUAGE,
    "max_dynamic_patch": 12,
    "min_dynamic_patch": 1,
    "model_type": "internvl_chat",
    "pad2square": False,
    "ps_version": "v2",
    "select_layer": -1,
    "template": "internvl2_5",
    "torch_dtype": "bfloat16",
    "use_thumbnail": True,
    "vision_config": VISION,
}
TOKENS = {
    "eos_token": "<|im_end|>",
    "added_tokens_decoder": {
        "151645": {"content": "<|im_end|>"},
        "151667": {"content": "<IMG_CONTEXT>"},
    },
}


def write(directory: Path, config: dict[str, Any], tokens: dict[str, Any] | None = None) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokens or TOKENS))
    return directory


def tower_of(config: ModelConfig) -> InternVLTower:
    assert config.vision is not None
    tower = config.vision.tower
    assert isinstance(tower, InternVLTower)
    return tower


def test_fields_are_read_in_the_terms_of_transformers(tmp_path: Path) -> None:
    config = ModelConfig.from_directory(write(tmp_path, WHOLE))
    tower = tower_of(config)
    assert tower.is_published
    assert (tower.rms_norms, tower.qk_norm, tower.attention_bias) == (False, False, True)
    assert config.vision is not None
    assert config.vision.tile_embeddings == 256
    assert config.vision.image_token == 151667
    assert config.eos_token_ids == (151643, 151645)
    assert config.dtype == "bfloat16"
    assert not config.tie_word_embeddings


def test_absent_fields_have_the_defaults_of_the_authors(tmp_path: Path) -> None:
    vision = {"image_size": 448, "model_type": "intern_vit_6b"}
    tower = tower_of(ModelConfig.from_directory(write(tmp_path, WHOLE | {"vision_config": vision})))
    assert (tower.rms_norms, tower.qk_norm, tower.attention_bias) == (True, True, False)
    assert (tower.encoder.hidden_size, tower.encoder.num_layers) == (3200, 48)


def test_null_is_absent(tmp_path: Path) -> None:
    null = {"num_attention_heads": None, "norm_type": None, "num_hidden_layers": None}
    vision = {"image_size": 448} | null
    write(tmp_path, WHOLE | {"vision_config": vision, "max_dynamic_patch": None})
    tower = tower_of(ModelConfig.from_directory(tmp_path))
    assert (tower.rms_norms, tower.encoder.num_heads, tower.encoder.num_layers) == (True, 25, 48)
    settings = read_image_settings(tmp_path)
    assert settings is not None
    assert settings.options["max_patches"] == 6


def test_overrides_may_have_the_names_of_the_authors_or_of_transformers(tmp_path: Path) -> None:
    write(tmp_path, WHOLE)
    for overrides in (
        {"select_layer": -2, "llm_config": {"hidden_size": 768}, "tie_word_embeddings": True},
        {
            "vision_feature_layer": -2,
            "text_config": {"hidden_size": 768},
            "tie_word_embeddings": True,
        },
    ):
        config = ModelConfig.from_fields(read_fields(tmp_path, overrides), tmp_path)
        assert config.hidden_size == 768
        assert config.tie_word_embeddings
        assert tower_of(config).encoder.num_layers == 23
    with pytest.raises(EngineStartError, match="ps_version 'v1' is not supported"):
        read_fields(tmp_path, {"ps_version": "v1"})


def test_the_token_of_images_may_be_in_another_file(tmp_path: Path) -> None:
    write(tmp_path, WHOLE, {"eos_token": "<|im_end|>"})
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<IMG_CONTEXT>": 151671}))
    config = ModelConfig.from_directory(tmp_path)
    assert config.vision is not None
    assert config.vision.image_token == 151671


def test_images_are_prepared_as_config_json_says(tmp_path: Path) -> None:
    write(tmp_path, WHOLE)
    (tmp_path / "preprocessor_config.json").write_text('{"feature_extractor_type": "CLIP..."}')
    settings = read_image_settings(tmp_path)
    assert settings is not None
    assert settings.processor == "GotOcr2ImageProcessor"
    assert settings.mean == (0.485, 0.456, 0.406)
    assert settings.options["size"] == {"height": 448, "width": 448}
    assert (settings.options["min_patches"], settings.options["max_patches"]) == (1, 12)
    write(tmp_path, WHOLE | {"dynamic_image_size": False})
    whole = read_image_settings(tmp_path)
    assert whole is not None
    assert whole.options["max_patches"] == 1


@pytest.mark.parametrize("number", ["9" * 5000, "x", "-1", ""])
def test_numbers_that_are_no_ids_are_passed_over(number: str, tmp_path: Path) -> None:
    write(tmp_path, WHOLE, {"added_tokens_decoder": {number: {"content": "<IMG_CONTEXT>"}}})
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<IMG_CONTEXT>": 151671}))
    config = ModelConfig.from_directory(tmp_path)
    assert config.vision is not None
    assert config.vision.image_token == 151671


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ps_version": "v1"}, "ps_version 'v1' is not supported; supported: 'v2'"),
        ({"ps_version": None}, "ps_version 'v1' is not supported; supported: 'v2'"),
        ({"force_image_size": 224}, "force_image_size 224 is not supported; supported: 448"),
        ({"pad2square": True}, "pad2square True is not supported; supported: False"),
        ({"use_thumbnail": False}, "use_thumbnail False is not supported; supported: True"),
        ({"dynamic_image_size": "no"}, "'dynamic_image_size' must be true or false, not 'no'"),
        ({"use_thumbnail": 1}, "'use_thumbnail' must be true or false, not 1"),
        ({"max_dynamic_patch": 0}, "'max_dynamic_patch' must be a positive integer, not 0"),
        ({"llm_config": None}, "'llm_config' must be an object, not None"),
        ({"vision_config": []}, r"'vision_config' must be an object, not \[\]"),
        (
            {"llm_config": LANGUAGE | {"model_type": "internlm3"}},
            "model_type 'internlm3' is not supported",
        ),
    ],
)
def test_what_is_not_computed_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, WHOLE | change)
    with pytest.raises(EngineStartError, match=message) as caught:
        ModelConfig.from_directory(tmp_path)
    assert "\n" not in str(caught.value)
