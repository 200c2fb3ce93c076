"""Images of MiniMax M3 are prepared as by transformers' processor."""

from __future__ import annotations

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

from shmllm.errors import EngineStartError
from shmllm.formats.image_settings import pixel_table, settings_of
from shmllm.frontend.images.rules.registry import rules_of_model

KIND = "MiniMaxM3VLImageProcessor"
THEIRS = getattr(import_without_torchvision("minimax_m3_vl.image_processing_minimax_m3_vl"), KIND)
SIDES = [(1, 1), (28, 28), (14, 13), (60, 29), (500, 3), (31, 400), (900, 700), (128, 96)]


@pytest.fixture(autouse=True)
def _without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    resize_with_pillow(monkeypatch)


@pytest.mark.parametrize(
    "fields",
    [{}, {"size": [672, 672]}, {"min_pixels": 900, "max_pixels": 9000}, {"patch_size": 7}],
)
def test_images_are_those_of_transformers(
    fields: dict[str, Any], random_image: Callable[..., Image.Image]
) -> None:
    read, theirs = settings_of(fields, "file", KIND), THEIRS(**fields)
    rules = rules_of_model(read)
    for width, height in SIDES:
        image = random_image(width, height)
        found, wanted = rules.tiles(image), preprocessed(theirs, image)
        assert wanted["image_grid_thw"].tolist() == [list(found.grid)]
        _, rows, columns = found.grid
        planes = np.moveaxis(found.pixels, -1, 1)[0]
        pixels = pixel_table(read)[np.arange(3)[:, None, None], planes]
        side = theirs.patch_size
        squares = pixels.reshape(3, rows // 2, 2, side, columns // 2, 2, side)
        ours = squares.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, 3, side, side)
        given = wanted["pixel_values"].numpy().reshape(rows * columns, 3, 2, side, side)
        for frame in range(2):
            np.testing.assert_allclose(ours, given[:, :, frame], atol=1e-6)


def test_bounds_of_sides_are_refused() -> None:
    with pytest.raises(EngineStartError, match="'max_long_side_pixel' is not supported"):
        rules_of_model(settings_of({"max_long_side_pixel": 1024}, "file", KIND))
