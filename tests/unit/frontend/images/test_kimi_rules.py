"""The inputs of Kimi's tower are those of transformers' processor, and of the authors' formulas.

The former needs torchvision, which resizes and fills up pixels; here pillow and numpy take its
place.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.torchvision_modules import (
    import_without_torchvision,
    preprocessed,
    resize_with_pillow,
)
from support.variants import slow

from shmllm.errors import EngineStartError, RequestError
from shmllm.formats.image_settings import pixel_table, settings_of
from shmllm.frontend.images.rules.kimi import KimiRules, KimiVLRules
from shmllm.frontend.images.rules.registry import rules_of_model, rules_of_request

THEIRS = import_without_torchvision("kimi_k25.image_processing_kimi_k25").Kimi_K25ImageProcessor
SIDES = [(1, 1), (28, 28), (14, 13), (60, 29), (500, 3), (3, 500), (31, 400), (128, 96)]
VL = {
    "auto_map": {"AutoImageProcessor": "image_processing_kimi_vl.KimiVLImageProcessor"},
    "patch_size": 14,
    "in_token_limit": 40,
    "pad_input": True,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
K25 = {
    "in_patch_limit": 40,
    "patch_size": 14,
    "merge_kernel_size": 2,
    "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.3] * 3,
    "fixed_output_tokens": None,
    "patch_limit_on_one_side": 9,
}


@pytest.fixture(autouse=True)
def _without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    def pad(self: Any, image: torch.Tensor, pad_size: Any) -> torch.Tensor:
        height, width = image.shape[-2:]
        more = (0, pad_size.width - width, 0, pad_size.height - height)
        return torch.nn.functional.pad(image, more)

    resize_with_pillow(monkeypatch)
    monkeypatch.setattr(THEIRS, "pad", pad)


def sides(count: int = 30) -> list[tuple[int, int]]:
    draw = random.Random(3)
    return SIDES + [(draw.randint(1, 300), draw.randint(1, 300)) for _ in range(count)]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_patches": 40},
        slow({"max_patches": 60, "size": {"max_height": 7, "max_width": 7}, "resample": 2}),
        slow({"max_patches": 99, "patch_size": 5, "merge_size": 3}),
    ],
)
def test_images_are_those_of_transformers(
    changes: dict[str, Any], random_image: Callable[..., Image.Image]
) -> None:
    read = settings_of(changes, "file", "Kimi_K25ImageProcessor")
    rules, theirs = rules_of_model(read), THEIRS(**changes)
    grids = set()
    for width, height in sides():
        image = random_image(width, height)
        found, wanted = rules.tiles(image), preprocessed(theirs, image)
        assert wanted["image_grid_thw"].tolist() == [list(found.grid)]
        planes = np.moveaxis(found.pixels, -1, 1)[0]
        ours = pixel_table(read)[np.arange(3)[:, None, None], planes]
        size = theirs.patch_size
        split = ours.reshape(3, found.grid[1], size, found.grid[2], size).transpose(1, 3, 0, 2, 4)
        assert np.array_equal(split.reshape(-1, 3, size, size), wanted["pixel_values"].numpy())
        grids.add(found.grid)
    assert len(grids) > 9


def test_settings_of_kimi_k25_have_the_authors_names(
    random_image: Callable[..., Image.Image],
) -> None:
    read = settings_of({"media_proc_cfg": K25}, "file")
    assert (read.processor, read.mean, read.std) == (
        "KimiK25VisionProcessor", (0.4, 0.5, 0.6), (0.3, 0.3, 0.3),
    )  # fmt: skip
    assert rules_of_model(read) == KimiRules(
        resize=True, resample=3, patch_size=14, merge_size=2, most=40, longest=9
    )
    small = {"max_patches": 40, "size": {"max_height": 9, "max_width": 9}}
    theirs = rules_of_model(settings_of(small, "file", "Kimi_K25ImageProcessor"))
    assert rules_of_model(read) == theirs
    values = (np.arange(256) / 255).astype(np.float32)
    expected = (values - np.float32(0.4)) / np.float32(0.3)
    assert np.array_equal(pixel_table(read)[0], expected)


def test_kimi_vl_has_the_authors_formula(random_image: Callable[..., Image.Image]) -> None:
    """Images with more patches than the limit are reduced by the root of the ratio of both, and
    filled up with black."""
    rules = rules_of_model(settings_of(VL, "file"))
    assert isinstance(rules, KimiVLRules)
    for width, height in sides():
        image = random_image(width, height)
        count = (width // 14) * (height // 14)
        reduced = image
        if count > 40:
            scale = math.sqrt(40 / count)
            reduced = image.resize((int(width * scale), int(height * scale)), 3)
        pixels = np.asarray(reduced)
        more = [(0, -side % 28) for side in pixels.shape[:2]]
        expected = np.pad(pixels, (*more, (0, 0)))
        found = rules.tiles(image)
        assert np.array_equal(found.pixels[0], expected)
        assert found.grid == (1, expected.shape[0] // 14, expected.shape[1] // 14)
    fewer = rules_of_request(settings_of(VL, "file"), {"in_token_limit": 8})
    assert fewer.tiles(random_image(300, 300)).grid == (1, 4, 4)


def test_very_narrow_images_of_kimi_vl_are_refused(
    random_image: Callable[..., Image.Image],
) -> None:
    rules = rules_of_model(settings_of(VL, "file"))
    with pytest.raises(RequestError, match="of 512x2 patches is too narrow"):
        rules.tiles(random_image(7168, 9))
    assert rules.tiles(random_image(7140, 9)).grid == (1, 2, 510)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (VL | {"pad_input": False}, "'pad_input' false is not supported"),
        (VL | {"merge_kernel_size": [2, 3]}, "'merge_kernel_size' must have two equal numbers"),
        (VL | {"merge_kernel_size": [[2], [2]]}, "'merge_kernel_size' must be a positive integer"),
        (VL | {"merge_kernel_size": []}, "'merge_kernel_size' must have two equal numbers"),
        (VL | {"in_token_limit": 0}, "'in_token_limit' must be a positive integer"),
        ({"media_proc_cfg": K25 | {"fixed_output_tokens": 9}}, "fixed_output_tokens 9 is not"),
        ({"media_proc_cfg": 3}, "'media_proc_cfg' must be an object, not 3"),
        ({"media_proc_cfg": K25 | {"patch_size": "x"}}, "'patch_size' must be a positive integer"),
        ({"auto_map": {"AutoImageProcessor": "a.Other"}}, "'image_processor_type' must be a name"),
        (
            {
                "image_processor_type": "Kimi_K25ImageProcessor",
                "size": {"max_height": 9, "max_width": 8},
            },
            "'size' must be a square",
        ),
    ],
)
def test_other_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineStartError, match=message):
        rules_of_model(settings_of(values, "file"))
