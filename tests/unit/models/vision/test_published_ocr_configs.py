"""The fields of config.json as the authors of models that read pages publish them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GlmOcrConfig, GotOcr2Config, LightOnOcrConfig, PaddleOCRVLConfig

from shmllm.models.config import ModelConfig
from shmllm.models.vision.dots_ocr_specs import DotsOcrTower
from shmllm.models.vision.hunyuan_vl_specs import HunYuanVLTower
from shmllm.models.vision.sam_specs import GotOcr2Tower
from shmllm.models.vision.specs import VisionSpec
from shmllm.models.vision.squares_specs import GlmOcrTower, PaddleOcrVlTower, PixtralTower

DOTS_OCR: dict[str, Any] = {
    "architectures": ["DotsOCRForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "image_token_id": 151665,
    "initializer_range": 0.02,
    "intermediate_size": 8960,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "dots_ocr",
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "video_token_id": 151656,
    "vision_config": {
        "attn_implementation": "flash_attention_2",
        "embed_dim": 1536,
        "gradient_checkpointing": False,
        "hidden_size": 1536,
        "init_merger_std": 0.02,
        "initializer_range": 0.02,
        "intermediate_size": 4224,
        "is_causal": False,
        "num_attention_heads": 12,
        "num_channels": 3,
        "num_hidden_layers": 42,
        "patch_size": 14,
        "post_norm": True,
        "rms_norm_eps": 1e-05,
        "spatial_merge_size": 2,
        "temporal_patch_size": 1,
        "use_bias": False,
    },
    "vocab_size": 151936,
}
HUNYUAN_OCR: dict[str, Any] = {
    "architectures": ["HunYuanVLForConditionalGeneration"],
    "attention_bias": False,
    "attention_head_dim": 128,
    "eod_token_id": 120020,
    "eos_token_id": 120020,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "im_end_id": 120119,
    "im_newline_id": 120121,
    "im_start_id": 120118,
    "image_token_id": 120120,
    "intermediate_size": 3584,
    "max_position_embeddings": 32768,
    "model_type": "hunyuan_vl",
    "norm_type": "rms",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "org_vocab_size": 120818,
    "pad_id": 120002,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "alpha": 1000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "type": "xdrope",
        "xdrope_section": [16, 16, 16, 16],
    },
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_qk_norm": True,
    "vision_config": {
        "cat_extra_token": 1,
        "hidden_act": "gelu",
        "hidden_size": 1152,
        "img_max_token_num": 4096,
        "intermediate_size": 4304,
        "interpolate_mode": "bilinear",
        "max_image_size": 2048,
        "max_vit_seq_len": 16384,
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 27,
        "out_hidden_size": 1024,
        "patch_size": 16,
        "rms_norm_eps": 1e-05,
        "spatial_merge_size": 2,
    },
}
GLM_OCR: dict[str, Any] = {
    "architectures": ["GlmOcrForConditionalGeneration"],
    "image_end_token_id": 59257,
    "image_start_token_id": 59256,
    "image_token_id": 59280,
    "model_type": "glm_ocr",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": [59246, 59253],
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "intermediate_size": 4608,
        "max_position_embeddings": 131072,
        "model_type": "glm_ocr_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 59246,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "mrope_section": [16, 24, 24],
            "partial_rotary_factor": 1.0,
            "rope_theta": 10000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "vocab_size": 59392,
    },
    "video_end_token_id": 59259,
    "video_start_token_id": 59258,
    "video_token_id": 59281,
    "vision_config": {
        "attention_bias": True,
        "depth": 24,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "image_size": 336,
        "in_channels": 3,
        "intermediate_size": 4096,
        "model_type": "glm_ocr_vision",
        "num_heads": 16,
        "out_hidden_size": 1536,
        "patch_size": 14,
        "rms_norm_eps": 1e-05,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
LIGHTON_OCR_2: dict[str, Any] = {
    "architectures": ["LightOnOCRForConditionalGeneration"],
    "eos_token_id": 151645,
    "image_token_id": 151655,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "pad_token_id": 151643,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "layer_types": ["full_attention"] * 28,
        "max_position_embeddings": 16384,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "vision_config": {
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "image_size": 1540,
        "intermediate_size": 4096,
        "model_type": "pixtral",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "rope_theta": 10000,
    },
    "vision_feature_layer": -1,
}
PADDLEOCR_VL: dict[str, Any] = {
    "architectures": ["PaddleOCRVLForConditionalGeneration"],
    "attention_probs_dropout_prob": 0.0,
    "compression_ratio": 1.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_dropout_prob": 0.0,
    "hidden_size": 1024,
    "ignored_index": -100,
    "image_token_id": 100295,
    "intermediate_size": 3072,
    "max_position_embeddings": 131072,
    "max_sequence_length": None,
    "model_type": "paddleocr_vl",
    "num_attention_heads": 16,
    "num_hidden_layers": 18,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_is_neox_style": True,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
    "rope_theta": 500000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_3d_rope": True,
    "use_bias": False,
    "video_token_id": 101307,
    "vision_config": {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "image_size": 384,
        "intermediate_size": 4304,
        "layer_norm_eps": 1e-06,
        "model_type": "paddleocr_vl",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 27,
        "pad_token_id": 0,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
    },
    "vision_start_token_id": 101305,
    "vocab_size": 103424,
    "weight_share_add_bias": True,
}
GOT_OCR_2: dict[str, Any] = {
    "architectures": ["GotOcr2ForConditionalGeneration"],
    "image_seq_length": 576,
    "image_token_index": 151859,
    "model_type": "got_ocr2",
    "text_config": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "max_window_layers": 21,
        "model_type": "qwen2",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "rope_theta": 1000000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151860,
    },
    "vision_config": {
        "global_attn_indexes": [2, 5, 8, 11],
        "hidden_size": 768,
        "image_size": 1024,
        "mlp_dim": 3072,
        "model_type": "",
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "output_channels": 256,
        "patch_size": 16,
        "window_size": 14,
    },
}


def read(directory: Path, whole: dict[str, Any]) -> tuple[ModelConfig, VisionSpec]:
    (directory / "config.json").write_text(json.dumps(whole))
    config = ModelConfig.from_directory(directory)
    assert config.vision is not None
    return config, config.vision


def test_glm_ocr(tmp_path: Path) -> None:
    config, vision = read(tmp_path, GLM_OCR)
    (rope,) = config.ropes
    assert (rope.rotary_dim, rope.interleaved, rope.sections) == (128, True, (16, 24, 24))
    assert (config.attentions[0].num_heads, config.attentions[0].bias) == (16, False)
    assert config.skipped_prefixes == ("model.layers.16.",)
    tower = vision.tower
    assert isinstance(tower, GlmOcrTower)
    assert (tower.inner, tower.merger_inner, tower.bias) == (4096, 4608, True)
    assert vision.video is not None
    assert (vision.image_token, vision.video.token) == (59280, 59280)
    assert vision.num_embeddings((1, 166, 118)) == 83 * 59


@pytest.mark.parametrize(("outer", "inner"), [(False, True), (True, False), (False, False)])
def test_glm_ocr_ties_embeddings_if_the_model_or_its_part_says_so(
    outer: bool, inner: bool, tmp_path: Path
) -> None:
    fields = {"tie_word_embeddings": outer}
    fields |= {"text_config": GLM_OCR["text_config"] | {"tie_word_embeddings": inner}}
    tied = read(tmp_path, GLM_OCR | fields)[0].tie_word_embeddings
    assert tied == GlmOcrConfig(**fields).tie_word_embeddings == (outer or inner)


@pytest.mark.parametrize("tied", [None, True, False])
def test_got_ocr_2(tied: bool | None, tmp_path: Path) -> None:
    whole = GOT_OCR_2 if tied is None else GOT_OCR_2 | {"tie_word_embeddings": tied}
    config, vision = read(tmp_path, whole)
    assert (config.hidden_size, config.num_layers) == (1024, 24)
    assert config.tie_word_embeddings == (tied is not False)
    tower = vision.tower
    assert isinstance(tower, GotOcr2Tower)
    assert (tower.window, tower.full_layers, tower.encoder.side) == (14, (2, 5, 8, 11), 64)
    assert vision.num_embeddings((5, 2, 2)) == 5 * 256


@pytest.mark.parametrize("name", ["LightOnOcr", "GotOcr2"])
def test_sizes_that_files_leave_out_are_those_of_the_language_model(
    name: str, tmp_path: Path
) -> None:
    kind = {"LightOnOcr": LightOnOcrConfig, "GotOcr2": GotOcr2Config}[name]
    text = {"num_hidden_layers": 2}
    config, _ = read(
        tmp_path,
        {
            "architectures": [f"{name}ForConditionalGeneration"],
            "text_config": text,
            "vision_config": {"num_hidden_layers": 2},
        },
    )
    theirs = kind(text_config=dict(text)).text_config
    assert (config.hidden_size, config.vocab_size) == (theirs.hidden_size, theirs.vocab_size)
    assert config.dense_mlps[0].inner == theirs.intermediate_size
    assert config.attentions[0].num_heads == theirs.num_attention_heads
    assert config.max_position_embeddings == theirs.max_position_embeddings


@pytest.mark.parametrize("changes", [{}, {"model_type": "lighton_ocr", "image_token_id": None}])
def test_lighton_ocr_2(changes: dict[str, Any], tmp_path: Path) -> None:
    config, vision = read(tmp_path, LIGHTON_OCR_2 | changes)
    assert (config.num_layers, config.attentions[0].qk_norm) == (28, "head")
    assert config.tie_word_embeddings  # as the whole model says, or does not
    tower = vision.tower
    assert isinstance(tower, PixtralTower)
    assert (tower.num_layers, tower.patch_size, tower.activation) == (24, 14, "silu")
    assert vision.image_token == 151655
    assert vision.num_embeddings((1, 110, 85)) == 55 * 42
    theirs = LightOnOcrConfig(**{k: v for k, v in LIGHTON_OCR_2.items() if k != "architectures"})
    assert theirs.tie_word_embeddings


def test_paddleocr_vl(tmp_path: Path) -> None:
    config, vision = read(tmp_path, PADDLEOCR_VL)
    (rope,) = config.ropes
    assert (rope.rotary_dim, rope.interleaved, rope.sections) == (128, False, (16, 24, 24))
    assert (rope.theta, config.num_layers, config.tie_word_embeddings) == (500_000, 18, False)
    tower = vision.tower
    assert isinstance(tower, PaddleOcrVlTower)
    assert (tower.num_layers, tower.num_positions, tower.merged) == (27, 729, 4608)
    assert vision.video is None
    assert vision.num_embeddings((1, 166, 118)) == 83 * 59


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True, None])
def test_paddleocr_vl_ties_embeddings_as_transformers_does(
    outer: bool, inner: bool | None, tmp_path: Path
) -> None:
    text = {"head_dim": 128} if inner is None else {"tie_word_embeddings": inner}
    whole = {"architectures": PADDLEOCR_VL["architectures"], "tie_word_embeddings": outer}
    whole |= {"text_config": text, "vision_config": {"patch_size": 14}}
    tied = read(tmp_path, whole)[0].tie_word_embeddings
    theirs = PaddleOCRVLConfig(tie_word_embeddings=outer, text_config=dict(text))
    assert tied == theirs.tie_word_embeddings


def test_files_of_dots_ocr_have_the_language_model_beside_vision_config(tmp_path: Path) -> None:
    config, vision = read(tmp_path, DOTS_OCR)
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (1536, 28, 151_936)
    assert not config.tie_word_embeddings
    (rope,) = config.ropes
    assert (rope.theta, rope.sections) == (1e6, ())
    assert (vision.image_token, vision.has_axes, vision.video) == (151_665, False, None)
    assert isinstance(vision.tower, DotsOcrTower)
    assert vision.num_embeddings((1, 64, 48)) == 32 * 24
    few = {"model_type": "dots_vit"}  # the defaults of vLLM's class are the published values
    assert read(tmp_path, DOTS_OCR | {"vision_config": few, "image_token_id": None})[1] == vision


def test_files_of_hunyuan_ocr_have_the_language_model_beside_vision_config(tmp_path: Path) -> None:
    config, vision = read(tmp_path, HUNYUAN_OCR)
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (1024, 24, 120_818)
    assert (config.tie_word_embeddings, config.eos_token_ids) == (True, (120_020,))
    (rope,) = config.ropes
    assert (rope.rotary_dim, rope.type, rope.sections) == (128, "default", (16,) * 4)
    assert rope.theta == pytest.approx(1e4 * 1000 ** (128 / 126))
    assert (vision.image_token, vision.grid_axes, vision.merge_size) == (120_120, 4, 2)
    assert isinstance(vision.tower, HunYuanVLTower)
    assert (vision.tower.table_side, vision.tower.num_layers) == (128, 27)
    assert vision.num_embeddings((1, 64, 48)) == 32 * 25 + 2
