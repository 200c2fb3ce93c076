"""Prompts of LFM2-VL are expanded as transformers' processor expands them, as text and as ids."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.vision_families import FAMILIES
from support.vision_models import LFM2_VL, tokenizer_with
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

from shmllm.errors import EngineStartError, RequestError
from shmllm.formats.image_settings import settings_of
from shmllm.frontend.images.rules.registry import rules_of_model
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.expansion import expand_ids, expand_text, find_runs
from shmllm.frontend.placeholders.family import Config
from shmllm.frontend.placeholders.lfm2_vl import Lfm2VlPlaceholder

TOKENIZER = tokenizer_with(FAMILIES["lfm2_vl"].marks)
IMAGE = TOKENIZER.token_to_id("<image>")
FIELDS = {"image_token_id": IMAGE, "vision_config": {"patch_size": 16}}
PLACEHOLDER = Lfm2VlPlaceholder.of(Config(FIELDS), {})
TILE = (1, 4, 4)


def part(grid: tuple[int, int, int]) -> PreparedItem:
    _, rows, columns = grid
    pixels = np.zeros((1, 16 * rows, 16 * columns, 3), np.uint8)
    return PreparedItem(pixels, grid, PLACEHOLDER.count(grid))


def tiled(rows: int, columns: int, whole: tuple[int, int, int] | None) -> PreparedItem:
    parts = [part(TILE)] * (rows * columns) + ([] if whole is None else [part(whole)])
    return PreparedItem.of_parts(parts, (len(parts), rows, columns))


WHOLE = (1, 4, 6)
ITEMS = {
    "not cut": (part((1, 2, 6)), (1, 1)),
    "one row": (tiled(1, 3, WHOLE), (1, 3)),
    "several rows": (tiled(2, 2, WHOLE), (2, 2)),
    "no whole": (tiled(3, 1, None), (3, 1)),
}


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("name", ITEMS)
def test_an_image_has_the_text_of_transformers(name: str) -> None:
    item, (rows, columns) = ITEMS[name]
    processor: Any = object.__new__(Lfm2VlProcessor)
    tokens = SimpleNamespace(
        image_token="<image>",
        image_start_token="<|image_start|>",
        image_end_token="<|image_end|>",
        image_thumbnail_token="<|img_thumbnail|>",
    )
    processor.__dict__.update(vars(tokens))
    thumbnail = name != "no whole"
    settings = {"tile_size": 64, "use_thumbnail": thumbnail, "downsample_factor": 2}
    processor.image_processor = LFM2_VL.Lfm2VlImageProcessor(**settings)
    _, height, width = item.parts[-1].grid
    inputs = {"image_rows": [rows], "image_cols": [columns]}
    inputs["image_sizes"] = [[16 * height, 16 * width]]
    wanted = processor.replace_image_token(inputs, 0, use_image_special_tokens=True)
    assert PLACEHOLDER.expansion(item) == wanted
    assert wanted.count("<image>") == item.num_tokens


def test_ids_become_those_of_the_expanded_text() -> None:
    text, items = "See <image> or <image> now", [ITEMS["several rows"][0], ITEMS["not cut"][0]]
    wanted = encode(expand_text("prompt", PLACEHOLDER, text, items))
    assert expand_ids("prompt", PLACEHOLDER, encode(text), items, encode) == wanted
    assert expand_ids("prompt", PLACEHOLDER, wanted, items, encode) == wanted
    parts = [part for item in items for part in item.parts]
    runs = find_runs("prompt", PLACEHOLDER, wanted, [each.num_tokens for each in parts])
    assert [[end - begin for begin, end in each] for each in runs] == [[4]] * 4 + [[6], [3]]
    with pytest.raises(RequestError, match=r"ids need \d+ \('<image>'\) as often"):
        expand_ids("prompt", PLACEHOLDER, encode(text), items[:1], encode)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("Lfm2Vl", {}, None),
        ("Lfm2Vl", {"encoder_patch_size": 8}, "patches of 16 .*, the image processor has 8 and 2"),
        ("Lfm2Vl", {"downsample_factor": 4}, "the image processor has 16 and 4"),
        ("Pixtral", {}, "the model needs LFM2-VL's image processor"),
    ],
)
def test_the_image_processor_must_suit_the_tower(
    name: str, fields: dict[str, Any], message: str | None
) -> None:
    rules = rules_of_model(settings_of(fields, "file", f"{name}ImageProcessor"))
    if message is None:
        PLACEHOLDER.check_rules(rules)
    else:
        with pytest.raises(EngineStartError, match=message):
            PLACEHOLDER.check_rules(rules)


def test_texts_of_tokens_and_fields_may_be_others() -> None:
    texts = {"image_token": "<i>", "image_start_token": "<a>", "image_end_token": "<b>"}
    other = Lfm2VlPlaceholder.of(Config({}), texts | {"image_thumbnail_token": "<t>"})
    assert (other.token_id, other.patch_size, other.merge_size) == (396, 16, 2)
    item = PreparedItem.of_parts([part((1, 2, 2)), part((1, 2, 4))], (2, 1, 1))
    assert other.expansion(item) == "<a><|img_row_1_col_1|><i><t><i><i><b>"
