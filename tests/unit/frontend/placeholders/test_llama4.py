"""Prompts of Llama 4 are expanded as transformers' processor expands them, as text and as ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.vision_families import FAMILIES
from support.vision_models import tokenizer_with
from transformers.models.llama4.processing_llama4 import Llama4Processor

from shmllm.errors import EngineStartError, RequestError
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.expansion import expand_ids, expand_text, find_runs
from shmllm.frontend.placeholders.family import Config
from shmllm.frontend.placeholders.llama4 import Llama4Placeholder

TOKENIZER = tokenizer_with(FAMILIES["llama4"].marks)
PATCH = TOKENIZER.token_to_id("<|patch|>")
VISION = {"image_size": 64, "patch_size": 16}
PLACEHOLDER = Llama4Placeholder.of(
    Config({"image_token_index": PATCH, "vision_config": VISION}), {}
)
GRIDS = [(1, 1, 1), (3, 1, 2), (3, 2, 1), (7, 2, 3)]


def item(grid: tuple[int, int, int]) -> PreparedItem:
    pixels = np.zeros((grid[0], 64, 64, 3), np.uint8)
    return PreparedItem(pixels, grid, PLACEHOLDER.count(grid))


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("grid", GRIDS)
def test_an_image_has_the_text_of_transformers(grid: tuple[int, int, int]) -> None:
    prompt: Any = Llama4Processor._prompt_split_image
    assert PLACEHOLDER.expansion(item(grid)) == prompt(None, grid[1:], 4)
    assert PLACEHOLDER.count(grid) == 4 * grid[0]


def test_ids_become_those_of_the_expanded_text() -> None:
    text, items = "See <|image|> or <|image|> now", [item(GRIDS[1]), item(GRIDS[3])]
    wanted = encode(expand_text("prompt", PLACEHOLDER, text, items))
    assert expand_ids("prompt", PLACEHOLDER, encode(text), items, encode) == wanted
    assert expand_ids("prompt", PLACEHOLDER, wanted, items, encode) == wanted
    runs = find_runs("prompt", PLACEHOLDER, wanted, [each.num_tokens for each in items])
    assert [sum(end - begin for begin, end in each) for each in runs] == [12, 28]
    assert [len(each) for each in runs] == [3, 7]
    with pytest.raises(RequestError, match=r"ids need \d+ \('<\|image\|>'\) as often"):
        expand_ids("prompt", PLACEHOLDER, encode(text), items[:1], encode)


def test_wrong_fields_are_named() -> None:
    with pytest.raises(EngineStartError, match="'pixel_shuffle_ratio' must be from 0 to 1, not 2"):
        Llama4Placeholder.of(Config({"vision_config": {"pixel_shuffle_ratio": 2}}), {})
