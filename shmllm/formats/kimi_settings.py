"""Reads the settings of images of Kimi K2.5 and Kimi-VL as the models' authors publish them, in the
terms of `image_settings`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmllm.errors import EngineStartError

K25, VL = "KimiK25VisionProcessor", "KimiVLImageProcessor"
"""The names of the authors' classes, which only ``auto_map`` has."""
_NAMES = {
    "in_patch_limit": "max_patches",
    "patch_size": "patch_size",
    "merge_kernel_size": "merge_size",
    "image_mean": "image_mean",
    "image_std": "image_std",
}


def in_known_terms(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the settings with the name of their class, and those of Kimi K2.5 under the names of
    transformers' class; others as they are.

    Args:
        values: the settings.
        where: their file, for messages.

    Raises:
        EngineStartError: a field is not supported.
    """
    if "media_proc_cfg" in values:
        return _of_k25(values["media_proc_cfg"], where)
    own = values.get("auto_map")
    name = own.get("AutoImageProcessor") if isinstance(own, Mapping) else None
    if isinstance(name, str) and name.endswith(f".{VL}"):
        return {**values, "image_processor_type": VL}
    return dict(values)


def _of_k25(settings: Any, where: str) -> dict[str, Any]:
    if not isinstance(settings, Mapping):
        raise EngineStartError(f"{where}: 'media_proc_cfg' must be an object, not {settings!r}")
    if (fixed := settings.get("fixed_output_tokens")) is not None:
        raise EngineStartError(
            f"{where}: fixed_output_tokens {fixed!r} is not supported; supported: null"
        )
    found = {new: settings[old] for old, new in _NAMES.items() if settings.get(old) is not None}
    if (side := settings.get("patch_limit_on_one_side")) is not None:
        found["size"] = {"max_height": side, "max_width": side}
    return {"image_processor_type": K25, **found}
