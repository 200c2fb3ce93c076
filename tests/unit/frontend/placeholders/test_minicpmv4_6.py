"""Prompts and pixels of MiniCPM-V 4.6 and MiniCPM-OCR are those of transformers' processor."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.torchvision_modules import import_without_torchvision
from support.variants import slow
from support.vision_families import FAMILIES
from support.vision_models import image_processor, tokenizer_with
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor

from shmllm.errors import EngineStartError
from shmllm.formats.image_settings import pixel_table, settings_of
from shmllm.frontend.images.processor import ImageProcessor
from shmllm.frontend.images.rules.registry import rules_of_model, rules_of_request
from shmllm.frontend.placeholders.family import Config
from shmllm.frontend.placeholders.minicpmv4_6 import (
    MiniCPMOcrPlaceholder,
    MiniCPMVPlaceholder,
)

TOKENIZER = tokenizer_with(FAMILIES["minicpmv4_6"].marks)
PAD = TOKENIZER.token_to_id("<|image_pad|>")
FIELDS = {"image_token_id": PAD, "vision_config": {"patch_size": 14}}
SIDES = [(1, 1), (84, 84), (85, 84), (170, 90), (90, 300), (400, 400), (900, 3), (3, 900), (13, 60)]


def settings(processor: Any) -> Any:
    return settings_of(json.loads(processor.to_json_string()), "file")


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def text_of_transformers(processor: Any, text: str, images: list[Any], divisor: int) -> str:
    """What the class makes of the text, without its tokenizer, and videos, for which it needs
    torchvision."""
    names = ("image_start", "image_end", "slice_start", "slice_end")
    names += ("image_id_start", "image_id_end")
    marks = ("<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>")
    own = SimpleNamespace(image_token="<|image_pad|>", slice_mode=True)
    own.__dict__.update({f"{n}_token": mark for n, mark in zip(names, marks, strict=True)})
    inputs = processor(images, return_tensors="np")
    texts = [
        MiniCPMV4_6Processor.replace_image_token(own, inputs, index, image_token_divisor=divisor)
        for index in range(len(images))
    ]
    texts = MiniCPMV4_6Processor._prepend_local_ids(own, [text], texts, own.image_token)
    parts = text.split(own.image_token)
    return "".join(a + b for a, b in zip(parts, [*texts, ""], strict=True))


@pytest.mark.parametrize(
    ("name", "scale"), [("minicpmv4_6", 84), ("minicpm_ocr", 84), slow("minicpmv4_6", 448)]
)
def test_parts_have_the_bits_of_transformers(
    name: str, scale: int, random_image: Callable[..., Image.Image]
) -> None:
    processor = image_processor(name, scale_resolution=scale, max_slice_nums=9)
    read = settings(processor)
    rules, table = rules_of_model(read), pixel_table(read)
    draw, counts = random.Random(3), set()
    factor = scale // 84
    sides = SIDES + [(draw.randint(1, 400), draw.randint(1, 400)) for _ in range(20)]
    for width, height in sides:
        image = random_image(width * factor, height * factor)
        found = rules.tiles(image)
        parts = found.parts or (found,)
        expected = processor([image], return_tensors="np")
        assert [list(part.grid[1:]) for part in parts] == expected["target_sizes"].tolist()
        rows, columns = expected["grids"][0]
        assert len(parts) == 1 + rows * columns
        assert not found.parts or found.grid == (len(parts), rows, columns)
        columns_of_patches = []
        for part in parts:
            planes = table[np.arange(3)[:, None, None], np.moveaxis(part.pixels, -1, 1)[0]]
            split = planes.reshape(3, part.grid[1], 14, part.grid[2], 14)
            columns_of_patches.append(split.transpose(0, 2, 1, 3, 4).reshape(3, 14, -1))
        ours = np.concatenate(columns_of_patches, -1)[None]
        assert np.array_equal(ours, expected["pixel_values"])
        counts.add(len(parts))
    assert len(counts) > 4


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("name", "kind", "divisor"),
    [("minicpmv4_6", MiniCPMVPlaceholder, 16), ("minicpm_ocr", MiniCPMOcrPlaceholder, 4)],
)
def test_prompts_are_expanded_as_transformers_expands_them(
    name: str, kind: Any, divisor: int, count: int, random_image: Callable[..., Image.Image]
) -> None:
    processor = image_processor(name)
    ours = ImageProcessor(settings(processor), kind.of(Config(FIELDS), {}))
    pictures = [random_image(*sides) for sides in [(200, 150), (50, 60), (90, 300)][:count]]
    prompt = "See\n" + "<|image_pad|> and\n" * count
    expected = text_of_transformers(processor, prompt, pictures, divisor)
    items = [ours.prepare(each) for each in pictures]
    assert ours.expand_text("prompt", prompt, items) == expected
    ids = encode(expected)
    assert ours.expand_ids("prompt", encode(prompt), items, encode) == ids
    assert ours.expand_ids("prompt", ids, items, encode) == ids
    runs = ours.runs("prompt", ids, [part for item in items for part in item.parts])
    sizes = [math.prod(part.grid) // divisor for item in items for part in item.parts]
    assert [sum(end - begin for begin, end in each) for each in runs] == sizes


def test_small_images_may_keep_their_size(random_image: Callable[..., Image.Image]) -> None:
    """transformers has the choice only where it resizes with torchvision; sizes are compared."""
    module = import_without_torchvision("minicpm_ocr.image_processing_minicpm_ocr")
    kind = module.MiniCPMOcrImageProcessor
    values = json.loads(image_processor("minicpm_ocr").to_json_string())
    values["image_processor_type"] = "MiniCPMOcrImageProcessor"
    read = settings_of(values, "file")
    for how in ("always", "never"):
        rules = rules_of_request(read, {"small_image_upsize": how})
        for width, height in ((40, 60), (100, 60), (70, 84), (300, 20)):
            found = rules.tiles(random_image(width, height))
            enlarges = how == "always" and not found.parts
            sides = kind.find_best_resize(
                kind, (height, width), 84, 14, "4x", allow_upscale=enlarges
            )
            whole = found.parts[0] if found.parts else found
            assert whole.grid == (1, *(side // 14 for side in sides))


def test_a_request_may_ask_for_fewer_slices(random_image: Callable[..., Image.Image]) -> None:
    read = settings(image_processor("minicpmv4_6"))
    image = random_image(300, 300)
    counts = []
    for changes in ({}, {"max_slice_nums": 2}, {"slice_mode": False}, {"scale_resolution": 300}):
        counts.append(len(rules_of_request(read, changes).tiles(image).parts))
    assert counts == [5, 3, 0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"downsample_mode": "2x"}, "'downsample_mode' '2x' is not supported; supported: 4x, 16x"),
        ({"downsample_mode": [4]}, r"'downsample_mode' \[4\] is not supported"),
        ({"small_image_upsize": "adaptive"}, "'adaptive' is not supported; supported: always, nev"),
        ({"use_image_id": False}, "'use_image_id' false is not supported"),
        ({"do_resize": False}, "'do_resize' false is not supported"),
        ({"max_slice_nums": 2000}, "'max_slice_nums' must be at most 1024"),
        ({"scale_resolution": 0}, "'scale_resolution' must be a positive integer"),
    ],
)
def test_other_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    values = json.loads(image_processor("minicpmv4_6").to_json_string()) | changes
    with pytest.raises(EngineStartError, match=message):
        rules_of_model(settings_of(values, "file"))
