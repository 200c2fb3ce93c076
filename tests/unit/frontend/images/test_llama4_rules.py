"""The sizes and tiles of Llama 4's images are those of transformers' functions.

Its processor needs torchvision, which resizes pixels; its functions choose sizes without it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.torchvision_modules import import_without_torchvision
from support.variants import slow
from transformers.image_transforms import split_to_tiles
from transformers.image_utils import SizeDict

from shmllm.errors import EngineStartError, RequestError
from shmllm.formats.image_settings import settings_of
from shmllm.frontend.images.rules.llama4 import Llama4Rules
from shmllm.frontend.images.rules.registry import rules_of_model, rules_of_request

SIDE = 32
THEIRS = import_without_torchvision("llama4.image_processing_llama4")


def settings(**values: Any) -> Any:
    size = {"height": SIDE, "width": SIDE}
    return settings_of({"size": size} | values, "file", "Llama4ImageProcessor")


def tiles_of_transformers(
    image: Image.Image, most: int, fills: bool
) -> tuple[Any, tuple[int, int]]:
    """The tiles of `Llama4ImageProcessor._preprocess`, resized by pillow, and how they lie."""
    size = SizeDict(height=SIDE, width=SIDE)
    found = THEIRS.find_supported_resolutions.__wrapped__(max_num_chunks=most, patch_size=size)
    sides = image.height, image.width
    target = THEIRS.get_best_fit(sides, torch.tensor(found), resize_to_max_canvas=fills).tolist()
    limit = target
    if not fills:
        limit = [min(max(side, SIDE), most) for side, most in zip(sides, target, strict=True)]
    height, width = THEIRS.get_max_res_without_distortion(sides, tuple(limit))
    resized = image.resize((max(width, 1), max(height, 1)), Image.Resampling.BILINEAR)
    pixels = torch.zeros(1, 3, *target, dtype=torch.uint8)
    own = torch.from_numpy(np.array(resized)).permute(2, 0, 1)
    pixels[0, :, : own.shape[1], : own.shape[2]] = own
    rows, columns = (side // SIDE for side in target)
    tiles = [*split_to_tiles(pixels, rows, columns)[0]]
    if len(tiles) > 1:
        whole = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        tiles.append(torch.from_numpy(np.array(whole)).permute(2, 0, 1))
    return torch.stack(tiles).permute(0, 2, 3, 1).numpy(), (rows, columns)


@pytest.mark.parametrize(
    ("most", "fills"), [(16, False), (5, True), slow(1, False), slow(12, True)]
)
def test_tiles_are_those_of_transformers(
    most: int, fills: bool, random_image: Callable[..., Image.Image]
) -> None:
    rules = rules_of_model(settings(max_patches=most, resize_to_max_canvas=fills))
    draw = random.Random(most)
    sides = [(1, 1), (32, 32), (64, 32), (33, 31), (500, 3), (3, 500), (31, 400), (128, 128)]
    sides += [(draw.randint(1, 200), draw.randint(1, 200)) for _ in range(40)]
    for width, height in sides:
        image = random_image(width, height)
        found = rules.tiles(image)
        wanted, lie = tiles_of_transformers(image, most, fills)
        assert found.grid == (len(wanted), *lie), (width, height)
        assert np.array_equal(found.pixels, wanted), (width, height)


def test_the_defaults_are_those_of_the_class() -> None:
    kind = THEIRS.Llama4ImageProcessor
    found = settings_of({}, "file", "Llama4ImageProcessor")
    assert rules_of_model(found) == Llama4Rules(kind.size["height"], 16, False, int(kind.resample))
    assert kind.max_patches == found.options["max_patches"]
    assert kind.resize_to_max_canvas == found.options["resize_to_max_canvas"]
    assert [*found.mean] == kind.image_mean
    assert [*found.std] == kind.image_std


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_patches": 0}, "'max_patches' must be a positive integer, not 0"),
        ({"max_patches": 10**9}, "'max_patches' .* allows images of 1,024,000,000,000"),
        ({"size": {"height": 32, "width": 64}}, "'size' must be that of a square"),
        ({"resize_to_max_canvas": 1}, "'resize_to_max_canvas' must be true or false"),
    ],
)
def test_other_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineStartError, match=message):
        rules_of_model(settings(**values))
    with pytest.raises(RequestError, match=message):
        rules_of_request(settings(), values)


def test_images_are_always_resized() -> None:
    with pytest.raises(EngineStartError, match="'do_resize' false is not supported"):
        rules_of_model(settings(do_resize=False))
