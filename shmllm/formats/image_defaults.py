"""What transformers' image and video processors have where a model's files are silent."""

from __future__ import annotations

from typing import Any

from shmllm.formats import kimi_settings
from shmllm.formats.joined_tiles import DEFAULT_SIZES, ONEVISION_SIZES

NEAREST, LANCZOS, BILINEAR, BICUBIC, BOX, HAMMING = range(6)
"""The values of "resample" in the files: pillow's filters."""

_HALF = (0.5, 0.5, 0.5)
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_CLIP = {
    "image_mean": _CLIP_MEAN,
    "image_std": _CLIP_STD,
    "resample": BICUBIC,
    "size": {"shortest_edge": 224},
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
}
_CUT = {
    "image_mean": _CLIP_MEAN,
    "image_std": _CLIP_STD,
    "resample": BICUBIC,
    "size": {"height": 384, "width": 384},
    "crop_to_patches": False,
    "min_patches": 1,
    "max_patches": 12,
}
_CUT_512 = _CUT | {"size": {"height": 512, "width": 512}, "crop_to_patches": True}
_IDEFICS3 = {
    "resample": LANCZOS,
    "size": {"longest_edge": 4 * 364},
    "max_image_size": {"longest_edge": 364},
    "do_image_splitting": True,
}
_QWEN2_VL = {
    "image_mean": _CLIP_MEAN,
    "image_std": _CLIP_STD,
    "resample": BICUBIC,
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
_ERNIE4_5_VL = _QWEN2_VL | {
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 6177},
    "temporal_patch_size": 1,
}
MINIMAX_M3_SIZE = {"shortest_edge": 4 * 28 * 28, "longest_edge": 451_584}
_KIMI_K25 = {
    "resample": BICUBIC,
    "size": {"max_height": 512, "max_width": 512},
    "max_patches": 16384,
    "patch_size": 14,
    "merge_size": 2,
}
_PIXTRAL = {
    "image_mean": _CLIP_MEAN,
    "image_std": _CLIP_STD,
    "resample": BICUBIC,
    "size": {"longest_edge": 1024},
    "patch_size": {"height": 16, "width": 16},
    "spatial_merge_size": 1,  # the processor's default; the image processor has none
}
_MINICPM = {
    "resample": BICUBIC,
    "max_slice_nums": 9,
    "scale_resolution": 448,
    "patch_size": 14,
    "slice_mode": True,
    "downsample_mode": "16x",
    "use_image_id": True,
}
_GLM4V = _QWEN2_VL | {"size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}}
_GLM4V_VIDEO = _QWEN2_VL | {
    "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000},
    "do_sample_frames": True,
    "fps": 2,
    "max_duration": 300,
}
_GEMMA4 = {
    "image_mean": (0.0, 0.0, 0.0),
    "image_std": (1.0, 1.0, 1.0),
    "resample": BICUBIC,
    "patch_size": 16,
    "max_soft_tokens": 280,
    "pooling_kernel_size": 3,
}
_GEMMA4_VIDEO = _GEMMA4 | {
    "max_soft_tokens": 70,
    "temporal_patch_size": 1,
    "do_sample_frames": True,
    "num_frames": 32,
    "fps": 24,  # those of frames without a rate
}
_MUSE = {
    "resample": LANCZOS,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
_JANUS = {
    "image_mean": _CLIP_MEAN,
    "image_std": _CLIP_STD,
    "resample": BICUBIC,
    "size": {"height": 384, "width": 384},
    "min_size": 14,
    "do_pad": True,
}
_EVEN = {"temporal_patch_size": 1, "do_sample_frames": False, "fps": 2}
"""What frames that lie evenly have; their number and the rate of the class are None."""
_SAMPLED = {"min_frames": 4, "max_frames": 768, "fps": 2}
DEFAULTS: dict[str, dict[str, Any]] = {
    "CLIPImageProcessor": _CLIP,
    "ChineseCLIPImageProcessor": _CLIP,
    "LlavaImageProcessor": _CLIP | {"do_pad": False},
    "LlavaNextImageProcessor": _CLIP
    | {
        "do_pad": True,
        "image_grid_pinpoints": [list(size) for size in DEFAULT_SIZES],
    },
    "LlavaOnevisionImageProcessor": {
        "image_mean": _CLIP_MEAN,
        "image_std": _CLIP_STD,
        "resample": BICUBIC,
        "size": {"height": 384, "width": 384},
        "image_grid_pinpoints": [list(size) for size in ONEVISION_SIZES],
    },
    "LlavaNextVideoVideoProcessor": _CLIP | _EVEN | {"num_frames": 8},
    "LlavaOnevisionVideoProcessor": _EVEN
    | {
        "image_mean": _CLIP_MEAN,
        "image_std": _CLIP_STD,
        "resample": BICUBIC,
        "size": {"height": 384, "width": 384},
        "num_frames": 32,
    },
    "Siglip2ImageProcessor": {"resample": BILINEAR, "patch_size": 16, "max_num_patches": 256},
    "BlipImageProcessor": {
        "image_mean": _CLIP_MEAN,
        "image_std": _CLIP_STD,
        "resample": BICUBIC,
        "size": {"height": 384, "width": 384},
    },
    "SiglipImageProcessor": {"resample": BICUBIC, "size": {"height": 224, "width": 224}},
    "Glm46VImageProcessor": _GLM4V,
    "Glm4vImageProcessor": _GLM4V,
    "DeepseekOcr2ImageProcessor": {"resample": BICUBIC, "size": 1024, "tile_size": 768}
    | {"background_color": [127, 127, 127]},
    "GotOcr2ImageProcessor": _CUT,
    "Ovis2ImageProcessor": _CUT | {"use_covering_area_grid": True},
    "GraniteDoclingImageProcessor": _CUT_512 | {"max_patches": 32},
    "Cohere2VisionImageProcessor": _CUT_512 | {"patch_size": 16},
    "JanusImageProcessor": _JANUS,
    "DeepseekVLImageProcessor": _JANUS,
    "Kimi_K25ImageProcessor": _KIMI_K25,
    kimi_settings.K25: _KIMI_K25,
    kimi_settings.VL: {
        "image_mean": _CLIP_MEAN,
        "image_std": _CLIP_STD,
        "resample": BICUBIC,
        "patch_size": 14,
        "in_token_limit": 4096,
        "merge_kernel_size": [2, 2],
        "pad_input": False,
    },
    "Llama4ImageProcessor": {
        "resample": BILINEAR,
        "size": {"height": 336, "width": 336},
        "max_patches": 16,
        "resize_to_max_canvas": False,
    },
    "MiniCPMOcrImageProcessor": _MINICPM | {"downsample_mode": "4x"},
    "MiniCPMV4_6ImageProcessor": _MINICPM,
    "Lfm2VlImageProcessor": {
        "resample": BILINEAR,
        "downsample_factor": 2,
        "do_image_splitting": True,
        "min_tiles": 2,
        "max_tiles": 10,
        "use_thumbnail": True,
        "min_image_tokens": 64,
        "max_image_tokens": 256,
        "encoder_patch_size": 16,
        "tile_size": 512,
        "max_pixels_tolerance": 2.0,
        "use_image_special_tokens": True,  # the processor's default; the image processor has none
    },
    "Idefics3ImageProcessor": _IDEFICS3,
    "SmolVLMImageProcessor": _IDEFICS3,
    "Qwen2VLImageProcessor": _QWEN2_VL,
    "Qwen2_5_VLImageProcessor": _QWEN2_VL,
    "Ernie4_5_VLMoeImageProcessor": _ERNIE4_5_VL,
    "Ernie4_5_VL_MoeImageProcessor": _ERNIE4_5_VL,
    "Glm46VVideoProcessor": _GLM4V_VIDEO,
    "Glm4vVideoProcessor": _GLM4V_VIDEO,
    "Qwen2VLVideoProcessor": _QWEN2_VL
    | _SAMPLED
    | {
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
        "do_sample_frames": False,
    },
    "Qwen3VLVideoProcessor": _QWEN2_VL
    | _SAMPLED
    | {
        "image_mean": _HALF,
        "image_std": _HALF,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
        "patch_size": 16,
        "do_sample_frames": True,
    },
    "MiniMaxM3VLImageProcessor": _QWEN2_VL | {"size": MINIMAX_M3_SIZE},
    "VideoLlama3ImageProcessor": _QWEN2_VL
    | {
        "image_mean": _HALF,
        "image_std": _HALF,
        "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
        "temporal_patch_size": 1,
        "merge_size": 1,
    },
    "HunYuanVLImageProcessor": _QWEN2_VL
    | {
        "size": {"shortest_edge": 512 * 512, "longest_edge": 2048 * 2048},
        "patch_size": 16,
        "temporal_patch_size": 1,
    },
    "PaddleOCRVLImageProcessor": _QWEN2_VL
    | {
        "size": {"shortest_edge": 384 * 384, "longest_edge": 1536 * 1536},
        "temporal_patch_size": 1,
    },
    "MuseGlimmerImageProcessor": _MUSE | {"max_image_tokens": 4096},
    "MuseGlimmerVideoProcessor": _MUSE
    | {
        "max_video_frame_tokens": 144,
        "do_sample_frames": True,
        "num_frames": 96,
        "fps": 2.0,
        "frame_timestamp_format": "Time: {timestamp:.1f}s",
    },
    "PixtralImageProcessor": _PIXTRAL,
    "Gemma3ImageProcessor": {
        "resample": BILINEAR,
        "size": {"height": 224, "width": 224},
        # The processor's defaults: those of the image processor are None.
        "do_pan_and_scan": False,
        "pan_and_scan_min_crop_size": 256,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    },
    "Gemma4ImageProcessor": _GEMMA4 | {"do_normalize": False},
    "Gemma4UnifiedImageProcessor": _GEMMA4 | {"do_normalize": False},
    "Gemma4UnifiedVideoProcessor": _GEMMA4_VIDEO,
    "Gemma4VideoProcessor": _GEMMA4_VIDEO,
}
"""What transformers' classes have where a file is silent. `COMMON` holds for all of them."""
COMMON: dict[str, Any] = {
    "image_mean": _HALF,
    "image_std": _HALF,
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
}
