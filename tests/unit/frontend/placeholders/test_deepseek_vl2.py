"""DeepSeek-VL2's images as its authors prepare them: with functions of pillow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from support.published_deepseek import OF_PROCESSOR
from support.variants import slow

from shmllm.errors import EngineStartError, RequestError
from shmllm.formats.image_settings import pixel_table
from shmllm.frontend.items.registry import processors_of_model

SIDES = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (1, 5), (1, 6), (2, 3), (1, 7), (1, 8), (2, 4)]
RESOLUTIONS = [
    [side * 384 for side in size]
    for sides in (*SIDES, (1, 9), (3, 3))
    for size in {sides, sides[::-1]}
]
GREY = (127, 127, 127)


def reader(directory: Path, **processor: Any) -> Any:
    """What prepares images of a published model."""
    config: dict[str, Any] = {
        "architectures": ["DeepseekVLV2ForCausalLM"],
        "candidate_resolutions": RESOLUTIONS,
        "language_config": {"vocab_size": 102_400},
        "vision_config": {"patch_size": 14},
    }
    (directory / "config.json").write_text(json.dumps(config))
    tokens = {"added_tokens": [{"id": 100_003, "content": "<image>"}]}
    (directory / "tokenizer.json").write_text(json.dumps(tokens))
    if processor:
        own = OF_PROCESSOR | {"candidate_resolutions": RESOLUTIONS} | processor
        (directory / "processor_config.json").write_text(json.dumps(own))
    return processors_of_model(directory, config)["image"]


def planes_of(ours: Any, item: Any) -> Any:
    planes = np.moveaxis(item.data, -1, 1)
    return pixel_table(ours.settings)[np.arange(3)[:, None, None], planes]


def as_authors(page: Image.Image, columns: int, rows: int) -> Any:
    """The whole and its tiles, in float32."""
    large = ImageOps.pad(page, (columns * 384, rows * 384), color=GREY)
    places = [(column * 384, row * 384) for row in range(rows) for column in range(columns)]
    tiles = [large.crop((left, top, left + 384, top + 384)) for left, top in places]
    tiles.insert(0, ImageOps.pad(page, (384, 384), color=GREY))
    scaled = np.stack([np.asarray(each, np.float32) for each in tiles]) / np.float32(255)
    return ((scaled - np.float32(0.5)) / np.float32(0.5)).transpose(0, 3, 1, 2)


@pytest.mark.parametrize(
    ("sides", "tiles"),
    [
        ((200, 100), (1, 1)),
        ((1000, 600), (3, 2)),
        slow((401, 3000), (1, 8)),
        slow((383, 384), (1, 1)),
        slow((1200, 1190), (3, 3)),
        slow((3000, 300), (8, 1)),
    ],
)
def test_images_are_those_of_the_authors(
    sides: tuple[int, int],
    tiles: tuple[int, int],
    random_image: Callable[..., Image.Image],
    tmp_path: Path,
) -> None:
    ours, page = reader(tmp_path), random_image(*sides)
    item = ours.prepare(page)
    columns, rows = tiles
    assert item.grid == (1 + rows * columns, rows, columns)
    assert planes_of(ours, item).tobytes() == as_authors(page, columns, rows).tobytes()
    count = 14 * 15 + 1 + 14 * rows * (14 * columns + 1)
    assert item.num_tokens == count
    assert ours.expand_text("prompt", "a <image>\nb", [item]) == f"a {'<image>' * count}\nb"
    ids = ours.expand_ids("prompt", [5, 100_003, 6], [item], lambda text: [])
    assert ids == [5, *[100_003] * count, 6]


def test_three_images_are_not_cut(random_image: Callable[..., Image.Image], tmp_path: Path) -> None:
    ours, page = reader(tmp_path), random_image(500, 700)
    assert (ours.among(1), ours.among(2), ours.among(3)) == ({}, {}, {"cropping": False})
    item = ours.prepare(page, ours.among(3))
    assert item.grid == (2, 1, 1)
    assert planes_of(ours, item).tobytes() == as_authors(page, 1, 1).tobytes()


def test_the_processors_file_has_sizes(
    random_image: Callable[..., Image.Image], tmp_path: Path
) -> None:
    ours = reader(tmp_path, candidate_resolutions=[[384, 384], [384, 768]], normalize=False)
    item = ours.prepare(random_image(800, 1500))
    assert (item.grid, ours.settings.do_normalize) == ((3, 2, 1), False)
    for sizes in ([[384]], [[384, 700]], "all"):
        with pytest.raises(EngineStartError, match="'candidate_resolutions' must list widths and"):
            reader(tmp_path, candidate_resolutions=sizes)
    with pytest.raises(EngineStartError, match=r"'candidate_resolutions' .* allows images of"):
        reader(tmp_path, candidate_resolutions=[[384 * 100, 384 * 100]])
    with pytest.raises(RequestError, match=r"is too narrow: it becomes 0x384"):
        reader(tmp_path, normalize=True).prepare(random_image(1, 2000))


def test_a_model_without_a_token_of_images_is_refused(tmp_path: Path) -> None:
    reader(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(EngineStartError, match="'image_token_id' must be an integer of at least 0"):
        processors_of_model(tmp_path, config)
