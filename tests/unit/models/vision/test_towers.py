"""Compares the embeddings of images with transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.model_helpers import load
from support.variants import slow
from support.vision_models import (
    ALIKE,
    ANY_SIZE,
    BESIDE_WHOLE,
    EACH_FAMILY,
    JOINED,
    TWO_SIZES,
    VISION_FAMILIES,
    make_vision_model,
    normalised,
    pixel_inputs,
    reference_embeddings,
)
from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model
from shmllm.models.decoder import DecoderModel
from shmllm.models.vision.grids import Grid

SIDE = 64
TILED = [
    name for name in VISION_FAMILIES if name not in (*ANY_SIZE, *JOINED, *TWO_SIZES, *BESIDE_WHOLE)
]
GRIDS: dict[str, list[Grid]] = {
    "qwen2_vl": [(1, 4, 6), (1, 2, 2), (1, 10, 16)],
    "qwen2_5_vl": [(1, 4, 4), (1, 8, 10), (1, 6, 14), (1, 2, 2), (1, 10, 2), (1, 2, 12)],
    "exaone4_5": [(1, 6, 14), (1, 2, 12)],
    "dots_ocr": [(1, 4, 6), (1, 2, 2), (1, 10, 16)],
    "ernie4_5_vl_moe": [(1, 4, 6), (1, 2, 2), (1, 10, 16)],
    "video_llama_3": [(1, 4, 6), (1, 1, 1), (1, 13, 18), (1, 1, 40)],
    "hunyuan_vl": [(1, 4, 6), (1, 2, 2), (1, 14, 18), (1, 2, 40)],
    "hyperclovax_vision_v2": [(1, 6, 14), (1, 2, 12)],
    "qwen2_5_omni": [(1, 4, 6), (1, 6, 14)],
    "qwen3_vl": [(1, 8, 6), (1, 2, 2), (1, 14, 18), (1, 2, 40), (1, 32, 32)],
    "qwen3_vl_moe": [(1, 4, 6)],
    "qwen3_omni_moe": [(1, 4, 6)],
    "qwen3_5": [(1, 8, 6)],
    "qwen3_5_moe": [(1, 4, 6)],
    "glm4v": [(1, 4, 6), (1, 2, 2), (1, 14, 18), (1, 10, 2)],
    "glm4v_moe": [(1, 4, 6)],
    "glm46v": [(1, 4, 6)],
    "kimi_k25": [(1, 4, 6), (1, 6, 6), (1, 2, 2), (1, 14, 18), (1, 2, 40)],
    "minicpm_ocr": [(1, 8, 12), (1, 2, 6)],
    "minimax_m3": [(1, 4, 6), (1, 2, 2), (1, 14, 18), (1, 2, 40)],
    "muse_glimmer": [(1, 4, 6), (1, 14, 10), (1, 2, 2), (1, 2, 20)],
    "minicpmv4_7": [(1, 8, 12)],
    "minicpmv4_6": [(1, 8, 12), (1, 4, 4), (1, 4, 40), (1, 24, 8)],
    "glm_ocr": [(1, 4, 6), (1, 2, 2), (1, 14, 10)],
    "paddleocr_vl": [(1, 4, 6), (1, 2, 2), (1, 14, 18), (1, 2, 40)],
    "pixtral": [(1, 4, 6), (1, 1, 1), (1, 3, 16)],
    "mistral3": [(1, 4, 6), (1, 10, 2), (1, 2, 16)],
    "lighton_ocr": [(1, 4, 6), (1, 5, 7), (1, 3, 2)],
    "lfm2_vl": [(1, 4, 6), (1, 6, 6), (1, 2, 2), (1, 14, 18), (1, 2, 40)],
    "lfm3_vl": [(1, 4, 6), (1, 2, 2), (1, 14, 10), (1, 2, 20)],
    "llava_next": [(3, 128, 64), (3, 90, 64), (5, 101, 77), (4, 64, 150), (3, 2, 1300)],
    "llava_next_video": [(3, 90, 64)],
    "granite4_vision": [(3, 128, 64), (5, 101, 77), (4, 64, 150), (3, 2, 1300)],
    "llava_onevision": [(3, 90, 64), (5, 128, 128), (5, 101, 120), (1, 60, 70)],
    "smolvlm": [(1, 1, 1), (7, 2, 3)],
    "idefics3": [(1, 1, 1), (5, 2, 2)],
    "granite_docling": [(1, 1, 1), (5, 2, 2)],
    "deepseek_ocr": [(1, 0, 0), (2, 1, 2), (4, 2, 2)],
    "deepseek_ocr2": [(1, 0, 0), (2, 1, 2)],
    "deepseek_vl2": [(2, 1, 1), (7, 2, 3)],
    "ovis2": [(1, 1, 1), (7, 2, 3), (3, 2, 1)],
    "internvl": [(1, 1, 1), (5, 2, 2)],
    "got_ocr2": [(1, 1, 1), (3, 1, 2)],
    "llama4": [(1, 1, 1), (5, 2, 2)],
    "aya_vision": [(1, 1, 1), (5, 2, 2)],
    "gemma3": [(1, 1, 1), (3, 1, 1)],
    "gemma4": [(1, 4, 6), (1, 2, 2), (1, 14, 20), (1, 140, 2), (1, 2, 140)],
    "gemma4_unified": [(1, 4, 6), (1, 2, 2), (1, 14, 20), (1, 2, 140)],
    "gemma4-large": [(1, 4, 6)],
}
"""Images whose windows are whole, cut at one side, at both, and narrower than a window; and tables
of positions that are larger and smaller than the image."""
CASES = [
    slow(name, grid) if name in ALIKE else (name, grid)
    for name in VISION_FAMILIES
    for grid in GRIDS.get(name, [(1, 1, 1)])
]
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "last layer": ("llava", {}, {"vision_feature_layer": -1}),
    "counted from the front": ("llava", {}, {"vision_feature_layer": 1}),
    "with the class token": ("llava", {}, {"vision_feature_select_strategy": "full"}),
    "SigLIP without its first patch": (
        "llava-siglip",
        {},
        {"vision_feature_select_strategy": "default"},
    ),
    "projections without a bias": ("llava", {}, {"multimodal_projector_bias": False}),
    "other activations": (
        "llava",
        {"hidden_act": "gelu"},
        {"projector_hidden_act": "gelu_pytorch_tanh"},
    ),
    "pixels beyond the last patch": ("llava-siglip", {"patch_size": 15}, {}),
    "SigLIP with its head": ("llava-siglip", {"vision_use_head": True}, {}),
    "positions that share rows": (
        "idefics3",
        {"image_size": 76, "patch_size": 4},
        {"scale_factor": 1},
    ),
    "larger squares": ("smolvlm", {}, {"scale_factor": 4}),
    "SigLIP behind joined tiles": (
        "llava_next",
        {"model_type": "siglip_vision_model", "vision_use_head": False},
        {"vision_feature_select_strategy": "full"},
    ),
    "one size": ("llava_next", {}, {"image_grid_pinpoints": [[128, 64]]}),
    "SigLIP's first layer behind joined tiles": (
        "llava_onevision",
        {},
        {"vision_feature_layer": -2, "vision_aspect_ratio": "anyres_max_1"},
    ),
    "CLIP behind shrunk tiles": (
        "llava_onevision",
        {"model_type": "clip_vision_model"},
        {"vision_feature_select_strategy": "default", "vision_aspect_ratio": "anyres_max_1"},
    ),
    "InternVL's last norm": (
        "internvl",
        {"use_mean_pooling": False, "use_qk_norm": False, "attention_bias": False},
        {},
    ),
    "InternVL's last layer without its norm": (
        "internvl",
        {"use_mean_pooling": False},
        {"vision_feature_layer": 2},
    ),
    "InternVL's first layer": ("internvl", {"norm_type": "rms_norm"}, {"vision_feature_layer": -2}),
    "InternVL with other activations and squares": (
        "internvl",
        {"hidden_act": "silu", "use_mask_token": True},
        {"downsample_ratio": 0.25, "projector_hidden_act": "gelu_pytorch_tanh"},
    ),
    "Qianfan-OCR's last norm": (
        "qianfan_ocr",
        {"use_mean_pooling": False, "attention_bias": False, "norm_type": "rms_norm"},
        {"projector_hidden_act": "silu"},
    ),
    "Qianfan-OCR's first layer": (
        "qianfan_ocr",
        {"use_mask_token": True},
        {"vision_feature_layer": 1},
    ),
    "Granite-Docling without levels and with smaller squares": (
        "granite_docling",
        {"deepstack_visual_indexes": [], "scale_factor": 1, "use_fine_route": False}
        | {"layer_norm_eps": 1e-3},
        {"density_router_hidden_size": None},
    ),
    "Ovis 2 with biases and without squares": (
        "ovis2",
        {"qkv_bias": True, "mlp_bias": True, "hidden_stride": 1, "hidden_act": "gelu"},
        {},
    ),
    "Ovis 2 with large squares": (
        "ovis2",
        {"hidden_stride": 4, "image_size": 70, "rms_norm_eps": 1e-3, "vocab_size": 9},
        {},
    ),
    "Granite-Docling with large squares": (
        "granite_docling",
        {"deepstack_visual_indexes": [0, 1, 2], "scale_factor": 4, "hidden_act": "gelu"},
        {},
    ),
    "Granite 4 Vision without an embedding": (
        "granite4_vision",
        {"model_type": "clip_vision_model", "num_hidden_layers": 4},
        {"deepstack_layer_map": [[2, 4], [-1, 1]], "spatial_target_layers": [6, 5, 3, 2]}
        | {"vision_feature_select_strategy": "default", "spatial_vision_layer": 1}
        | {"qformer_config": {"model_type": "blip_2_qformer", "num_hidden_layers": 3}},
    ),
    "ViP-LLaVA with one layer": (
        "vipllava",
        {},
        {"vision_feature_layer": 3, "projector_layernorm_eps": 1e-3}
        | {"projector_hidden_act": "gelu_pytorch_tanh"},
    ),
    "DeepSeek-VL with a head": ("deepseek_vl", {"vision_use_head": True, "hidden_act": "gelu"}, {}),
    "Janus with one projection and another activation": (
        "janus",
        {"depth": 1, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-3},
        {},
    ),
    "Llama 4's larger squares": (
        "llama4",
        {"pixel_shuffle_ratio": 0.25, "intermediate_size": 512},
        {},
    ),
    "other rotations of Llama 4": (
        "llama4",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        {},
    ),
    "Aya Vision's first layer": (
        "aya_vision",
        {"vision_use_head": True, "num_hidden_layers": 3},
        {"vision_feature_layer": 1, "adapter_layer_norm_eps": 0.01},
    ),
    "Aya Vision of one patch": (
        "aya_vision",
        {"patch_size": 20},
        {"downsample_factor": 1, "alignment_intermediate_size": 64},
    ),
    "Command A Vision with larger squares": (
        "cohere2_vision",
        {"hidden_act": "gelu"},
        {"downsample_factor": 4, "alignment_intermediate_size": 10},
    ),
    "GOT-OCR 2 without terms, positions and biases": (
        "got_ocr2",
        {"use_rel_pos": False, "use_abs_pos": False, "qkv_bias": False, "hidden_act": "silu"},
        {},
    ),
    "GOT-OCR 2 with large windows and odd sides": (
        "got_ocr2",
        {"patch_size": 6, "window_size": 12, "global_attn_indexes": [0, 2], "layer_norm_eps": 1e-3},
        {},
    ),
    "means of a rest": ("gemma3", {"patch_size": 7}, {"mm_tokens_per_image": 16}),
    "one mean": ("gemma3", {}, {"mm_tokens_per_image": 1}),
    "Gemma 4 with other squares, wavelengths and activations": (
        "gemma4",
        {"pooling_kernel_size": 3, "hidden_activation": "silu", "rms_norm_eps": 1e-3}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}},
        {},
    ),
    "Gemma 4 with other heads": (
        "gemma4",
        {"head_dim": 8, "num_attention_heads": 6, "num_key_value_heads": 3, "standardize": False},
        {},
    ),
    "EXAONE 4.5 with as many key heads": ("exaone4_5", {"num_key_value_heads": 4}, {}),
    "MiniCPM-V 4.6 with four times as many embeddings": (
        "minicpmv4_6",
        {},
        {"downsample_mode": "4x", "insert_layer_id": 9},
    ),
    "MiniCPM-OCR with a quarter of its embeddings": ("minicpm_ocr", {}, {"downsample_mode": "16x"}),
    "MiniCPM-V 4.6 with other layers and activations": (
        "minicpmv4_6",
        {"hidden_act": "gelu", "layer_norm_eps": 1e-3, "image_size": 200},
        {"insert_layer_id": 2},
    ),
    "larger windows": ("qwen2_5_vl", {"window_size": 84, "fullatt_block_indexes": [2]}, {}),
    "windows everywhere": ("qwen2_5_vl", {"fullatt_block_indexes": []}, {}),
    "other squares and frames": (
        "qwen2_5_vl",
        {"spatial_merge_size": 1, "temporal_patch_size": 1, "window_size": 28},
        {},
    ),
    "other squares, frames and activations": (
        "qwen2_vl",
        {"spatial_merge_size": 1, "temporal_patch_size": 1, "hidden_act": "gelu", "mlp_ratio": 3},
        {},
    ),
    "biases and a table with a rest": (
        "glm4v",
        {"attention_bias": True, "image_size": 97, "hidden_act": "gelu", "rms_norm_eps": 1e-3},
        {},
    ),
    "GLM-OCR without biases": (
        "glm_ocr",
        {"attention_bias": False, "hidden_act": "gelu", "rms_norm_eps": 1e-3},
        {},
    ),
    "PaddleOCR-VL with larger squares and other wavelengths": (
        "paddleocr_vl",
        {"image_size": 97, "spatial_merge_size": 3, "hidden_act": "gelu", "layer_norm_eps": 1e-3}
        | {"rope_parameters": {"rope_type": "axial", "rope_theta": 100.0}},
        {},
    ),
    "no levels": ("qwen3_vl", {"deepstack_visual_indexes": []}, {}),
    "one level": ("qwen3_vl", {"deepstack_visual_indexes": [2]}, {}),
    "Pixtral's first layer": ("mistral3", {}, {"vision_feature_layer": 1}),
    "Pixtral with other activations and a bias": (
        "mistral3",
        {"hidden_act": "silu"},
        {"projector_hidden_act": "silu", "multimodal_projector_bias": True},
    ),
    "Pixtral with larger squares": ("mistral3", {}, {"spatial_merge_size": 3}),
    "Pixtral with other wavelengths": ("mistral3", {"rope_theta": 100.0}, {}),
    "Kimi with other wavelengths, activations and squares": (
        "kimi_k25",
        {"hidden_act": "gelu", "merge_kernel_size": [3, 3]}
        | {"rope_parameters": {"rope_type": "axial", "rope_theta": 90.0}},
        {"projection_layer_norm_eps": 1e-3},
    ),
    "Muse Glimmer with other wavelengths, activations, squares and layers": (
        "muse_glimmer",
        {"hidden_act": "silu", "merge_size": 1, "patch_temporal": 2, "layer_norm_eps": 1e-3}
        | {"layer_types": None, "pos_emb_height": 5, "pos_emb_width": 5}
        | {"rope_parameters": {"rope_type": "axial", "rope_theta": 90.0}},
        {"out_hidden_size": 32, "projector_hidden_act": "silu"},
    ),
    "LightOnOCR with larger squares, wavelengths and another activation": (
        "lighton_ocr",
        {"hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        {"spatial_merge_size": 4},
    ),
    "LFM2-VL without a norm and biases": (
        "lfm2_vl",
        {"hidden_act": "gelu", "vision_use_head": True, "layer_norm_eps": 1e-3},
        {"projector_use_layernorm": False, "projector_bias": False},
    ),
    "MiniMax M3 with other activations, wavelengths and squares": (
        "minimax_m3",
        {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-3, "spatial_merge_size": 1}
        | {"num_attention_heads": 1, "temporal_patch_size": 1}
        | {"rope_parameters": {"rope_type": "axial", "rope_theta": 50.0}},
        {},
    ),
    "VideoLLaMA 3 with another activation and other rotations": (
        "video_llama_3",
        {"hidden_act": "gelu", "layer_norm_eps": 1e-3, "temporal_patch_size": 1}
        | {"rope_parameters": {"rope_type": "axial", "rope_theta": 50.0}},
        {},
    ),
    "dots.ocr with biases, without a last norm, with other squares": (
        "dots_ocr",
        {"use_bias": True, "post_norm": False, "rms_norm_eps": 1e-3, "spatial_merge_size": 1}
        | {"num_attention_heads": 4, "temporal_patch_size": 1},
        {},
    ),
    "HunyuanOCR with a smaller table and smaller squares": (
        "hunyuan_vl",
        {"max_image_size": 50, "interpolate_mode": "bicubic", "hidden_act": "gelu_pytorch_tanh"}
        | {"rms_norm_eps": 1e-3, "spatial_merge_size": 1, "temporal_patch_size": 1},
        {},
    ),
    "LFM3-VL with other layers and squares": (
        "lfm3_vl",
        {"layer_types": None, "num_hidden_layers": 5, "conv_kernel_size": 5}
        | {"spatial_merge_size": 1, "temporal_patch_size": 1, "norm_eps": 1e-3}
        | {"num_key_value_heads": 2}
        | {"rope_parameters": {"rope_type": "axial", "rope_theta": 50.0}},
        {"projector_hidden_act": "silu", "projector_bias": False},
    ),
    "LFM2-VL with larger squares": (
        "lfm2_vl",
        {"num_patches": 4},
        {"downsample_factor": 3, "projector_hidden_act": "silu"},
    ),
    "other wavelengths": (
        "qwen3_vl",
        {"rope_parameters": {"rope_type": "axial", "rope_theta": 100.0}, "hidden_act": "silu"},
        {},
    ),
}


def some_grid(name: str) -> Grid:
    """A small image of a family."""
    if name in ANY_SIZE:
        return (1, 8, 12)
    if name in TWO_SIZES:
        return (1, 0, 0)
    if name in BESIDE_WHOLE:
        return (2, 1, 1)
    return (3, 110, 64) if name in JOINED else (1, 1, 1)


def make_tiles(config: ModelConfig, grid: Grid, seed: int = 0) -> npt.NDArray[np.uint8]:
    """[tiles, height, width, 3]"""
    assert config.vision is not None
    size = (config.vision.side_of(grid),) * 2
    if config.vision.merge_size:
        size = grid[1] * config.vision.patch_size, grid[2] * config.vision.patch_size
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (grid[0], *size, 3), dtype=np.uint8)


@torch.inference_mode()
def embed(model: DecoderModel, pixels: Tensor, grid: Grid) -> Tensor:
    return model.towers["image"](pixels, grid)


def assert_close(ours: Tensor, reference: Tensor) -> None:
    """Each part of a row, the embedding and its levels, is compared by itself."""
    assert ours.shape == reference.shape
    for own, wanted in zip(ours.split(64, -1), reference.split(64, -1), strict=True):
        if not wanted.any():
            assert not own.any()
            continue
        difference = float((own - wanted).abs().max() / wanted.abs().max())
        assert difference < 1e-5, f"relative difference {difference:.2e}"


Models = Callable[[str], tuple[Any, DecoderModel]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """For each family, transformers' model and ours."""

    @cache
    def made(name: str) -> tuple[Any, DecoderModel]:
        directory = tmp_path_factory.mktemp(name)
        return make_vision_model(name, directory), load(directory)

    return made


@pytest.mark.parametrize(("name", "grid"), CASES)
def test_embeddings_equal_transformers(name: str, grid: Grid, models: Models) -> None:
    reference, model = models(name)
    assert model.config.vision is not None
    tiles = make_tiles(model.config, grid)
    ours = embed(model, normalised(name, tiles), grid)
    assert len(ours) == model.config.vision.num_embeddings(grid)
    assert ours.shape[1] == 64 * (1 + model.config.vision.num_levels)
    assert_close(ours, reference_embeddings(reference, tiles, grid))


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_equal_transformers(variant: str, tmp_path: Path) -> None:
    name, vision, outer = VARIANTS[variant]
    reference = make_vision_model(name, tmp_path, vision=vision, outer=outer)
    model = load(tmp_path)
    assert model.config.vision is not None
    grid = (1, 12, 24) if name in ANY_SIZE else some_grid(name)
    tiles = make_tiles(model.config, grid)
    if "temporal_patch_size" in vision:
        settings: dict[str, Any] = {"merge_size": 1, "temporal_patch_size": 1}
    elif "pooling_kernel_size" in vision:
        settings = {"pooling_kernel_size": vision["pooling_kernel_size"]}
    elif name == "idefics3":
        settings = {"max_image_size": {"longest_edge": model.config.vision.tile_size}}
    else:
        settings = {}
    expected = reference_embeddings(reference, tiles, grid, **settings)
    ours = embed(model, normalised(name, tiles), grid)
    assert len(ours) == model.config.vision.num_embeddings(grid)
    assert_close(ours, expected)


@pytest.mark.parametrize("name", [name for name in TILED if name != "ovis2"])
def test_the_bits_of_a_tile_do_not_depend_on_others(name: str, models: Models) -> None:
    _, model = models(name)
    pixels = normalised(name, make_tiles(model.config, (4, 1, 1)))
    together = embed(model, pixels, (4, 2, 2)).chunk(4)
    for number, part in enumerate(together):
        assert torch.equal(embed(model, pixels[number : number + 1], (1, 1, 1)), part)
    assert not torch.equal(together[0], together[1])


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_bfloat16_is_near_to_float32(name: str, models: Models, tmp_path: Path) -> None:
    reference, model = models(name)
    reference.save_pretrained(tmp_path)
    grid = some_grid(name)
    tiles = make_tiles(model.config, grid)
    rounded = load(tmp_path, torch.bfloat16)
    ours = embed(rounded, normalised(name, tiles), grid)
    assert ours.dtype == torch.bfloat16
    exact = reference_embeddings(reference, tiles, grid)
    error = float((ours.float() - exact).abs().max() / exact.abs().max())
    assert 0 < error < 0.05, f"relative difference {error:.2e}"


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_everything_is_computed_on_the_device_of_the_weights(name: str, models: Models) -> None:
    config = models(name)[1].config

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    model = create_model(config, torch.bfloat16, allocate)
    grid = some_grid(name)
    pixels = normalised(name, make_tiles(config, grid)).to("meta")
    ours = embed(model, pixels, grid)
    assert ours.device.type == "meta"
    assert ours.shape == embed(models(name)[1], torch.zeros(pixels.shape), grid).shape


def test_the_bits_of_a_tile_between_marks_do_not_depend_on_others(models: Models) -> None:
    _, model = models("ovis2")
    pixels = normalised("ovis2", make_tiles(model.config, (3, 1, 2)))
    together = embed(model, pixels, (3, 1, 2))
    for number, first in enumerate((1, 6, 11)):
        alone = embed(model, pixels[number : number + 1], (1, 1, 1))
        assert torch.equal(alone[1:5], together[first : first + 4])


def test_the_bits_of_a_tile_beside_a_whole_do_not_depend_on_others(models: Models) -> None:
    _, model = models("deepseek_ocr2")
    pixels = normalised("deepseek_ocr2", make_tiles(model.config, (2, 2, 1)))
    first, second = embed(model, pixels, (2, 2, 1)).chunk(2)
    assert torch.equal(embed(model, pixels[1:], (1, 1, 1)), second)
    assert not torch.equal(first, second)
    with pytest.raises(ValueError, match="a grid of 3 tiles has 2"):
        embed(model, pixels, (3, 1, 3))
    with pytest.raises(ValueError, match=r"a tile must be \[3, 128, 128\], not \[3, 96, 96\]"):
        embed(model, pixels[:1], (1, 0, 0))


def test_rows_of_tiles_are_those_of_a_picture(models: Models) -> None:
    """The bits of a tile do not depend on others; an embedding ends each row of the picture."""
    _, model = models("deepseek_ocr")
    pixels = normalised("deepseek_ocr", make_tiles(model.config, (2, 1, 2)))
    rows = embed(model, pixels, (2, 1, 2)).view(10, 21, -1)
    first, second = (embed(model, tile[None], (1, 1, 1)).view(10, 11, -1) for tile in pixels)
    assert torch.equal(rows, torch.cat([first[:, :-1], second], 1))
    below = embed(model, pixels, (2, 2, 1)).view(2, 10, 11, -1)
    assert torch.equal(below, torch.stack([first, second]))
    with pytest.raises(ValueError, match="a grid of 1 rows and 2 columns has 3 tiles"):
        embed(model, pixels, (3, 1, 2))


def test_the_bits_of_tiles_beside_a_whole_do_not_depend_on_others(models: Models) -> None:
    """An embedding ends each row, another one is behind the whole."""
    _, model = models("deepseek_vl2")
    pixels = normalised("deepseek_vl2", make_tiles(model.config, (3, 1, 2)))
    whole, picture = embed(model, pixels, (3, 1, 2)).split([13, 21])
    rows = picture.view(3, 7, -1)
    for number, columns in ((1, slice(0, 3)), (2, slice(3, 6))):
        alone = embed(model, pixels[[0, number]], (2, 1, 1))
        assert torch.equal(alone[:13], whole)
        assert torch.equal(alone[13:].view(3, 4, -1)[:, :3], rows[:, columns])
    below = embed(model, pixels, (3, 2, 1))[13:].view(6, 4, -1)
    assert torch.equal(torch.cat([below[:3, :3], below[3:]], 1), rows)
    for grid in ((2, 1, 2), (3, 0, 2)):
        with pytest.raises(ValueError, match=r"a grid of \d rows and 2 columns has \d tiles"):
            embed(model, pixels, grid)
    with pytest.raises(ValueError, match=r"a tile must be \[3, 64, 64\], not \[3, 64, 48\]"):
        embed(model, torch.zeros(2, 3, SIDE, 48), (2, 1, 1))


@pytest.mark.parametrize("name", TILED)
def test_tiles_of_another_size_or_number_are_refused(name: str, models: Models) -> None:
    _, model = models(name)
    with pytest.raises(ValueError, match="a grid of 2 tiles has 1"):
        embed(model, torch.zeros(1, 3, SIDE, SIDE), (2, 1, 1))
    with pytest.raises(ValueError, match=r"a tile must be \[3, 64, 64\], not \[3, 64, 48\]"):
        embed(model, torch.zeros(1, 3, SIDE, 48), (1, 1, 1))


@pytest.mark.parametrize("name", JOINED)
def test_images_whose_tiles_are_others_are_refused(name: str, models: Models) -> None:
    _, model = models(name)
    for grid in ((5, 128, 64), (3, 64, 0), (3, 0, 64)):
        with pytest.raises(ValueError, match="there is no image of the grid"):
            embed(model, torch.zeros(grid[0], 3, SIDE, SIDE), grid)
    with pytest.raises(ValueError, match="a grid of 3 tiles has 2"):
        embed(model, torch.zeros(2, 3, SIDE, SIDE), (3, 128, 64))


@pytest.mark.parametrize("name", JOINED)
def test_tiles_may_be_made_one_by_one(name: str, models: Models) -> None:
    _, model = models(name)
    pixels = normalised(name, make_tiles(model.config, (5, 128, 128)))
    whole = embed(model, pixels, (5, 128, 128))
    parts: Any = list(pixels)
    assert torch.equal(embed(model, parts, (5, 128, 128)), whole)


@pytest.mark.parametrize("name", ANY_SIZE)
def test_images_that_differ_from_their_grid_are_refused(name: str, models: Models) -> None:
    _, model = models(name)
    assert model.config.vision is not None
    size, square = model.config.vision.patch_size, model.config.vision.merge_size
    with pytest.raises(ValueError, match=r"a grid of \[1, 4, 6\] patches has images of"):
        embed(model, torch.zeros(1, 3, 6 * size, 4 * size), (1, 4, 6))
    rest = torch.zeros(1, 3, 4 * size, 5 * size)
    if name == "lighton_ocr":  # which leaves the last column out
        assert len(embed(model, rest, (1, 4, 5))) == 4
        return
    if square == 1:
        assert len(embed(model, rest, (1, 4, 5))) == 20
        return
    with pytest.raises(ValueError, match=f"a grid of 4 x 5 patches has no squares of {square}"):
        embed(model, rest, (1, 4, 5))


@pytest.mark.parametrize("name", TILED)
def test_pixels_are_normalised_as_transformers_does(name: str) -> None:
    rng = np.random.default_rng(1)
    tiles = rng.integers(0, 256, (1, SIDE, SIDE, 3), dtype=np.uint8)
    theirs = pixel_inputs(name, tiles)["pixel_values"]
    assert torch.equal(theirs.flatten(0, -4), normalised(name, tiles))
