"""DeepSeek-OCR and DeepSeek-OCR 2 as their authors prepare pages: with functions of pillow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from support.variants import slow

from shmllm.errors import RequestError
from shmllm.formats.image_settings import pixel_table
from shmllm.frontend.items.registry import processors_of_model

GREY = (127, 127, 127)


def reader(directory: Path, which: str = "") -> Any:
    """What prepares images of a published model."""
    text = {"hidden_size": 1280, "num_hidden_layers": 2, "use_mla": False}
    text |= {"n_routed_experts": 64, "n_shared_experts": 2}
    config = {"architectures": [f"DeepseekOCR{which}ForCausalLM"], "language_config": text}
    (directory / "config.json").write_text(json.dumps(config))
    return processors_of_model(directory, config)["image"]


def planes_of(ours: Any, item: Any) -> list[Any]:
    table = pixel_table(ours.settings)
    planes = [plane for part in item.parts for plane in np.moveaxis(part.data, -1, 1)]
    return [table[np.arange(3)[:, None, None], plane] for plane in planes]


def as_authors(picture: Image.Image) -> Any:
    """What torchvision's `ToTensor` and `Normalize` with 0.5 compute, in float32."""
    scaled = np.asarray(picture, np.float32).transpose(2, 0, 1) / np.float32(255)
    return (scaled - np.float32(0.5)) / np.float32(0.5)


def cut(page: Image.Image, side: int, columns: int, rows: int) -> list[Image.Image]:
    whole = page.resize((columns * side, rows * side))
    places = [(column * side, row * side) for row in range(rows) for column in range(columns)]
    return [whole.crop((left, top, left + side, top + side)) for left, top in places]


@pytest.mark.parametrize(
    ("which", "sides", "tiles"),
    [
        ("", (101, 640), (0, 0)),
        ("", (641, 507), (3, 2)),
        ("2", (300, 769), (1, 3)),
        slow("", (1280, 1100), (2, 2)),
        slow("", (2480, 3508), (2, 3)),
        slow("", (900, 100), (6, 1)),
        slow("2", (768, 501), (0, 0)),
        slow("2", (3000, 2999), (2, 2)),
    ],
)
def test_pages_are_those_of_the_authors(
    which: str,
    sides: tuple[int, int],
    tiles: tuple[int, int],
    random_image: Callable[..., Image.Image],
    tmp_path: Path,
) -> None:
    ours, page = reader(tmp_path, which), random_image(*sides)
    item = ours.prepare(page)
    columns, rows = tiles
    wanted = cut(page, 768 if which else 640, columns, rows) if rows else []
    wanted.append(ImageOps.pad(page, (1024, 1024), color=GREY))
    found = planes_of(ours, item)
    assert [plane.tobytes() for plane in found] == [as_authors(each).tobytes() for each in wanted]
    count = 257 + 144 * rows * columns
    if not which:
        count = 273 + 10 * rows * (10 * columns + 1) * bool(rows)
    assert item.num_tokens == count
    assert ours.mark == "<image>"
    assert ours.expand_text("prompt", "a <image>\nb", [item]) == f"a {'<image>' * count}\nb"
    ids = ours.expand_ids("prompt", [5, 128_815, 6], [item], lambda text: [])
    assert ids == [5, *[128_815] * count, 6]


def test_the_place_of_the_whole_is_rounded_as_pillow_does(
    random_image: Callable[..., Image.Image], tmp_path: Path
) -> None:
    """A half is rounded to the even number, before the image and within it."""
    ours = reader(tmp_path)
    for width in (*range(1, 20), 320, 511, 633):
        page = random_image(640, width)
        (wanted,) = planes_of(ours, ours.prepare(page))
        assert (
            wanted.tobytes() == as_authors(ImageOps.pad(page, (1024, 1024), color=GREY)).tobytes()
        )


def test_what_a_request_may_change(
    random_image: Callable[..., Image.Image], tmp_path: Path
) -> None:
    ours, page = reader(tmp_path), random_image(1000, 1000)
    assert ours.prepare(page).num_tokens == 273 + 20 * 21
    found = planes_of(ours, ours.prepare(page, {"max_patches": 9, "min_patches": 8}))
    wanted = [*cut(page, 640, 3, 3), ImageOps.pad(page, (1024, 1024), color=GREY)]
    assert [plane.tobytes() for plane in found] == [as_authors(each).tobytes() for each in wanted]
    with pytest.raises(RequestError, match="is too narrow: it becomes 0x1024"):
        ours.prepare(random_image(1, 3000))
    with pytest.raises(RequestError, match="'crop_to_patches' is not supported"):
        ours.prepare(page, {"crop_to_patches": False})
