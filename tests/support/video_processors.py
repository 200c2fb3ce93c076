"""transformers' video processors without torchvision, which they need for pixels only."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

_STUBS = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]


def _qwen2_module() -> Any:
    """Import the module while empty ones stand for torchvision's."""
    missing = [name for name in [*_STUBS, f"{_STUBS[-1]}.functional"] if name not in sys.modules]
    sys.modules.update({name: ModuleType(name) for name in missing})
    try:
        return import_module("transformers.models.qwen2_vl.video_processing_qwen2_vl")
    finally:
        for name in missing:
            del sys.modules[name]


qwen3_module: Any = import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")
qwen2_module = _qwen2_module()
CLASSES: dict[str, Any] = {
    "Qwen2VLVideoProcessor": qwen2_module.Qwen2VLVideoProcessor,
    "Qwen3VLVideoProcessor": qwen3_module.Qwen3VLVideoProcessor,
}
"""By the names that files give them."""
SMART_RESIZE: dict[str, Any] = {
    "Qwen2VLVideoProcessor": qwen2_module.smart_resize,
    "Qwen3VLVideoProcessor": qwen3_module.smart_resize,
}


def sampled(name: str, total: int, rate: float, fields: dict[str, Any]) -> list[int]:
    """The indices of the frames that a class chooses, but none behind the last frame: rounding adds
    one to those of Qwen 2 now and then, which is an error of transformers.

    Args:
        name: of the class.
        total: how many frames the video has.
        rate: those of a second.
        fields: which attributes of the class have other values; of "fps" and "num_frames" those
            that are absent are None.
    """
    kind = CLASSES[name]
    names = "temporal_patch_size", "min_frames", "max_frames"
    values = {each: getattr(kind, each) for each in names} | {"fps": None, "num_frames": None}
    own = SimpleNamespace(**values | fields)
    metadata = SimpleNamespace(total_num_frames=total, fps=rate)
    count = fields.get("num_frames")
    found: list[int] = kind.sample_frames(own, metadata, num_frames=count).tolist()
    return found[:-1] if found[-1] == total else found
