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
from shmllm.formats.image_defaults import COMMON, DEFAULTS
from shmllm.formats.processor_files import PROCESSOR, read_object, read_section
from shmllm.formats.published import published_image_settings

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
    fields = COMMON | DEFAULTS.get(processor, {})
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
