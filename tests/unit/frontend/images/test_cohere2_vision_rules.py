"""The inputs of Command A Vision's tower are those of transformers' processor.

It needs torchvision, which resizes pixels; here pillow takes its place.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.torchvision_modules import (
    import_without_torchvision,
    preprocessed,
    resize_with_pillow,
)
from support.variants import slow

from shmllm.errors import EngineStartError, RequestError
from shmllm.formats.image_settings import pixel_table, settings_of
from shmllm.frontend.images.rules.cohere2_vision import Cohere2VisionRules
from shmllm.frontend.images.rules.registry import rules_of_model, rules_of_request

THEIRS = import_without_torchvision(
    "cohere2_vision.image_processing_cohere2_vision"
).Cohere2VisionImageProcessor
SMALL = {"size": {"height": 32, "width": 32}, "patch_size": 2}


def settings(**values: Any) -> Any:
    return settings_of(values, "file", "Cohere2VisionImageProcessor")


@pytest.fixture(autouse=True)
def _without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    resize_with_pillow(monkeypatch)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        slow({"max_patches": 5, "min_patches": 3, "resample": 2}),
        slow({"crop_to_patches": False}),
    ],
)
def test_tiles_are_those_of_transformers(
    changes: dict[str, Any], random_image: Callable[..., Image.Image]
) -> None:
    read = settings(**SMALL, **changes)
    rules, theirs, draw = rules_of_model(read), THEIRS(**SMALL, **changes), random.Random(3)
    sides = [(1, 1), (32, 32), (64, 32), (33, 31), (500, 3), (3, 500), (31, 400), (128, 96)]
    sides += [(draw.randint(1, 200), draw.randint(1, 200)) for _ in range(40)]
    counts = set()
    for width, height in sides:
        image = random_image(width, height)
        found, wanted = rules.tiles(image), preprocessed(theirs, image)
        assert found.grid[0] == len(wanted["pixel_values"]) == wanted["num_patches"][0]
        assert found.grid[0] == theirs.get_number_of_image_patches(height, width)
        planes = np.moveaxis(found.pixels, -1, 1)
        ours = pixel_table(read)[np.arange(3)[:, None, None], planes]
        assert np.array_equal(ours, wanted["pixel_values"].numpy())
        counts.add(found.grid[0])
    assert len(counts) > 3 or "crop_to_patches" in changes


def test_the_defaults_are_those_of_the_class() -> None:
    found = settings()
    for name in ("crop_to_patches", "max_patches", "min_patches", "patch_size", "resample", "size"):
        assert found.options[name] == getattr(THEIRS, name), name
    assert ([*found.mean], [*found.std]) == (THEIRS.image_mean, THEIRS.image_std)
    assert rules_of_model(found) == Cohere2VisionRules((512, 512), True, 12, 3, 16)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_patches": 0}, "'max_patches' must be a positive integer, not 0"),
        ({"max_patches": 10**6}, r"'max_patches' \(1000000\) allows images of"),
        ({"size": {"longest_edge": 9}}, "'size' must have the keys 'height' and 'width'"),
        ({"crop_to_patches": 1}, "'crop_to_patches' must be true or false, not 1"),
    ],
)
def test_other_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineStartError, match=message):
        rules_of_model(settings(**values))
    with pytest.raises(RequestError, match=message):
        rules_of_request(settings(), values)


def test_the_number_of_embeddings_is_the_models() -> None:
    with pytest.raises(RequestError, match="'patch_size' is not supported for Cohere2Vision"):
        rules_of_request(settings(), {"patch_size": 8})
