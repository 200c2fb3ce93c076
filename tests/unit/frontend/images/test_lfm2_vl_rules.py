"""The inputs of LFM2-VL's tower are those of transformers' processor.

It needs torchvision, which resizes pixels; here pillow takes its place.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from time import process_time
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
from shmllm.frontend.images.rules.family import Tiles
from shmllm.frontend.images.rules.lfm2_vl import Lfm2VlRules
from shmllm.frontend.images.rules.registry import rules_of_model, rules_of_request

THEIRS = import_without_torchvision("lfm2_vl.image_processing_lfm2_vl").Lfm2VlImageProcessor
SMALL = {"tile_size": 64, "min_image_tokens": 3, "max_image_tokens": 5}


def settings(**values: Any) -> Any:
    return settings_of(values, "file", "Lfm2VlImageProcessor")


@pytest.fixture(autouse=True)
def _without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    resize_with_pillow(monkeypatch)


def inputs(tiles: Tiles, table: Any, size: int) -> Iterator[Any]:
    """Of each tile its patches, as the processor has them."""
    for part in tiles.parts or (tiles,):
        (pixels,) = part.pixels
        _, rows, columns = part.grid
        assert pixels.shape == (rows * size, columns * size, 3)
        assert part.pixels.flags.c_contiguous
        numbers = table[np.arange(3), pixels]
        patches = numbers.reshape(rows, size, columns, size, 3).swapaxes(1, 2)
        yield patches.reshape(rows * columns, -1)


SETTINGS: dict[str, dict[str, Any]] = {
    "few tokens": SMALL,
    "more tiles": SMALL | {"min_tiles": 3, "max_tiles": 7, "max_pixels_tolerance": 0.7},
    "two or three tiles": SMALL | {"max_tiles": 3, "use_thumbnail": False},
    "no tiles": SMALL | {"do_image_splitting": False},
    "one tile": SMALL | {"min_tiles": 1, "max_tiles": 1},
    "other patches": SMALL | {"encoder_patch_size": 7, "downsample_factor": 3, "tile_size": 63},
    "other numbers": SMALL | {"image_mean": [0.48, 0.5, 0.31], "image_std": [0.27, 0.5, 0.3]},
}


@pytest.mark.parametrize(
    "name", [name if name == "few tokens" else slow(name) for name in SETTINGS]
)
def test_tiles_are_those_of_transformers(
    name: str, random_image: Callable[..., Image.Image]
) -> None:
    values = SETTINGS[name]
    read = settings(**values)
    rules = rules_of_model(read)
    assert isinstance(rules, Lfm2VlRules)
    draw, counts = random.Random(name), []
    sides = [(1, 1), (32, 32), (64, 128), (80, 100), (100, 80), (500, 3), (3, 500), (31, 400)]
    sides += [(draw.randint(1, 300), draw.randint(1, 300)) for _ in range(40)]
    for width, height in sides:
        image = random_image(width, height)
        found = rules.tiles(image)
        room = max(4 * values["max_image_tokens"], (rules.tile // rules.patch_size) ** 2)
        if found.parts and np.prod(found.parts[-1].grid) > room:
            continue  # a narrow one, for which transformers fails
        wanted = preprocessed(THEIRS(**values), image, return_row_col_info=True)
        parts = [each.grid[1:] for each in found.parts or (found,)]
        assert parts == [tuple(each) for each in wanted["spatial_shapes"].tolist()]
        assert found.grid[0] == len(parts)
        if found.parts:
            assert found.grid[1:] == (wanted["image_rows"][0], wanted["image_cols"][0])
        ours = inputs(found, pixel_table(read), rules.patch_size)
        for patches, theirs in zip(ours, wanted["pixel_values"], strict=True):
            assert np.array_equal(patches, theirs[: len(patches)].numpy())
        counts.append(len(parts))
    assert len(counts) > 30
    assert len(set(counts)) > 2 or name in ("no tiles", "one tile")


@pytest.mark.parametrize(("fewest", "most"), [(2, 10), (2, 3), (5, 12), (2, 64)])
def test_arrangements_have_the_order_of_transformers(fewest: int, most: int) -> None:
    """Of two that are equally near, the first one or the last one is chosen."""
    from shmllm.frontend.images.rules.lfm2_vl import _arrangements

    assert _arrangements(fewest, most) == THEIRS()._target_ratios(fewest, most)


def test_the_defaults_are_those_of_the_class() -> None:
    found, wanted = settings(), THEIRS().to_dict()
    for name in found.options:
        if name in wanted:
            assert found.options[name] == wanted[name], name
    assert [*found.mean] == list(wanted["image_mean"])
    assert [*found.std] == list(wanted["image_std"])
    assert rules_of_model(found) == Lfm2VlRules(
        resize=True,
        resample=2,
        patch_size=16,
        merge_size=2,
        fewest=64,
        most=256,
        tolerance=2.0,
        tile=512,
        num_tiles=(2, 10),
        thumbnail=True,
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tile_size": 80}, "'tile_size' must be a multiple of 32, not 80"),
        ({"min_tiles": 1}, r"'min_tiles' must be from 2 to 'max_tiles' \(10\), not 1"),
        ({"min_tiles": 4, "max_tiles": 3}, r"'min_tiles' must be from 2 to 'max_tiles' \(3\)"),
        ({"max_tiles": 10**6}, r"'max_tiles' \(1000000\) allows images of more than"),
        ({"max_pixels_tolerance": "2"}, "'max_pixels_tolerance' must be a positive number"),
        ({"min_image_tokens": 0}, "'min_image_tokens' must be a positive integer, not 0"),
        ({"use_thumbnail": 1}, "'use_thumbnail' must be true or false, not 1"),
    ],
)
def test_other_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineStartError, match=message):
        rules_of_model(settings(**values))
    with pytest.raises(RequestError, match=message):
        rules_of_request(settings(), values)


def test_images_always_have_their_marks() -> None:
    with pytest.raises(EngineStartError, match="'use_image_special_tokens' false is not supp"):
        rules_of_model(settings(use_image_special_tokens=False))
    with pytest.raises(RequestError, match="'downsample_factor' is not supported for Lfm2Vl"):
        rules_of_request(settings(), {"downsample_factor": 3})


def test_many_tiles_are_arranged_at_once() -> None:
    begin_s = process_time()
    picture = Image.new("RGB", (900, 30))
    changes = {"tile_size": 32, "max_tiles": 3000, "max_image_tokens": 8, "min_image_tokens": 1}
    tiles = rules_of_request(settings(), changes).tiles(picture)
    assert tiles.grid == (31, 1, 30)
    assert process_time() - begin_s < 2
