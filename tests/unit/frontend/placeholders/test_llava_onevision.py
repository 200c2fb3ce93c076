"""Prompts and pixels of LLaVA-OneVision are those of transformers' processor, which prepares one
image of a conversation otherwise than several."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import LlavaOnevisionConfig
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from shmllm.errors import EngineStartError, RequestError
from shmllm.formats.image_settings import pixel_table, settings_of
from shmllm.frontend.images.processor import ImageProcessor
from shmllm.frontend.items.registry import processors_of_model

TILE = 64
SIZES = [[64, 128], [128, 64], [128, 128], [64, 192], [192, 192]]
IMAGES = {"size": {"height": TILE, "width": TILE}, "image_grid_pinpoints": SIZES}
SIDES = [(64, 64), (200, 90), (40, 170), (190, 200), (3, 5)]


class WithoutVideos(LlavaOnevisionProcessor):  # type: ignore[misc]
    """It needs torchvision for them."""

    def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
        if name == "video_processor":
            return None
        return super().check_argument_for_proper_class(name, argument)


class Model:
    def __init__(self, tokenizer: Any, directory: Path, ratio: str, **settings: Any) -> None:
        images = LlavaOnevisionImageProcessorPil(**IMAGES)
        self.theirs: Any = WithoutVideos(
            images,
            tokenizer,
            num_image_tokens=16,
            vision_feature_select_strategy="full",
            vision_aspect_ratio=ratio,
        )
        self.settings = settings_of(json.loads(images.to_json_string()) | settings, "file")
        images.save_pretrained(directory)
        stored = json.loads((directory / "preprocessor_config.json").read_text()) | settings
        (directory / "preprocessor_config.json").write_text(json.dumps(stored))
        vision = {"model_type": "siglip_vision_model", "image_size": TILE, "patch_size": 16}
        config = LlavaOnevisionConfig(
            vision_config=vision,
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
            image_grid_pinpoints=SIZES,
            vision_aspect_ratio=ratio,
        ).to_dict()
        config |= {"architectures": ["LlavaOnevisionForConditionalGeneration"]}
        found = processors_of_model(directory, config)["image"]
        assert isinstance(found, ImageProcessor)
        self.ours = found

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.theirs.tokenizer.encode(text, add_special_tokens=False)
        return ids


@pytest.mark.parametrize("ratio", ["anyres_max_9", "anyres_max_3"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_prompts_and_pixels_are_those_of_transformers(
    ratio: str,
    count: int,
    make_tokenizer: Callable[..., Any],
    random_image: Callable[..., Image.Image],
    tmp_path: Path,
) -> None:
    model = Model(make_tokenizer(["<image>"]), tmp_path, ratio)
    groups = [SIDES[:count]] if count > 1 else [[sides] for sides in SIDES]
    for group in groups:
        pictures = [random_image(*sides) for sides in group]
        text = "See\n" + "<image> and " * count
        expected = model.theirs(text=text, images=[pictures])
        overrides = model.ours.among(count)
        images = [model.ours.prepare(each, overrides) for each in pictures]
        ids = expected["input_ids"][0]
        assert model.encode(model.ours.expand_text("prompt", text, images)) == ids
        assert model.ours.expand_ids("prompt", model.encode(text), images, model.encode) == ids
        table = pixel_table(model.settings)
        for image, theirs in zip(images, expected["pixel_values"], strict=True):
            ours = table[np.arange(3)[:, None, None], np.moveaxis(image.data, -1, 1)]
            assert np.array_equal(ours, np.asarray(theirs)[: len(ours)])


def test_a_request_may_say_how_many_tiles_its_images_have(
    make_tokenizer: Callable[..., Any], random_image: Callable[..., Image.Image], tmp_path: Path
) -> None:
    ours = Model(make_tokenizer(["<image>"]), tmp_path, "anyres_max_9").ours
    image = random_image(100, 60)
    assert ours.prepare(image).grid == (3, 60, 100)
    assert ours.prepare(image, {"pad_to_square": True}).grid == (1, 60, 100)
    assert ours.identity(image, {"pad_to_square": False}) == ours.identity(image)
    assert ours.identity(image, {"pad_to_square": True}) != ours.identity(image)
    with pytest.raises(RequestError, match="60000x1 pixels becomes a square of more than 89,478"):
        ours.prepare(random_image(60_000, 1), {"pad_to_square": True})


@pytest.mark.parametrize(
    ("ratio", "settings", "message"),
    [
        ("pad", {}, "'vision_aspect_ratio' must be 'anyres_max_N', not 'pad'"),
        ("anyres_max_9", {"do_resize": False}, "'do_resize' must be true"),
        ("anyres_max_9", {"image_mean": [2, 0, 0]}, "'image_mean' must consist of numbers from 0"),
        (
            "anyres_max_9",
            {"image_processor_type": "LlavaNextImageProcessor", "crop_size": TILE},
            "the model needs LLaVA-OneVision's image processor, not LlavaNextRules",
        ),
    ],
)
def test_other_settings_are_refused(
    ratio: str,
    settings: dict[str, Any],
    message: str,
    make_tokenizer: Callable[..., Any],
    tmp_path: Path,
) -> None:
    with pytest.raises(EngineStartError, match=message):
        Model(make_tokenizer(["<image>"]), tmp_path, ratio, **settings)
