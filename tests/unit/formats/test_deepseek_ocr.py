"""The configurations of DeepSeek-OCR and DeepSeek-OCR 2 as their authors publish them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.published_deepseek import OF_PROCESSOR, publish
from support.vision_families import FAMILIES
from transformers import DeepseekOcr2Config

from shmllm.errors import EngineStartError
from shmllm.formats.image_settings import ImageSettings, read_image_settings
from shmllm.models.config import ModelConfig
from shmllm.models.config_file import read_fields
from shmllm.models.vision.sam_specs import DeepseekOcr2Tower, DeepseekOcrTower

TEXT: dict[str, Any] = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_size": 1280,
    "intermediate_size": 6848,
    "kv_lora_rank": None,
    "lm_head": True,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 896,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 10,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 12,
    "num_key_value_heads": 10,
    "q_lora_rank": None,
    "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 0,
    "rm_head": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "use_mla": False,
    "v_head_dim": 0,
    "vocab_size": 129280,
}
SAM = {
    "downsample_channels": [512, 1024],
    "global_attn_indexes": [2, 5, 8, 11],
    "heads": 12,
    "layers": 12,
    "width": 768,
}
CLIP = {"heads": 16, "image_size": 224, "layers": 24, "patch_size": 14, "width": 1024}
FIRST: dict[str, Any] = TEXT | {
    "_name_or_path": "deepseek-ai/DeepSeek-OCR",
    "architectures": ["DeepseekOCRForCausalLM"],
    "candidate_resolutions": [[1024, 1024]],
    "global_view_pos": "head",
    "language_config": TEXT | {"architectures": ["DeepseekV2ForCausalLM"]},
    "model_type": "deepseek_vl_v2",
    "projector_config": {
        "input_dim": 2048,
        "model_type": "mlp_projector",
        "n_embed": 1280,
        "projector_type": "linear",
    },
    "tile_tag": "2D",
    "vision_config": {
        "image_size": 1024,
        "mlp_ratio": 3.7362,
        "model_name": "deeplip_b_l",
        "model_type": "vision",
        "width": {"clip-l-14-224": CLIP, "sam_vit_b": SAM},
    },
}
SECOND: dict[str, Any] = FIRST | {
    "architectures": ["DeepseekOCR2ForCausalLM"],
    "projector_config": FIRST["projector_config"] | {"input_dim": 896},
    "vision_config": {
        "image_size": 1024,
        "mlp_ratio": 3.7362,
        "model_name": "deepencoderv2",
        "model_type": "vision",
        "width": {"qwen2-0-5b": {"dim": 896}, "sam_vit_b": SAM},
    },
}


def read(directory: Path, whole: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(whole))
    return ModelConfig.from_directory(directory)


def images(directory: Path) -> ImageSettings:
    settings = read_image_settings(directory)
    assert settings is not None
    return settings


def test_deepseek_ocr(tmp_path: Path) -> None:
    config = read(tmp_path, FIRST)
    assert (config.vocab_size, config.num_layers, config.dtype) == (129_280, 12, "bfloat16")
    assert config.eos_token_ids == (1,)
    assert (config.attentions[0].head_dim, config.ropes[0].theta) == (128, 10_000)
    assert [type(layer.mlp).__name__ for layer in config.layers] == ["MLPSpec", *["MoESpec"] * 11]
    assert max(mlp.inner for mlp in config.dense_mlps) == 6848
    (experts,) = set(config.mixtures)
    assert (experts.num_experts, experts.top_k, experts.inner) == (64, 6, 896)
    assert experts.shared is not None
    assert experts.shared.inner == 2 * 896
    vision = config.vision
    assert vision is not None
    tower = vision.tower
    assert isinstance(tower, DeepseekOcrTower)
    assert (tower.inner, tower.window, tower.neck) == (512, 14, 256)
    assert (tower.encoder.inner, tower.encoder.side, tower.full_layers) == (3072, 64, (2, 5, 8, 11))
    assert (tower.clip.inner, tower.clip.side, tower.clip.activation) == (4096, 16, "quick_gelu")
    assert vision.image_token == 128_815
    assert vision.num_embeddings((1, 0, 0)) == 16 * 17 + 1
    assert vision.num_embeddings((6, 2, 3)) == 20 * 31
    assert vision.num_embeddings((6, 3, 2)) == 30 * 21
    assert vision.num_embeddings((5, 2, 3)) == vision.num_embeddings((0, 0, 0)) == 0
    assert (vision.side_of((1, 0, 0)), vision.side_of((6, 2, 3))) == (1024, 640)


def test_deepseek_ocr_2_is_that_of_transformers(tmp_path: Path) -> None:
    """Its files have another width behind the convolutions than its code."""
    config = read(tmp_path, SECOND)
    vision = config.vision
    assert vision is not None
    tower = vision.tower
    assert isinstance(tower, DeepseekOcr2Tower)
    assert (tower.inner, tower.reader.hidden_size, tower.reader.num_layers) == (512, 896, 24)
    reader = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    reader |= {"num_attention_heads": 14, "num_key_value_heads": 2}
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "n_group")
    names += ("max_position_embeddings", "moe_intermediate_size", "num_experts_per_tok")
    names += ("num_attention_heads", "num_key_value_heads", "topk_group", "eos_token_id")
    text = {name: TEXT[name] for name in names}
    theirs = DeepseekOcr2Config(
        text_config=text | {"mlp_layer_types": ["dense", *["sparse"] * 11]},
        vision_config={"encoder_config": reader | {"rope_parameters": {"rope_theta": 1e6}}},
        architectures=["DeepseekOcr2ForConditionalGeneration"],
        dtype="bfloat16",
    )
    theirs.save_pretrained(tmp_path)
    assert config == ModelConfig.from_directory(tmp_path)


def test_what_tests_publish_is_what_transformers_has(tmp_path: Path) -> None:
    family = FAMILIES["deepseek_ocr2"]
    theirs = DeepseekOcr2Config(
        text_config=family.text, vision_config=family.vision, image_token_id=442
    )
    theirs.architectures = ["DeepseekOcr2ForConditionalGeneration"]
    theirs.save_pretrained(tmp_path)
    expected = ModelConfig.from_directory(tmp_path)
    publish(tmp_path)
    found = ModelConfig.from_directory(tmp_path)
    assert (found.vision, found.layers) == (expected.vision, expected.layers)


def test_the_language_model_may_be_in_one_place(tmp_path: Path) -> None:
    expected = read(tmp_path, FIRST)
    outer = FIRST | {"language_config": {}, "image_token_index": 128_815}
    assert read(tmp_path, outer) == expected
    inner = {name: value for name, value in FIRST.items() if name not in TEXT}
    assert read(tmp_path, inner | {"torch_dtype": "bfloat16"}).layers == expected.layers
    both = FIRST | {"language_config": TEXT | {"rope_theta": 5e4}, "rope_theta": 1e6}
    assert read(tmp_path, both).ropes[0].theta == 1e6


def test_what_is_absent_are_the_numbers_of_the_authors_code(tmp_path: Path) -> None:
    expected = [read(tmp_path, whole).vision for whole in (FIRST, SECOND)]
    short = {"vision_config": {"model_type": "vision", "image_size": None}, "tile_tag": None}
    assert [read(tmp_path, whole | short).vision for whole in (FIRST, SECOND)] == expected
    assert read(tmp_path, FIRST | {"vision_config": None}).vision is None


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    config = read(tmp_path, FIRST | {"num_nextn_predict_layers": 1})
    assert config.skipped_prefixes == ("model.layers.12.",)


def test_the_token_of_images_is_that_of_the_tokenizer(tmp_path: Path) -> None:
    added = {"added_tokens": [{"id": 77, "content": "<image>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(added))
    vision = read(tmp_path, FIRST | {"image_token_index": 5}).vision
    assert vision is not None
    assert vision.image_token == 77


def test_overrides_may_have_the_names_of_the_authors_or_of_transformers(tmp_path: Path) -> None:
    read(tmp_path, FIRST)
    for overrides in (
        {"max_position_embeddings": 64, "vision_config": {"width": {"sam_vit_b": {"layers": 2}}}},
        {
            "text_config": {"max_position_embeddings": 64},
            "vision_config": {"sam_config": {"num_hidden_layers": 2}},
        },
    ):
        config = ModelConfig.from_fields(read_fields(tmp_path, overrides), tmp_path)
        assert config.max_position_embeddings == 64
        assert config.vision is not None
        tower = config.vision.tower
        assert isinstance(tower, DeepseekOcrTower)
        assert (tower.encoder.num_layers, tower.clip.num_layers) == (2, 24)


@pytest.mark.parametrize(("whole", "tile"), [(FIRST, 640), (SECOND, 768)])
def test_images_are_prepared_as_the_authors_do(
    whole: dict[str, Any], tile: int, tmp_path: Path
) -> None:
    read(tmp_path, whole)
    for given in (None, OF_PROCESSOR):
        if given is not None:
            (tmp_path / "processor_config.json").write_text(json.dumps(given))
        settings = images(tmp_path)
        assert settings.processor == "DeepseekOCRProcessor"
        assert (settings.mean, settings.std, settings.do_normalize) == (
            (0.5,) * 3,
            (0.5,) * 3,
            True,
        )
        wanted = {"size": {"height": 1024, "width": 1024}, "tile_size": tile, "max_patches": 6}
        assert {name: settings.options[name] for name in wanted} == wanted
        assert settings.options["background_color"] == [127] * 3


def test_the_processors_file_says_how_pixels_are_normalised(tmp_path: Path) -> None:
    read(tmp_path, FIRST)
    own = OF_PROCESSOR | {"image_mean": [0.1, 0.2, 1.0], "image_std": [1, 1, 1], "normalize": False}
    (tmp_path / "processor_config.json").write_text(json.dumps(own))
    settings = images(tmp_path)
    assert (settings.mean, settings.std, settings.do_normalize) == ((0.1, 0.2, 1), (1,) * 3, False)
    assert settings.options["background_color"] == [25, 51, 255]
    (tmp_path / "processor_config.json").write_text(json.dumps(own | {"image_mean": "half"}))
    with pytest.raises(EngineStartError, match="'image_mean' must consist of numbers, not 'half'"):
        images(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile_tag": "1D"}, "tile_tag '1D' is not supported; supported: '2D'"),
        ({"global_view_pos": "tail"}, "global_view_pos 'tail' is not supported; supported: 'head'"),
        ({"use_mla": True, "qk_rope_head_dim": 64}, "use_mla true is not supported"),
        ({"sliding_window": 128}, "sliding_window 128 is not supported; supported: null"),
        ({"language_config": []}, r"'language_config' must be an object, not \[\]"),
        ({"hidden_size": None, "language_config": {}}, "field 'hidden_size' is missing"),
        ({"vision_config": [1]}, r"vision_config' must be an object, not \[1\]"),
        ({"vision_config": {"width": 5}}, "vision_config: 'width' must be an object, not 5"),
        ({"vision_config": {"width": {"sam_vit_b": 1}}}, "width: 'sam_vit_b' must be an object"),
        (
            {"vision_config": {"image_size": 512}},
            "image_size 512 is not supported; supported: 1024",
        ),
        ({"vision_config": {"image_size": "a"}}, "'image_size' must be an integer"),
        (
            {"vision_config": {"width": {"sam_vit_b": {"width": "a"}}}},
            "sam_config: 'hidden_size' must be an integer",
        ),
        (
            {"vision_config": {"width": {"sam_vit_b": {"downsample_channels": [8, 9]}}}},
            "'downsample_channels' must be two numbers, the second one 1024",
        ),
        (
            {"vision_config": {"width": {"clip-l-14-224": {"hidden_act": "relu"}}}},
            "hidden_act 'relu' is not supported",
        ),
        ({"projector_config": {"projector_type": "mlp_gelu"}}, "projector_type 'mlp_gelu' is not"),
        ({"projector_config": {"input_dim": 8}}, "input_dim 8 is not supported; supported: 2048"),
        ({"projector_config": {"n_embed": 8}}, "n_embed 8 is not supported; supported: 1280"),
        ({"image_token_index": 129280}, r"image_token_id \(129280\) is no token"),
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
        ({"norm_topk_prob": True}, "norm_topk_prob true is not supported"),
    ],
)
def test_what_is_not_computed_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=message) as caught:
        read(tmp_path, FIRST | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["UnlimitedOCRForCausalLM", "UnlimitedOcrForConditionalGeneration"]
)
def test_unlimited_ocr_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=f"{name} is not supported: a token of a reply"):
        read(tmp_path, FIRST | {"architectures": [name], "sliding_window": 128})
