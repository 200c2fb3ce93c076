"""Reads how a model's images become numbers: the settings of its image processor.

transformers 5 writes them into processor_config.json, under "image_processor"; older versions into
preprocessor_config.json. A file may leave fields out; then the defaults of transformers' class
count. The front end reads what it needs to resize images (`ImageSettings.options`), the engine
makes its inputs of the resized uint8 pixels with `pixel_table`. This module must not import torch
or pillow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmllm.errors import EngineStartError
from shmllm.formats import kimi_settings
from shmllm.formats.internvl_chat import published_image_settings
from shmllm.formats.joined_tiles import DEFAULT_SIZES, ONEVISION_SIZES
from shmllm.formats.processor_files import PROCESSOR, read_object, read_section

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
_EVEN = {"temporal_patch_size": 1, "do_sample_frames": False, "fps": 2}
"""What frames that lie evenly have; their number and the rate of the class are None."""
_SAMPLED = {"min_frames": 4, "max_frames": 768, "fps": 2}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "CLIPImageProcessor": _CLIP,
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
    "SiglipImageProcessor": {"resample": BICUBIC, "size": {"height": 224, "width": 224}},
    "Glm46VImageProcessor": _GLM4V,
    "Glm4vImageProcessor": _GLM4V,
    "DeepseekOcr2ImageProcessor": {"resample": BICUBIC, "size": 1024, "tile_size": 768}
    | {"background_color": [127, 127, 127]},
    "GotOcr2ImageProcessor": _CUT,
    "Ovis2ImageProcessor": _CUT | {"use_covering_area_grid": True},
    "GraniteDoclingImageProcessor": _CUT_512 | {"max_patches": 32},
    "Cohere2VisionImageProcessor": _CUT_512 | {"patch_size": 16},
    "JanusImageProcessor": {
        "image_mean": _CLIP_MEAN,
        "image_std": _CLIP_STD,
        "resample": BICUBIC,
        "size": {"height": 384, "width": 384},
        "min_size": 14,
        "do_pad": True,
    },
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
"""What transformers' classes have where a file is silent. `_COMMON` holds for all of them."""
_COMMON: dict[str, Any] = {
    "image_mean": _HALF,
    "image_std": _HALF,
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
}
_OF_THE_PROCESSOR = {
    "Lfm2VlImageProcessor": ("use_image_special_tokens",),
    "MiniCPMOcrImageProcessor": ("use_image_id",),
    "MiniCPMV4_6ImageProcessor": ("use_image_id",),
    "PixtralImageProcessor": ("patch_size", "spatial_merge_size"),
}
"""The fields that the whole file of a processor has beside its image processor, and which count."""
OWN = "own_"
"""What stands before the name of a field of an image processor in whose place such a field is."""
_IN_BFLOAT16 = ("Llama4ImageProcessor",)
"""The processors that compute with bfloat16 numbers."""
_SCALED_BY_STD = (
    *("Cohere2VisionImageProcessor", "Lfm2VlImageProcessor"),
    *("Kimi_K25ImageProcessor", "MuseGlimmerImageProcessor", "MuseGlimmerVideoProcessor"),
)
"""The processors without a class on pillow: the scaling is part of mean and deviation."""
_OF_THE_TABLE = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """The settings of an image processor.

    Attributes:
        where: the file, for messages.
        processor: the name of transformers' class, without "Fast" or "Pil".
        do_rescale: whether pixels are multiplied by `rescale_factor`.
        rescale_factor: 1/255 in all known files.
        do_normalize: whether `mean` is subtracted and the difference divided by `std`.
        mean: of the three channels, after the scaling.
        std: of the three channels, after the scaling.
        options: all other fields, among them "do_resize", "size" and "resample"; read-only. A field
            that is null in the file has the default of transformers' class, or is absent.
    """

    where: str
    processor: str
    do_rescale: bool
    rescale_factor: float
    do_normalize: bool
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    options: Mapping[str, Any]

    def with_options(self, **options: Any) -> ImageSettings:
        """These settings with other options."""
        return replace(self, options=MappingProxyType({**self.options, **options}))


def read_image_settings(directory: Path) -> ImageSettings | None:
    """Reads the settings of the image processor in a model's directory.

    Returns:
        None if the directory has none.

    Raises:
        EngineStartError: a file cannot be read, or a field has a wrong type.
    """
    if (published := published_image_settings(directory)) is not None:
        return settings_of(published, str(directory / "config.json"))
    found = read_section(directory, "image_processor")
    if found is None:
        return None
    settings = settings_of(found[0], str(found[1]))
    whole = read_object(directory / PROCESSOR) or {}
    names = _OF_THE_PROCESSOR.get(settings.processor, ())
    outer = {name: whole[name] for name in names if whole.get(name) is not None}
    own = {f"{OWN}{name}": settings.options[name] for name in outer}
    return settings.with_options(**own, **outer)


def settings_of(values: Any, where: str, processor: str | None = None) -> ImageSettings:
    """The settings in an object of a file.

    Args:
        values: the object.
        where: its name in messages.
        processor: the name of transformers' class, if the object does not name it.

    Raises:
        EngineStartError: it is no object, or a field that `pixel_table` needs has a wrong type.
    """
    if not isinstance(values, dict):
        raise EngineStartError(f"{where}: the image processor must be an object, not {values!r}")
    values = kimi_settings.in_known_terms(values, where)
    processor = processor or _class_name(values, where)
    fields = _COMMON | _DEFAULTS.get(processor, {})
    fields |= {name: value for name, value in values.items() if value is not None}
    return ImageSettings(
        where=where,
        processor=processor,
        do_rescale=_flag(fields, "do_rescale", where),
        rescale_factor=_number(fields["rescale_factor"], "rescale_factor", where),
        do_normalize=_flag(fields, "do_normalize", where),
        mean=_channels(fields, "image_mean", where),
        std=_channels(fields, "image_std", where),
        options=MappingProxyType(
            {name: value for name, value in fields.items() if name not in _OF_THE_TABLE}
        ),
    )


def pixel_table(settings: ImageSettings) -> NDArray[np.float32]:
    """The model's inputs for the 256 values of a pixel, float32 of shape [3, 256], by channel.

    The bits are those of transformers' `PilBackend`: a product in float64, rounded to float32, then
    a subtraction and a division in float32. Some processors round each result to bfloat16, or have
    the scale in mean and deviation, as `TorchvisionBackend`.
    """
    if settings.processor in _IN_BFLOAT16 and settings.do_rescale and settings.do_normalize:
        return _bfloat16_table(settings)
    values, factor = np.arange(256, dtype=np.float64), np.float32(1)
    scale = settings.rescale_factor
    if settings.do_rescale:
        if scale and settings.do_normalize and settings.processor in _SCALED_BY_STD:
            factor = np.float32(1 / scale)
        else:
            values = values * scale
    table = np.repeat(values.astype(np.float32)[None], 3, axis=0)
    if settings.do_normalize:
        mean, std = (
            np.array(each, np.float32)[:, None] * factor for each in (settings.mean, settings.std)
        )
        table = (table - mean) / std
    return table


def _bfloat16_table(settings: ImageSettings) -> NDArray[np.float32]:
    scaled = _rounded(np.arange(256, dtype=np.float32) * np.float32(settings.rescale_factor))
    mean, std = (
        _rounded(np.array(each, np.float32))[:, None] for each in (settings.mean, settings.std)
    )
    return _rounded(_rounded(scaled[None] - mean) / std)


def _rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Finite numbers rounded to the nearest of bfloat16, of two as near ones to the even one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    kept = (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    return kept.view(np.float32)


def _class_name(values: dict[str, Any], where: str) -> str:
    """Files of transformers 4.25 and older name a feature extractor."""
    name = values.get("image_processor_type")
    if name is None:
        name = values.get("feature_extractor_type")
    if not isinstance(name, str):
        raise EngineStartError(
            f"{where}: field 'image_processor_type' must be a name, not {name!r}"
        )
    name = name.removesuffix("Fast").removesuffix("Pil")
    stem = name.removesuffix("FeatureExtractor")
    return name if stem == name else f"{stem}ImageProcessor"


def _flag(fields: dict[str, Any], name: str, where: str) -> bool:
    value = fields[name]
    if not isinstance(value, bool):
        raise EngineStartError(f"{where}: {name!r} must be true or false, not {value!r}")
    return value


def _number(value: Any, name: str, where: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise EngineStartError(f"{where}: {name!r} must consist of finite numbers, not {value!r}")
    return float(value)


def _channels(fields: dict[str, Any], name: str, where: str) -> tuple[float, float, float]:
    """Three numbers, or one for all channels."""
    value = fields[name]
    values = list(value) if isinstance(value, list | tuple) else [value] * 3
    if len(values) != 3:
        raise EngineStartError(f"{where}: {name!r} must have 3 numbers, not {len(values)}")
    red, green, blue = (_number(each, name, where) for each in values)
    if name == "image_std" and 0 in (red, green, blue):
        raise EngineStartError(f"{where}: {name!r} must not contain 0")
    return red, green, blue
