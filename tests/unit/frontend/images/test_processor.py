"""The facade: identities of images, and errors with names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.programs import run_source

from shmllm.errors import EngineStartError, RequestError
from shmllm.formats.image_settings import read_image_settings
from shmllm.frontend.images.processor import ImageProcessor
from shmllm.frontend.images.rules.registry import rules_of_model
from shmllm.frontend.items.registry import processors_of_model

QWEN = {"architectures": ["Qwen2VLForConditionalGeneration"]}
LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"],
    "vision_config": {"model_type": "clip_vision_model", "image_size": 64, "patch_size": 16},
}
LLAVA_NEXT: dict[str, Any] = {
    "architectures": ["LlavaNextForConditionalGeneration"],
    "vision_config": {"model_type": "clip_vision_model", "image_size": 224, "patch_size": 32},
    "image_grid_pinpoints": [[224, 448], [448, 224]],
}
MISTRAL_3 = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "vision_config": {"patch_size": 14},
}
BOUNDS = {"shortest_edge": 784, "longest_edge": 7840}


def model(directory: Path, config: dict[str, Any], **settings: Any) -> ImageProcessor:
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    processor = processors_of_model(directory, config)["image"]
    assert isinstance(processor, ImageProcessor)
    return processor


@pytest.fixture
def qwen(tmp_path: Path) -> ImageProcessor:
    return model(tmp_path, QWEN, image_processor_type="Qwen2VLImageProcessor", size=BOUNDS)


@pytest.fixture
def llava(tmp_path: Path) -> ImageProcessor:
    fields = {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}}
    return model(tmp_path, LLAVA, image_processor_type="CLIPImageProcessor", **fields)


def test_an_identity_is_that_of_pixels_and_size(
    qwen: ImageProcessor, random_image: Callable[..., Image.Image]
) -> None:
    image = random_image(20, 30)
    identity = qwen.identity(image)
    assert len(identity) == 32
    assert identity == qwen.identity(image.copy())
    changed = image.copy()
    changed.putpixel((19, 29), (0, 0, 0))
    turned = Image.frombytes("RGB", (30, 20), image.tobytes())
    flat = Image.frombytes("RGB", (60, 10), image.tobytes())
    others = [qwen.identity(each) for each in (changed, turned, flat)]
    assert len({identity, *others}) == 4


def test_an_identity_is_that_of_everything_that_decides_the_inputs(
    tmp_path: Path, random_image: Callable[..., Image.Image]
) -> None:
    image = random_image(20, 30)
    name = {"image_processor_type": "Qwen2VLImageProcessor"}
    changes: list[dict[str, Any]] = [
        {},
        {"size": BOUNDS},
        {"resample": 2},
        {"do_resize": False},
        {"image_mean": [0.5, 0.5, 0.5]},
        {"image_std": 0.5},
        {"rescale_factor": 1.0},
        {"do_rescale": False},
        {"do_normalize": False},
    ]
    identities = {model(tmp_path, QWEN, **name, **each).identity(image) for each in changes}
    assert len(identities) == len(changes)


def test_overrides_change_an_identity_if_they_change_the_rules(
    qwen: ImageProcessor, random_image: Callable[..., Image.Image]
) -> None:
    image = random_image(20, 30)
    identity = qwen.identity(image)
    same: list[dict[str, Any]] = [
        {},
        {"size": BOUNDS},
        {"max_pixels": 7840},
        {"do_resize": True, "min_pixels": 784},
    ]
    assert {qwen.identity(image, each) for each in same} == {identity}
    assert qwen.identity(image, {"max_pixels": 7839}) != identity


def test_pixels_are_contiguous_and_read_only(
    qwen: ImageProcessor, llava: ImageProcessor, random_image: Callable[..., Image.Image]
) -> None:
    for processor in (qwen, llava):
        pixels = processor.prepare(random_image(50, 60)).data
        assert pixels.flags.c_contiguous
        with pytest.raises(ValueError, match="read-only"):
            pixels[0, 0, 0, 0] = 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_pixel": 3}, "mm_processor_kwargs: 'max_pixel' is not supported .* mean 'max_pix"),
        ({"max_pixels": -3}, "mm_processor_kwargs: .*must be a positive integer, not -3"),
        ({"max_pixels": b"3"}, "mm_processor_kwargs must be JSON"),
    ],
)
def test_errors_have_the_images_name(
    overrides: dict[str, Any],
    message: str,
    qwen: ImageProcessor,
    random_image: Callable[..., Image.Image],
) -> None:
    with pytest.raises(RequestError, match=f"^prompt 3: image 1: {message}"):
        qwen.prepare(random_image(9, 9), overrides, "prompt 3: image 1")
    with pytest.raises(RequestError, match=f"^prompt 3: image 1: {message}"):
        qwen.identity(random_image(9, 9), overrides, "prompt 3: image 1")


def test_tiles_that_the_tower_does_not_take_are_refused(
    llava: ImageProcessor, random_image: Callable[..., Image.Image]
) -> None:
    with pytest.raises(
        RequestError, match="image 1: the image becomes 40x64 pixels, but the model takes 64x64"
    ):
        llava.prepare(random_image(9, 9), {"crop_size": {"height": 64, "width": 40}}, "image 1")


def test_a_tower_for_other_tiles_than_all_images_become_is_refused_at_the_start(
    llava: ImageProcessor,
) -> None:
    llava.check({})
    size = {"height": 64, "width": 40}
    with pytest.raises(EngineStartError, match=r"takes tiles of 64x64 pixels, and .* of 40x64: ch"):
        llava.check({"crop_size": size})
    llava.check({"do_center_crop": False})  # then it depends on the image
    with pytest.raises(EngineStartError, match="of 40x64"):
        llava.check({"do_center_crop": False, "size": size})
    with pytest.raises(RequestError, match="the engine: mm_processor_kwargs: 'max_pixel' is not"):
        llava.check({"max_pixel": 3})


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("SiglipImageProcessor", {"size": {"height": 56, "width": 48}}),
        ("Gemma3ImageProcessor", {"size": {"height": 56, "width": 48}}),
        ("GotOcr2ImageProcessor", {"size": {"height": 56, "width": 48}}),
        ("Idefics3ImageProcessor", {"max_image_size": {"longest_edge": 56}}),
        ("Llama4ImageProcessor", {"size": {"height": 56, "width": 56}}),
        (
            "LlavaNextImageProcessor",
            {
                "size": {"shortest_edge": 56},
                "crop_size": {"height": 56, "width": 56},
                "image_grid_pinpoints": [[56, 112]],
            },
        ),
    ],
)
def test_tiles_have_the_sides_that_their_rules_say(
    kind: str,
    fields: dict[str, Any],
    tmp_path: Path,
    random_image: Callable[..., Image.Image],
) -> None:
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": kind} | fields)
    )
    settings = read_image_settings(tmp_path)
    assert settings is not None
    rules = rules_of_model(settings)
    for size in ((30, 90), (200, 100)):
        assert rules.sides() == rules.tiles(random_image(*size)).pixels.shape[1:3]


def test_a_model_without_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"has no settings for images; copy processor_conf"):
        processors_of_model(tmp_path, QWEN)


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (QWEN, {"image_processor_type": "CLIPImageProcessor"}, "needs Qwen's image processor"),
        (
            {"architectures": ["InternVLForConditionalGeneration"]},
            {"image_processor_type": "CLIPImageProcessor"},
            "needs InternVL's image processor",
        ),
        (LLAVA_NEXT, {"image_processor_type": "CLIPImageProcessor"}, "needs LLaVA-NeXT's image"),
        (
            LLAVA_NEXT,
            {
                "image_processor_type": "LlavaNextImageProcessor",
                "image_grid_pinpoints": [[448, 448]],
            },
            "tiles of 224 pixels and the sizes .*, the image processor has 224 and ..448, 448",
        ),
        (MISTRAL_3, {"image_processor_type": "Qwen2VLImageProcessor"}, "needs Pixtral's image pr"),
        (
            MISTRAL_3,
            {"image_processor_type": "PixtralImageProcessor", "patch_size": 14},
            "patches of 14 pixels and merges squares of 2, the image processor has 14 and 1",
        ),
        (
            QWEN,
            {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16},
            "patches of 14 pixels and merges squares of 2, the image processor has 16 and 2",
        ),
    ],
)
def test_settings_of_another_model_are_refused(
    config: dict[str, Any], fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=message):
        model(tmp_path, config, **fields)


def test_pillow_is_imported_with_the_first_image(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(
        '{"image_processor_type": "CLIPImageProcessor"}'
    )
    source = f"""
import sys
from pathlib import Path
import shmllm.frontend.images.opening, shmllm.frontend.items.files
from shmllm.frontend.items.registry import processors_of_model
processor = processors_of_model(Path({str(tmp_path)!r}), {LLAVA | {"vision_config": {}}!r})["image"]
assert processor.expand_text("prompt", "no image", []) == "no image"
assert {{"PIL", "torch", "transformers"}}.isdisjoint(sys.modules), "imported"
"""
    assert run_source(source).returncode == 0
