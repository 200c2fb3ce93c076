"""transformers' greedy tokens for prompts with images and videos."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from support.one_thread import one_thread
from support.vision_models import joined_inputs, normalised
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from shmllm.params.items import Item

SECONDS = {
    "qwen2_5_vl": "second_per_grid_ts",
    **dict.fromkeys(("qwen2_5_omni", "qwen3_omni_moe"), "video_second_per_grid"),
}
"""The argument with the seconds between frames, of the families that have one."""


def patches_of_frames(model: Any, frames: npt.NDArray[np.uint8]) -> tuple[Tensor, list[int]]:
    """What transformers' video processor makes of frames that have their size already: [patches,
    values] and the grid. The order is that of the processor's documentation.

    Args:
        model: what `make_vision_model` returned.
        frames: [frames, height, width, 3].
    """
    vision = model.config.vision_config
    if model.vision_family == "muse_glimmer":  # whose order is that of rows
        size, joined = vision.patch_size, vision.patch_temporal
        pixels = normalised(model.vision_family, frames).unflatten(0, (-1, joined))
        in_patches = pixels.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
        ordered = in_patches.permute(0, 3, 5, 1, 2, 4, 6)
        return ordered.flatten(0, 2).flatten(1), [*ordered.shape[:3]]
    size, merge, joined = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
    values = normalised(model.vision_family, frames).numpy()
    count, channels, height, width = values.shape
    grid = [count // joined, height // size, width // size]
    parts = values.reshape(
        grid[0], joined, channels, grid[1] // merge, merge, size, grid[2] // merge, merge, size
    ).transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    patches = np.ascontiguousarray(parts).reshape(np.prod(grid), -1)
    return torch.from_numpy(patches), grid


@one_thread()
@torch.inference_mode()
def reference_tokens(
    model: Any,
    token_ids: Sequence[int],
    items: Sequence[Item],
    max_new_tokens: int = 12,
    **sounds: Tensor,
) -> list[int]:
    """transformers' greedy tokens; nothing but their number ends them.

    Args:
        model: what `make_vision_model` returned.
        token_ids: the expanded prompt.
        items: its images and videos, in order.
        max_new_tokens: how many.
        sounds: what the model takes for sounds.
    """
    ids = torch.tensor([list(token_ids)])
    inputs: dict[str, Any] = {**sounds}
    images = [item for item in items if item.modality == "image"]
    videos = [item for item in items if item.modality == "video"]
    if images:
        inputs |= joined_inputs(model.vision_family, images)
    if videos and model.vision_family.startswith("gemma4"):
        frames = joined_inputs(model.vision_family, videos)
        inputs["pixel_values_videos"] = frames["pixel_values"]
        inputs["video_position_ids"] = frames["image_position_ids"]
        inputs["num_frames_per_video"] = torch.tensor([item.grid[0] for item in videos])
    elif videos and model.vision_family.startswith("llava"):
        inputs["mm_encoder_outputs"] = encoded(model, inputs, videos)
    elif videos:
        found = [patches_of_frames(model, item.data) for item in videos]
        inputs["pixel_values_videos"] = torch.cat([patches for patches, _ in found])
        inputs["video_grid_thw"] = torch.tensor([grid for _, grid in found])
        if name := SECONDS.get(model.vision_family):
            inputs[name] = torch.tensor([item.frame_seconds for item in videos])
    config = model.config
    is_image, is_video = ids == config.image_token_id, ids == config.video_token_id
    if model.vision_family.startswith("glm"):
        begun, ended = (
            (ids == token).cumsum(1)
            for token in (config.video_start_token_id, config.video_end_token_id)
        )
        is_image, is_video = is_image & (begun <= ended), is_image & (begun > ended)
    if not any(each in model.vision_family for each in ("omni", "exaone", "muse", "llava", "lfm")):
        inputs["mm_token_type_ids"] = is_image.long() + 2 * is_video.long()
    with placed(model, is_image, is_video):
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
            **inputs,
        )
    tokens: list[int] = output[0, len(token_ids) :].tolist()
    return tokens


def encoded(model: Any, inputs: dict[str, Any], videos: Sequence[Item]) -> dict[str, Any]:
    """The embeddings of LLaVA's images, whose inputs this removes, and of its videos: transformers
    takes several videos of a prompt if they have as many frames."""
    found = {}
    if inputs:
        found["image"] = model.get_image_features(**inputs)
        inputs.clear()
    each = [
        model.get_video_features(normalised(model.vision_family, item.data)[None])
        for item in videos
    ]
    joined = torch.cat([one.pooler_output for one in each], 1)
    return found | {"video": BaseModelOutputWithPooling(pooler_output=joined)}


@contextmanager
def placed(model: Any, is_image: Tensor, is_video: Tensor) -> Iterator[None]:
    """transformers 5.24 takes all image tokens of GLM for those of images, and for those of videos,
    too, and refuses prompts with both. Inside of the context it has the places of each."""
    if not model.vision_family.startswith("glm"):
        yield
        return
    model.model.get_placeholder_mask = lambda *_, **__: (is_image[..., None], is_video[..., None])
    try:
        yield
    finally:
        del model.model.get_placeholder_mask
