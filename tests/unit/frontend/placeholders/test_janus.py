"""Prompts and pixels of Janus are those of transformers' processor."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import JanusConfig
from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil
from transformers.models.janus.processing_janus import JanusProcessor

from shmllm.errors import EngineStartError, RequestError
from shmllm.formats.image_settings import pixel_table, settings_of
from shmllm.frontend.images.processor import ImageProcessor
from shmllm.frontend.images.rules.registry import rules_of_model, rules_of_request
from shmllm.frontend.items.registry import processors_of_model

TILE = 64
NAMES = {
    "image_token": "<image_placeholder>",
    "boi_token": "<begin_of_image>",
    "eoi_token": "<end_of_image>",
}


class Model:
    def __init__(self, tokenizer: Any, directory: Path) -> None:
        images = JanusImageProcessorPil(size={"height": TILE, "width": TILE})
        self.theirs: Any = JanusProcessor(images, tokenizer, num_image_tokens=16)
        images.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        self.settings = settings_of(json.loads(images.to_json_string()), "file")
        config = JanusConfig(
            vision_config={"image_size": TILE, "patch_size": 16},
            image_token_id=tokenizer.convert_tokens_to_ids("<image_placeholder>"),
        ).to_dict()
        config["architectures"] = ["JanusForConditionalGeneration"]
        found = processors_of_model(directory, config)["image"]
        assert isinstance(found, ImageProcessor)
        self.ours = found

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.theirs.tokenizer.encode(text, add_special_tokens=False)
        return ids


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer(list(NAMES.values()), **NAMES)


@pytest.mark.parametrize("count", [1, 3])
def test_prompts_and_pixels_are_those_of_transformers(
    count: int, tokenizer: Any, random_image: Callable[..., Image.Image], tmp_path: Path
) -> None:
    model = Model(tokenizer, tmp_path)
    pictures = [random_image(*sides) for sides in [(64, 64), (200, 90), (1, 70)][:count]]
    text = "See\n" + "<image_placeholder>\nand " * count
    expected = model.theirs(text=text, images=[pictures])
    images = [model.ours.prepare(each) for each in pictures]
    ids = np.asarray(expected["input_ids"])[0].tolist()
    assert model.encode(model.ours.expand_text("prompt", text, images)) == ids
    assert model.ours.expand_ids("prompt", model.encode(text), images, model.encode) == ids
    table = pixel_table(model.settings)
    for image, theirs in zip(images, np.asarray(expected["pixel_values"]), strict=True):
        ours = table[np.arange(3)[:, None, None], np.moveaxis(image.data[0], -1, 0)]
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("changes", "request_changes"),
    [
        ({}, {}),
        ({"min_size": 40, "image_mean": [0.5, 0.4, 0.99]}, {"resample": 2}),
        ({"size": {"height": 50, "width": 50}}, {"min_size": 33}),
    ],
)
def test_tiles_have_the_bits_of_transformers(
    changes: dict[str, Any],
    request_changes: dict[str, Any],
    random_image: Callable[..., Image.Image],
) -> None:
    processor: Any = JanusImageProcessorPil(**({"size": {"height": 64, "width": 64}} | changes))
    settings = settings_of(json.loads(processor.to_json_string()), "file")
    rules, draw = rules_of_request(settings, request_changes), random.Random(5)
    sides = [(1, 1), (1, 90), (90, 1), (64, 64), (63, 65), (400, 3)]
    sides += [(draw.randint(1, 150), draw.randint(1, 150)) for _ in range(15)]
    for each in sides:
        image = random_image(*each)
        tiles = rules.tiles(image)
        theirs = processor(image, return_tensors="np", **request_changes)["pixel_values"]
        planes = np.moveaxis(tiles.pixels, -1, 1)
        ours = pixel_table(settings)[np.arange(3)[:, None, None], planes]
        assert tiles.grid == (1, 1, 1)
        assert ours.tobytes() == theirs.tobytes()


def test_the_defaults_are_those_of_transformers(random_image: Callable[..., Image.Image]) -> None:
    theirs = JanusImageProcessorPil()
    settings = settings_of({}, "file", "JanusImageProcessor")
    written = settings_of(json.loads(theirs.to_json_string()), "file")
    assert np.array_equal(pixel_table(settings), pixel_table(written))
    assert rules_of_model(settings) == rules_of_model(written)
    assert rules_of_model(settings).sides() == (384, 384)
    assert rules_of_model(settings).tiles(random_image(30, 20)).pixels.shape == (1, 384, 384, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_pad": False}, "'do_pad' must be true"),
        ({"do_resize": False}, "'do_resize' must be true"),
        ({"size": {"height": 64, "width": 48}}, "'size' must be a square"),
        ({"min_size": 385}, "'min_size' must be at most 384, not 385"),
        ({"min_size": 0}, "'min_size' must be a positive integer, not 0"),
        ({"image_mean": [2, 0, 0]}, "'image_mean' must consist of numbers from 0"),
        ({"image_mean": [1e308, 0, 0]}, "'image_mean' must consist of numbers from 0"),
    ],
)
def test_other_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((EngineStartError, RequestError), match=message):
        rules_of_model(settings_of(settings, "file", "JanusImageProcessor"))
