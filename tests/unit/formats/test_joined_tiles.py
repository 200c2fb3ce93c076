"""Pictures of tiles have the sizes and the patches that transformers' LLaVA-NeXT has."""

from __future__ import annotations

import math
import random

import torch
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.modeling_llava_next import unpad_image

from shmllm.formats.joined_tiles import (
    DEFAULT_SIZES,
    ONEVISION_SIZES,
    best_size,
    join_tiles,
    read_most_tiles,
)

TILE, SIDE = 336, 24


def test_sizes_and_patches_are_those_of_transformers() -> None:
    draw = random.Random(3)
    for _ in range(2000):
        count = draw.randint(1, 6)
        sizes = [(TILE * draw.randint(1, 5), TILE * draw.randint(1, 5)) for _ in range(count)]
        height, width = (int(2 ** draw.uniform(0, 12)) for _ in range(2))
        best = best_size(height, width, sizes)
        assert best == select_best_resolution((height, width), sizes)

        joined = join_tiles(height, width, sizes, TILE, SIDE)
        assert (joined.rows * TILE, joined.columns * TILE) == best
        assert joined.num_tiles == 1 + best[0] * best[1] // TILE**2
        rows, columns = joined.rows * SIDE, joined.columns * SIDE
        numbers = torch.arange(rows * columns).view(1, rows, columns)
        kept = unpad_image(numbers, (height, width))[0]
        assert kept.shape == (joined.num_rows, joined.num_columns)
        if kept.numel():
            assert int(kept[0, 0]) == joined.above * columns + joined.left
        assert joined.num_embeddings == len(kept) * (kept.shape[1] + 1)


def test_large_pictures_are_shrunk() -> None:
    """As in `pack_image_features` of transformers' LLaVA-OneVision."""
    tile, side, most = 384, 27, 9
    shapes = set()
    for height, width in ((384, 384), (2304, 2304), (768, 1920), (1000, 2300), (2304, 30), (5, 7)):
        joined = join_tiles(height, width, ONEVISION_SIZES, tile, side, most)
        rows, columns = joined.num_rows, joined.num_columns
        ratio = math.sqrt(rows * columns / (most * side**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
        assert joined.shape == (rows, columns)
        assert (joined.shrunk is not None) == (ratio > 1.1)
        assert joined.num_embeddings == rows * (columns + 1)
        shapes.add(joined.shrunk)
    assert len(shapes) > 2


def test_ratios_are_names_with_a_number() -> None:
    found = [read_most_tiles(each) for each in (None, "anyres_max_4", "anyres_max_0", "pad", 3)]
    assert found == [9, 4, None, None, None]


def test_the_first_of_equal_sizes_wins() -> None:
    assert best_size(100, 100, [(336, 672), (672, 336)]) == (336, 672)
    assert best_size(1, 5000, DEFAULT_SIZES) == (336, 672)
