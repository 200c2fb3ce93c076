"""What is checked of an image before any step has to compute it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shmllm.errors import RequestError
from shmllm.models.vision.specs import (
    EncoderSpec,
    Idefics3Tower,
    Qwen3Tower,
    VisionSpec,
)
from shmllm.params.items import Item
from shmllm.worker.item_checks import check_item

QWEN = VisionSpec(
    image_token=1,
    merge_size=2,
    tower=Qwen3Tower(
        hidden_size=32, num_layers=2, num_heads=2, inner=64, patch_size=16, num_frames=2,
        merge_size=2, activation="gelu", theta=1e4, num_positions=16, level_layers=(),
    ),
)  # fmt: skip
SMOLVLM = VisionSpec(
    image_token=1,
    tile_embeddings=4,
    tower=Idefics3Tower(
        encoder=EncoderSpec(
            kind="siglip", hidden_size=32, num_layers=2, num_heads=2, inner=64, image_size=64,
            patch_size=16, activation="gelu_tanh", eps=1e-6,
        ),
        factor=2,
    ),
)  # fmt: skip


def pixels(*shape: int) -> Any:
    return np.zeros((*shape, 3), np.uint8)


IMAGE = Item(bytes(32), ((3, 9),), (1, 4, 6), pixels(1, 64, 96))
TILES = Item(bytes(32), ((3, 7), (9, 13), (14, 18)), (3, 1, 2), pixels(3, 64, 64))


def test_images_that_a_tower_takes() -> None:
    check_item(IMAGE, {"image": QWEN})
    check_item(TILES, {"image": SMOLVLM})
    check_item(replace(TILES, grid=(3, 0, 0)), {"image": SMOLVLM})


WRONG: dict[str, dict[str, Any]] = {
    "two frames": {
        "grid": (2, 4, 6),
        "data": pixels(2, 64, 96),
        "spans": ((3, 15),),
    },
    "pieces": {"spans": ((3, 5), (6, 10))},
    "no whole squares": {"grid": (1, 4, 7), "data": pixels(1, 64, 112), "spans": ((3, 10),)},
    "no patches": {"grid": (1, 0, 6), "data": pixels(1, 0, 96)},
    "no frames": {"grid": (0, 4, 6), "data": pixels(0, 64, 96)},
    "other pixels": {"data": pixels(1, 96, 64)},
    "a huge grid": {"grid": (1, 2**32 - 2, 2**32 - 2)},
    "fewer embeddings": {"spans": ((3, 8),)},
}


@pytest.mark.parametrize("case", WRONG)
def test_images_of_any_size_that_it_does_not_take(case: str) -> None:
    with pytest.raises(RequestError, match="an item"):
        check_item(replace(IMAGE, **WRONG[case]), {"image": QWEN})


@pytest.mark.parametrize(
    "change",
    [
        {"data": pixels(3, 64, 48)},
        {"data": np.zeros((3, 64, 64, 4), np.uint8)},
        {"data": pixels(2, 64, 64)},
        {"grid": (2, 1, 1)},
        {"grid": (0, 1, 2), "data": pixels(0, 64, 64)},
        {"grid": (2**32 - 1, 1, 2)},
        {"spans": ((3, 14),)},
    ],
)
def test_tiles_that_it_does_not_take(change: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="an item"):
        check_item(replace(TILES, **change), {"image": SMOLVLM})
