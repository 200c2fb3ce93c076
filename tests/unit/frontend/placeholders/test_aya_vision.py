"""Prompts of Aya Vision and Command A Vision are expanded as transformers' processors do it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.vision_families import FAMILIES
from support.vision_models import tokenizer_with
from transformers.models.aya_vision.processing_aya_vision import AyaVisionProcessor
from transformers.models.cohere2_vision.processing_cohere2_vision import Cohere2VisionProcessor

from shmllm.errors import EngineStartError, RequestError
from shmllm.formats.image_settings import settings_of
from shmllm.frontend.images.rules.registry import rules_of_model
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.aya_vision import (
    AyaVisionPlaceholder,
    Cohere2VisionPlaceholder,
)
from shmllm.frontend.placeholders.expansion import expand_ids, expand_text, find_runs
from shmllm.frontend.placeholders.family import Config

TOKENIZERS = {name: tokenizer_with(FAMILIES[name].marks) for name in FAMILIES if "vision" in name}
VISION = {"image_size": 64, "patch_size": 16}
GRIDS = [(1, 1, 1), (3, 1, 2), (5, 2, 2)]
CLASSES: dict[str, Any] = {
    "aya_vision": AyaVisionPlaceholder,
    "cohere2_vision": Cohere2VisionPlaceholder,
}


def placeholder(name: str) -> Any:
    (field,) = FAMILIES[name].ids
    token = TOKENIZERS[name].token_to_id("<|IMG_PATCH|>")
    return CLASSES[name].of(Config({field: token, "vision_config": VISION}), {})


def item(grid: tuple[int, int, int]) -> PreparedItem:
    return PreparedItem(np.zeros((grid[0], 64, 64, 3), np.uint8), grid, 4 * grid[0])


def texts_of_transformers(name: str, num_tiles: int) -> str:
    processor: Any
    inputs = {"num_patches": [num_tiles]}
    if name == "aya_vision":
        tokenizer = SimpleNamespace(convert_tokens_to_ids=lambda token: 0)
        processor = object.__new__(AyaVisionProcessor)
        processor.__dict__.update(patch_size=32, img_size=64, tokenizer=tokenizer)
        processor.__dict__.update(start_of_img_token="<|START_OF_IMG|>")
        processor.__dict__.update(end_of_img_token="<|END_OF_IMG|>", tile_token="TILE")
        processor.__dict__.update(img_patch_token="<|IMG_PATCH|>", tile_global_token="TILE_GLOBAL")
        found: str = processor.replace_image_token(inputs, 0)
        return found
    processor = object.__new__(Cohere2VisionProcessor)
    processor.__dict__.update(patch_size=2, boi_token="<|START_OF_IMG|>")
    processor.__dict__.update(eoi_token="<|END_OF_IMG|>", image_token="<|IMG_PATCH|>")
    processor.__dict__.update(img_line_break_token="<|IMG_LINE_BREAK|>")
    text: str = processor.replace_image_token(inputs, 0)
    return text


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("grid", GRIDS)
def test_an_image_has_the_text_of_transformers(name: str, grid: tuple[int, int, int]) -> None:
    ours = placeholder(name)
    assert ours.expansion(item(grid)) == texts_of_transformers(name, grid[0])
    assert ours.count(grid) == 4 * grid[0]


@pytest.mark.parametrize("name", CLASSES)
def test_ids_become_those_of_the_expanded_text(name: str) -> None:
    def encode(text: str) -> list[int]:
        ids: list[int] = TOKENIZERS[name].encode(text, add_special_tokens=False).ids
        return ids

    ours, items = placeholder(name), [item(GRIDS[1]), item(GRIDS[2])]
    text = f"See {ours.mark} or {ours.mark} now"
    wanted = encode(expand_text("prompt", ours, text, items))
    assert expand_ids("prompt", ours, encode(text), items, encode) == wanted
    assert expand_ids("prompt", ours, wanted, items, encode) == wanted
    runs = find_runs("prompt", ours, wanted, [each.num_tokens for each in items])
    assert [[end - begin for begin, end in each] for each in runs] == [[4] * 3, [4] * 5]
    with pytest.raises(RequestError, match=r"ids need .* as often"):
        expand_ids("prompt", ours, encode(text), items[:1], encode)


@pytest.mark.parametrize(
    ("name", "processor", "fields", "message"),
    [
        ("aya_vision", "GotOcr2", {}, None),
        ("aya_vision", "Cohere2Vision", {}, "the model needs Aya Vision's image processor"),
        ("cohere2_vision", "Cohere2Vision", {"patch_size": 2}, None),
        ("cohere2_vision", "GotOcr2", {}, "the model needs Command A Vision's image processor"),
        ("cohere2_vision", "Cohere2Vision", {}, r"has 4 embeddings .* patch_size \(16\) says 256"),
    ],
)
def test_the_image_processor_must_suit_the_tower(
    name: str, processor: str, fields: dict[str, Any], message: str | None
) -> None:
    rules = rules_of_model(settings_of(fields, "file", f"{processor}ImageProcessor"))
    if message is None:
        placeholder(name).check_rules(rules)
    else:
        with pytest.raises(EngineStartError, match=message):
            placeholder(name).check_rules(rules)


def test_defaults_are_those_of_the_classes() -> None:
    aya, command = (CLASSES[name].of(Config({"vision_config": VISION}), {}) for name in CLASSES)
    assert (aya.token_id, aya.mark, aya.token) == (255_036, "<image>", "<|IMG_PATCH|>")
    assert (command.token_id, command.mark) == (255_036, "<|IMG_PATCH|>")
    other = AyaVisionPlaceholder.of(
        Config({"downsample_factor": 1, "vision_config": VISION}),
        {"image_token": "<i>", "img_patch_token": "<p>", "tile_token": "T"}
        | {"start_of_img_token": "<b>", "end_of_img_token": "<e>", "tile_global_token": "W"},
    )
    assert other.mark == "<i>"
    tokens = "<p>" * 16
    assert other.expansion(item(GRIDS[1])) == f"<b>T_1{tokens}T_2{tokens}W{tokens}<e>"
