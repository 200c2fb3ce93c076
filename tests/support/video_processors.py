"""transformers' video processors without torchvision, which they need for pixels only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from support.torchvision_modules import import_without_torchvision

qwen2_module, qwen3_module, glm4v_module, glm46v_module, muse_module = (
    import_without_torchvision(f"{name}.video_processing_{name}")
    for name in ("qwen2_vl", "qwen3_vl", "glm4v", "glm46v", "muse_glimmer")
)
CLASSES: dict[str, Any] = {
    "Glm46VVideoProcessor": glm46v_module.Glm46VVideoProcessor,
    "Glm4vVideoProcessor": glm4v_module.Glm4vVideoProcessor,
    "MuseGlimmerVideoProcessor": muse_module.MuseGlimmerVideoProcessor,
    "Qwen2VLVideoProcessor": qwen2_module.Qwen2VLVideoProcessor,
    "Qwen3VLVideoProcessor": qwen3_module.Qwen3VLVideoProcessor,
}
"""By the names that files give them."""
SMART_RESIZE: dict[str, Any] = {
    "Glm46VVideoProcessor": glm46v_module.smart_resize,
    "Glm4vVideoProcessor": glm4v_module.smart_resize,
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


def sampled_of_glm(name: str, total: int, rate: float, fields: dict[str, Any]) -> list[int]:
    """The same for a class of GLM, which repeats the last frame if their number is odd; here it is
    not repeated."""
    own = SimpleNamespace(**{"temporal_patch_size": 2, "fps": 2, "max_duration": 300} | fields)
    metadata = SimpleNamespace(total_num_frames=total, fps=rate, duration=total / rate)
    found: list[int] = CLASSES[name].sample_frames(own, metadata).tolist()
    return [*dict.fromkeys(found)]
