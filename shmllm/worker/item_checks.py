"""Whether an item is what a model's tower takes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from shmllm.errors import RequestError
from shmllm.models.audio.specs import AudioSpec
from shmllm.models.text.specs import TextSpec
from shmllm.models.vision.specs import VisionSpec
from shmllm.params.items import COUNTED, Item
from shmllm.worker.prompt_embeds import check_values

Spec = VisionSpec | AudioSpec | TextSpec


def check_item_embeds(
    item: Item, specs: Mapping[str, Spec], width: int, dtype: torch.dtype
) -> None:
    """Check an item of which a user gives the embeddings.

    Args:
        item: the item.
        specs: the model's towers, by modality.
        width: the number of values of an embedding.
        dtype: the model's.

    Raises:
        RequestError: the model has no tower for it, its data are no such embeddings, or they are
            not as many as its grid has, if that decides on positions.
    """
    spec = _spec_of(item, specs)
    if isinstance(spec, VisionSpec) and spec.has_axes:
        _check_count(item, spec)
    if isinstance(spec, TextSpec) or item.data.shape != (item.num_embeds, width):
        raise RequestError(
            f"an item ({item.modality}) has embeddings of shape {list(item.data.shape)} instead of "
            f"{[item.num_embeds, width]}"
        )
    check_values("an item has", torch.tensor(item.data).to(dtype))


def _check_count(item: Item, vision: VisionSpec) -> None:
    """Raise RequestError unless an image or video of a model whose tokens have positions on several
    axes has as many embeddings as its grid, in one piece."""
    is_video = item.modality == "video"
    count = (vision.num_video_embeddings if is_video else vision.num_embeddings)(item.grid)
    if not count or item.num_embeds != count or len(item.spans) != 1:
        raise RequestError(
            f"an item ({item.modality}) of grid {item.grid} has {item.num_embeds} embeddings in "
            f"{len(item.spans)} pieces instead of {count} in one"
        )


def _spec_of(item: Item, specs: Mapping[str, Spec]) -> Spec:
    spec = specs.get(item.modality)
    if spec is None:
        raise RequestError(f"the model takes no {COUNTED[item.modality]}")
    return spec


def check_item(item: Item, specs: Mapping[str, Spec]) -> None:
    """Check an item.

    Args:
        item: the item.
        specs: the model's towers, by modality.

    Raises:
        RequestError: the model has no tower for it, or its data or its number of embeddings are not
            those of its grid.
    """
    spec = _spec_of(item, specs)
    expected: tuple[int, ...] | None
    if isinstance(spec, TextSpec):
        expected = (item.grid[0],)
    elif isinstance(spec, AudioSpec):
        expected = _shape_of_sound(item, spec)
    elif item.modality == "video":
        expected = _shape_of_video(item, spec)
    else:
        expected = _shape_of_image(item, spec)
    count = spec.num_embeddings(item.grid) if expected else 0
    if item.modality == "video" and expected and isinstance(spec, VisionSpec):
        count = spec.num_video_embeddings(item.grid)
    if item.data.shape != expected or item.num_embeds != count or not count:
        raise RequestError(
            f"an item ({item.modality}) of grid {item.grid} has data of shape {item.data.shape} "
            f"and {item.num_embeds} embeddings instead of {expected} and {count}"
        )
    if isinstance(spec, AudioSpec) and not np.isfinite(item.data).all():
        raise RequestError("the features of a sound must be finite numbers")


def _shape_of_image(item: Item, vision: VisionSpec) -> tuple[int, ...] | None:
    """The shape of the pixels of a grid; None if there is no such grid."""
    tiles, rows, columns = item.grid
    if side := vision.side_of(item.grid):
        return tiles, side, side, 3
    if tiles != 1 or (vision.has_axes and len(item.spans) != 1):
        return None
    if not vision.num_embeddings(item.grid):
        return None
    return tiles, rows * vision.patch_size, columns * vision.patch_size, 3


def _shape_of_video(item: Item, vision: VisionSpec) -> tuple[int, ...] | None:
    """The shape of the pixels of a grid; None if there is no such grid, or if the embeddings do not
    lie as the model has them: in one piece, or in as many as the grid has frames."""
    assert vision.video is not None, "it takes videos"
    frames, rows, columns = item.grid
    size = vision.patch_size
    if not vision.num_video_embeddings(item.grid):
        return None
    lengths = {end - begin for begin, end in item.spans}
    if len(item.spans) != (1 if vision.video.in_one_piece else frames) or len(lengths) > 1:
        return None
    if vision.tile_size:
        return (frames, vision.tile_size, vision.tile_size, 3) if rows == columns == 1 else None
    return frames * vision.num_joined, rows * size, columns * size, 3


def _shape_of_sound(item: Item, audio: AudioSpec) -> tuple[int, ...] | None:
    """The shape of the features of a grid; None if there is no such grid."""
    frames, part, others = item.grid
    if others != 1 or part < 1 or (part > 1 and not audio.counts_parts):
        return None
    if not 0 < frames <= audio.tower.most_frames:
        return None
    return audio.tower.num_inputs(frames), audio.tower.num_mels
