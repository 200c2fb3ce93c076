"""Tiles have the bits of transformers' `...ImageProcessorPil` classes, for every shape."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.variants import slow
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
from transformers.models.chinese_clip.image_processing_pil_chinese_clip import (
    ChineseCLIPImageProcessorPil,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import (
    Ernie4_5_VLMoeImageProcessorPil,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
    GotOcr2ImageProcessorPil,
)
from transformers.models.granite_docling.image_processing_pil_granite_docling import (
    GraniteDoclingImageProcessorPil,
)
from transformers.models.hunyuan_vl.image_processing_pil_hunyuan_vl import (
    HunYuanVLImageProcessorPil,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.video_llama_3.image_processing_pil_video_llama_3 import (
    VideoLlama3ImageProcessorPil,
)

from shmllm.errors import EngineStartError, RequestError
from shmllm.formats.image_settings import ImageSettings, pixel_table, settings_of
from shmllm.frontend.images.rules.family import Tiles
from shmllm.frontend.images.rules.registry import rules_of_model, rules_of_request

PAN_AND_SCAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 16,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
SPLIT = {"size": {"longest_edge": 250}, "max_image_size": {"longest_edge": 64}}
QWEN3 = {"size": {"shortest_edge": 4096, "longest_edge": 65536}, "patch_size": 16}
SIZES = [[64, 256], [256, 64], [128, 128], [64, 128], [192, 64]]
SQUARE = {"height": 32, "width": 32}
ROWS = {"return_row_col_info": True}
DENSE = {
    "dense_max_patches": 20,
    "dense_max_scale": 0.8,
    "dense_min_aspect": 1.2,
    "dense_max_aspect": 5.0,
}
PROCESSORS: dict[str, Any] = {
    "clip": CLIPImageProcessorPil(),
    "clip, padded": CLIPImageProcessorPil(size={"shortest_edge": 20}, crop_size=[33, 64]),
    "clip, fixed": CLIPImageProcessorPil(size={"height": 70, "width": 90}, crop_size=65),
    "clip, not resized": CLIPImageProcessorPil(do_resize=False, crop_size=65),
    "llava": LlavaImageProcessorPil(size=64, crop_size=64),
    "llava_next": LlavaNextImageProcessorPil(size=64, crop_size=64, image_grid_pinpoints=SIZES),
    "llava_onevision": LlavaOnevisionImageProcessorPil(size=SQUARE, image_grid_pinpoints=SIZES),
    "chinese_clip": ChineseCLIPImageProcessorPil(
        size={"height": 70, "width": 60}, do_center_crop=False
    ),
    "siglip": SiglipImageProcessorPil(),
    "siglip2": Siglip2ImageProcessorPil(),
    "siglip2, few patches": Siglip2ImageProcessorPil(
        max_num_patches=30, patch_size=7, resample=3, image_mean=[0.4] * 3
    ),
    "blip": BlipImageProcessorPil(),
    "idefics3": Idefics3ImageProcessorPil(**SPLIT, **ROWS),
    "idefics3, whole": Idefics3ImageProcessorPil(**SPLIT, **ROWS, do_image_splitting=False),
    "idefics3, not resized": Idefics3ImageProcessorPil(**SPLIT, **ROWS, do_resize=False),
    "smolvlm": SmolVLMImageProcessorPil(**SPLIT, **ROWS),
    "qwen2": Qwen2VLImageProcessorPil(min_pixels=3136, max_pixels=40000),
    "qwen2, narrow bounds": Qwen2VLImageProcessorPil(min_pixels=20000, max_pixels=20100),
    "qwen3": Qwen2VLImageProcessorPil(**QWEN3, image_mean=[0.5] * 3, image_std=[0.5] * 3),
    "ernie4_5_vl": Ernie4_5_VLMoeImageProcessorPil(
        size={"shortest_edge": 3136, "longest_edge": 40000}
    ),
    "glm4v": Glm4vImageProcessorPil(size={"shortest_edge": 6272, "longest_edge": 80000}),
    "glm4v, narrow bounds": Glm4vImageProcessorPil(
        size={"shortest_edge": 40001, "longest_edge": 40203}
    ),
    "video_llama_3": VideoLlama3ImageProcessorPil(min_pixels=3136, max_pixels=40000),
    "hunyuan_vl": HunYuanVLImageProcessorPil(min_pixels=3136, max_pixels=40000, resample=1),
    "paddleocr_vl": PaddleOCRVLImageProcessorPil(min_pixels=3136, max_pixels=40000),
    "paddleocr_vl, narrow bounds": PaddleOCRVLImageProcessorPil(
        size={"shortest_edge": 20000, "longest_edge": 20100}
    ),
    "pixtral": PixtralImageProcessorPil(
        size={"longest_edge": 200}, patch_size={"height": 28, "width": 28}
    ),
    "pixtral, two bounds": PixtralImageProcessorPil(size={"height": 200, "width": 220}),
    "internvl": GotOcr2ImageProcessorPil(size=SQUARE, crop_to_patches=True),
    "internvl, some tiles": GotOcr2ImageProcessorPil(
        size=SQUARE, crop_to_patches=True, min_patches=3, max_patches=7
    ),
    "ovis2": Ovis2ImageProcessorPil(size=SQUARE, crop_to_patches=True),
    "ovis2, nearest": Ovis2ImageProcessorPil(
        size=SQUARE, crop_to_patches=True, use_covering_area_grid=False, min_patches=2
    ),
    "ovis2, whole": Ovis2ImageProcessorPil(size=SQUARE),
    "granite_docling": GraniteDoclingImageProcessorPil(size=SQUARE),
    "granite_docling, dense": GraniteDoclingImageProcessorPil(
        size=SQUARE, min_patches=2, max_patches=4, **DENSE
    ),
    "gemma3": Gemma3ImageProcessorPil(),
    "gemma3, crops": Gemma3ImageProcessorPil(**PAN_AND_SCAN),
    "gemma4": Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70),
    "gemma4, other squares": Gemma4ImageProcessorPil(
        patch_size=3,
        max_soft_tokens=140,
        pooling_kernel_size=2,
        do_normalize=True,
        image_mean=[0.4] * 3,
        image_std=[0.3] * 3,
    ),
}
SIDES = [(1, 1), (1, 90), (90, 1), (2, 3), (200, 1), (13, 14), (28, 28), (64, 64), (64, 128)]


def settings(processor: Any) -> ImageSettings:
    return settings_of(json.loads(processor.to_json_string()), "file")


def inputs(settings: ImageSettings, tiles: Tiles) -> np.ndarray:
    """The model's inputs, float32 [tiles, 3, height, width]."""
    assert tiles.pixels.dtype == np.uint8
    assert tiles.pixels.flags.c_contiguous
    planes = np.moveaxis(tiles.pixels, -1, 1)
    return pixel_table(settings)[np.arange(3)[:, None, None], planes]


def patches(planes: np.ndarray, processor: Any) -> np.ndarray:
    """Qwen's order of pixels: [rows * columns, 3 * frames * patch * patch]."""
    side, merge = processor.patch_size, processor.merge_size
    rows, columns = (each // side for each in planes.shape[2:])
    split = planes.reshape(3, rows // merge, merge, side, columns // merge, merge, side)
    split = split.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    repeated = (*split.shape[:5], processor.temporal_patch_size, side, side)
    return np.broadcast_to(split, repeated).reshape(rows * columns, -1)


IN_ROWS = HunYuanVLImageProcessorPil, VideoLlama3ImageProcessorPil
"""The processors whose patches are flat, and follow one another row by row."""


def rows_of_patches(planes: np.ndarray, processor: Any) -> np.ndarray:
    """The order of pixels of these and PaddleOCR-VL: [rows * columns, 3, patch, patch]."""
    side = processor.patch_size
    rows, columns = (each // side for each in planes.shape[2:])
    split = planes.reshape(3, rows, side, columns, side).transpose(1, 3, 0, 2, 4)
    return split.reshape(rows * columns, 3, side, side)


def pixels_of_patches(planes: np.ndarray, processor: Any) -> np.ndarray:
    """The order of pixels of Gemma 4 and SigLIP 2: [rows * columns, patch * patch * 3]."""
    size = processor.patch_size
    rows, columns = (each // size for each in planes.shape[2:])
    split = planes.reshape(3, rows, size, columns, size).transpose(1, 3, 2, 4, 0)
    return split.reshape(rows * columns, -1)


def compare(processor: Any, tiles: Tiles, image: Image.Image, **changes: Any) -> None:
    expected = processor(image, return_tensors="np", **changes)
    ours = inputs(settings(processor), tiles)
    theirs = expected["pixel_values"]
    if "image_grid_thw" in expected:
        assert expected["image_grid_thw"].tolist() == [list(tiles.grid)]
        in_rows = theirs.ndim == 4 or isinstance(processor, IN_ROWS)
        ours = (rows_of_patches if in_rows else patches)(ours, processor).reshape(theirs.shape)
    elif "image_position_ids" in expected:
        places = expected["image_position_ids"][0]
        count = int((places[:, 0] >= 0).sum())
        rows, columns = tiles.grid[1:]
        assert count == rows * columns
        assert np.array_equal(places[:count, ::-1], np.indices((rows, columns)).reshape(2, -1).T)
        ours, theirs = pixels_of_patches(ours, processor), theirs[0, :count]
    elif "spatial_shapes" in expected:
        assert tiles.grid == (1, *expected["spatial_shapes"][0])
        ours = pixels_of_patches(ours, processor)
        theirs = theirs[0, : len(ours)]
        assert expected["pixel_attention_mask"].sum() == len(ours)
    elif "rows" in expected:
        theirs = theirs[0]
        rows, columns = expected["rows"][0][0], expected["cols"][0][0]
        assert tiles.grid == (len(theirs), rows, columns)
    elif hasattr(processor, "image_grid_pinpoints"):
        theirs = theirs[0]
        assert tiles.grid == (len(theirs), *expected["image_sizes"][0])
    elif "image_sizes" in expected:
        sides = [side // processor.patch_size["height"] for side in expected["image_sizes"][0]]
        assert tiles.grid == (1, *sides)
    elif "grids" in expected:
        assert tiles.grid == (len(theirs), *expected["grids"][0])
    elif "num_patches" in expected:
        assert tiles.grid[0] == len(theirs) == expected["num_patches"][0]
        assert tiles.grid[1] * tiles.grid[2] in (1, len(theirs) - 1)
    else:
        assert tiles.grid == (len(theirs), 1, 1)
    assert ours.shape == theirs.shape
    assert theirs.dtype == np.float32
    assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("name", PROCESSORS)
def test_tiles_have_the_bits_of_transformers(
    name: str, random_image: Callable[..., Image.Image]
) -> None:
    processor = PROCESSORS[name]
    rules = rules_of_model(settings(processor))
    draw = random.Random(name)
    sides = [*SIDES, *((draw.randint(1, 150), draw.randint(1, 150)) for _ in range(25))]
    for width, height in sides:
        image = random_image(width, height)
        compare(processor, rules.tiles(image), image)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSORS)
def test_tiles_have_the_bits_of_transformers_for_many_images(
    name: str, random_image: Callable[..., Image.Image]
) -> None:
    processor = PROCESSORS[name]
    rules = rules_of_model(settings(processor))
    draw = random.Random(f"many {name}")
    for _ in range(300):
        width = draw.randint(1, 700)
        height = draw.randint(max(1, width // 50), min(700, width * 50))
        image = random_image(width, height)
        compare(processor, rules.tiles(image), image)


@pytest.mark.parametrize("sides", [slow((640, 480)), (40, 3000), slow((5000, 70))])
def test_published_settings_have_the_bits_of_transformers(
    sides: tuple[int, int], random_image: Callable[..., Image.Image]
) -> None:
    image = random_image(*sides)
    for processor in (
        SmolVLMImageProcessorPil(
            size={"longest_edge": 2048}, max_image_size={"longest_edge": 512}, **ROWS
        ),
        Idefics3ImageProcessorPil(size={"longest_edge": 5000}, **ROWS),
        Gemma3ImageProcessorPil(size={"height": 896, "width": 896}),
        Gemma4ImageProcessorPil(),
        Gemma4ImageProcessorPil(max_soft_tokens=1120),
        PixtralImageProcessorPil(
            size={"longest_edge": 1540}, patch_size={"height": 28, "width": 28}
        ),
        CLIPImageProcessorPil(size=336, crop_size=336),
        LlavaNextImageProcessorPil(size={"shortest_edge": 336}, crop_size=336),
        LlavaOnevisionImageProcessorPil(),
        GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, crop_to_patches=True),
    ):
        compare(processor, rules_of_model(settings(processor)).tiles(image), image)


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("clip", {"size": {"shortest_edge": 50}, "crop_size": {"height": 40, "width": 30}}),
    ("clip", {"do_center_crop": False, "resample": 0}),
    ("clip", {"do_resize": False}),
    ("internvl", {"crop_to_patches": False}),
    ("internvl", {"min_patches": 2, "max_patches": 3, "resample": 2}),
    ("internvl", {"max_patches": 1}),
    ("internvl", {"min_patches": 4, "max_patches": 3}),
    ("ovis2", {"max_patches": 3, "resample": 2}),
    ("ovis2", {"use_covering_area_grid": False, "min_patches": 3}),
    ("ovis2", {"crop_to_patches": False, "size": {"height": 20, "width": 50}}),
    ("granite_docling", DENSE | {"max_patches": 2}),
    (
        "granite_docling",
        DENSE | {"max_patches": 2, "dense_max_scale": 0.0, "dense_max_aspect": 0.0},
    ),
    ("granite_docling", {"max_patches": 300, "min_patches": 20, "resample": 2}),
    ("granite_docling", {"crop_to_patches": False, "min_patches": 4}),
    ("granite_docling, dense", {"dense_min_aspect": 0.1, "size": {"height": 20, "width": 50}}),
    ("granite_docling, dense", {"dense_min_aspect": 0.0}),
    ("llava_onevision", {"resample": 2}),
    ("siglip", {"size": {"height": 30, "width": 50}, "resample": 2}),
    ("siglip", {"do_resize": False}),
    ("siglip2", {"max_num_patches": 300, "resample": 3}),
    ("idefics3", {"size": {"longest_edge": 100}}),
    ("idefics3", {"do_image_splitting": False}),
    ("smolvlm", {"max_image_size": {"longest_edge": 32}, "resample": 3}),
    ("smolvlm", {"do_resize": False}),
    ("qwen2", {"size": {"shortest_edge": 784, "longest_edge": 7840}}),
    ("glm4v", {"size": {"shortest_edge": 3136, "longest_edge": 15680}, "resample": 2}),
    ("qwen3", {"resample": 2}),
    ("pixtral", {"size": {"longest_edge": 40}, "resample": 2}),
    ("pixtral, two bounds", {"size": {"height": 90, "width": 60}}),
    ("gemma3", PAN_AND_SCAN),
    ("gemma3, crops", {"do_pan_and_scan": False, "size": {"height": 40, "width": 50}}),
    ("gemma4", {"max_soft_tokens": 560, "resample": 2}),
]


@pytest.mark.parametrize(("name", "changes"), CHANGES)
def test_changes_of_a_request_have_the_effect_that_they_have_in_transformers(
    name: str, changes: dict[str, Any], random_image: Callable[..., Image.Image]
) -> None:
    processor = PROCESSORS[name]
    rules = rules_of_request(settings(processor), changes)
    for sides in ((37, 90), (150, 80)):
        image = random_image(*sides)
        compare(processor, rules.tiles(image), image, **changes)


@pytest.mark.parametrize(
    ("changes", "fewest", "most"),
    [
        ({"min_pixels": 5000}, 5000, 40000),
        ({"max_pixels": 9000}, 3136, 9000),
        ({"size": {"longest_edge": 8000}}, 3136, 8000),
        ({"size": {"longest_edge": 8000}, "max_pixels": 9000}, 3136, 9000),
    ],
)
def test_a_request_may_change_one_of_qwens_bounds(
    changes: dict[str, Any], fewest: int, most: int, random_image: Callable[..., Image.Image]
) -> None:
    changed = Qwen2VLImageProcessorPil(min_pixels=fewest, max_pixels=most)
    image = random_image(123, 77)
    tiles = rules_of_request(settings(PROCESSORS["qwen2"]), changes).tiles(image)
    compare(changed, tiles, image)


@pytest.mark.parametrize("kind", [Qwen2VLImageProcessorPil, PaddleOCRVLImageProcessorPil])
def test_older_files_have_bounds_twice(kind: Any, random_image: Callable[..., Image.Image]) -> None:
    bounds = {"min_pixels": 3136, "max_pixels": 9000}
    fields = {"image_processor_type": kind.__name__, "size": dict(bounds)} | bounds
    image = random_image(123, 77)
    tiles = rules_of_model(settings_of(fields, "file")).tiles(image)
    compare(kind(size=dict(bounds), **bounds), tiles, image)


def test_qwen_without_resizing_takes_whole_squares_of_patches(
    random_image: Callable[..., Image.Image],
) -> None:
    processor = Qwen2VLImageProcessorPil(do_resize=False)
    rules = rules_of_model(settings(processor))
    image = random_image(56, 84)
    compare(processor, rules.tiles(image), image)
    with pytest.raises(RequestError, match="multiples of 28 pixels, not 56x83"):
        rules.tiles(random_image(56, 83))


def test_gemma_4_without_resizing_takes_whole_squares_of_patches(
    random_image: Callable[..., Image.Image],
) -> None:
    processor = Gemma4ImageProcessorPil(do_resize=False, patch_size=4, max_soft_tokens=70)
    rules = rules_of_model(settings(processor))
    image = random_image(72, 36)
    compare(processor, rules.tiles(image), image)
    with pytest.raises(RequestError, match="multiples of 12 pixels, not 72x37"):
        rules.tiles(random_image(72, 37))
    with pytest.raises(RequestError, match="the image has 1,156 embeddings, more than 1,120"):
        rules.tiles(random_image(408, 408))


@pytest.mark.parametrize("name", ["qwen2", "qwen2, narrow bounds", "qwen3"])
def test_a_narrow_image_has_one_patch_in_its_width_at_least(
    name: str, random_image: Callable[..., Image.Image]
) -> None:
    processor = PROCESSORS[name]
    for sides in ((3200, 17), (17, 3200)):
        image = random_image(*sides)
        tiles = rules_of_model(settings(processor)).tiles(image)
        assert 2 in tiles.grid
        compare(processor, tiles, image)


@pytest.mark.parametrize("name", ["qwen2", "paddleocr_vl"])
def test_narrow_images_are_refused_as_by_transformers(
    name: str, random_image: Callable[..., Image.Image]
) -> None:
    processor = PROCESSORS[name]
    rules = rules_of_model(settings(processor))
    for sides in ((201, 1), (1, 201)):
        with pytest.raises(ValueError, match="aspect ratio"):
            processor(random_image(*sides))
        with pytest.raises(RequestError, match="too narrow: one side may be at most 200 times"):
            rules.tiles(random_image(*sides))


def test_pixtral_refuses_images_whose_shorter_side_would_have_no_pixel(
    random_image: Callable[..., Image.Image],
) -> None:
    rules = rules_of_model(settings(PROCESSORS["pixtral"]))
    assert rules.tiles(random_image(2, 400)).grid == (1, 8, 1)
    with pytest.raises(RequestError, match=r"an image of 401x2 pixels is too narrow: .* to 200x0"):
        rules.tiles(random_image(401, 2))


def test_an_image_that_would_become_too_large_is_refused(
    random_image: Callable[..., Image.Image],
) -> None:
    with pytest.raises(
        RequestError, match="224x1120000 by the model's settings, more than 89,478,485 pixels"
    ):
        rules_of_model(settings(PROCESSORS["clip"])).tiles(random_image(1, 5000))
    rules = rules_of_request(settings(PROCESSORS["qwen2"]), {"min_pixels": 10**9})
    with pytest.raises(RequestError, match="more than 89,478,485 pixels"):
        rules.tiles(random_image(10, 10))


def test_crops_of_several_sizes_are_refused(random_image: Callable[..., Image.Image]) -> None:
    rules = rules_of_request(settings(PROCESSORS["gemma3, crops"]), {"do_resize": False})
    with pytest.raises(RequestError, match="'do_pan_and_scan' needs 'do_resize'"):
        rules.tiles(random_image(100, 50))


def test_crops_without_pixels_are_refused(random_image: Callable[..., Image.Image]) -> None:
    changes = PAN_AND_SCAN | {"pan_and_scan_min_crop_size": 1}
    rules = rules_of_request(settings(PROCESSORS["gemma3"]), changes)
    with pytest.raises(RequestError, match="5x1 pixels into 4 crops"):
        rules.tiles(random_image(5, 1))


def test_llava_next_shows_images_of_which_no_pixel_counts(
    random_image: Callable[..., Image.Image],
) -> None:
    processor = PROCESSORS["llava_next"]
    for sides in ((1300, 2), (3, 2000)):
        image = random_image(*sides)
        compare(processor, rules_of_model(settings(processor)).tiles(image), image)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("clip", {1: 2}, "1 is not supported for CLIPImageProcessor; did you mean '"),
        ("clip", {"sise": {}}, "'sise' is not supported for CLIPImageProcessor; did you mean 'si"),
        ("clip", {"do_normalize": False}, "'do_normalize' is not supported"),
        ("clip", {3: False}, "3 is not supported"),
        ("clip", {"size": None}, "'size' must have a value"),
        ("clip", {"size": {"longest_edge": 3}}, "'size' must have the keys 'shortest_edge' or"),
        ("clip", {"size": {"shortest_edge": 0}}, r"'size\.shortest_edge' must be a positive"),
        ("siglip2", {"max_num_patches": 4097}, "'max_num_patches' must be at most 4096, not 4097"),
        ("clip", {"size": {"shortest_edge": True}}, "positive integer, not True"),
        ("llava_next", {"crop_size": 64}, "'crop_size' is not supported for LlavaNextImageProc"),
        ("internvl", {"max_patches": 0}, "'max_patches' must be a positive integer, not 0"),
        ("internvl", {"max_patches": 10**9}, "'max_patches' .* allows images of 1,024,000,000,000"),
        ("internvl", {"crop_to_patches": 1}, "'crop_to_patches' must be true or false"),
        ("granite_docling", {"do_resize": False}, "'do_resize' is not supported for GraniteDocl"),
        ("granite_docling", {"max_patches": 3, "min_patches": 4}, "'min_patches' .4. must not exc"),
        ("granite_docling, dense", {"dense_max_patches": 10**9}, "'dense_max_patches' .* allows"),
        ("granite_docling, dense", {"dense_max_scale": -1}, "must be a positive number, not -1"),
        ("siglip", {"crop_size": 3}, "'crop_size' is not supported for SiglipImageProcessor"),
        ("siglip", {"resample": 6}, "'resample' must be a filter of pillow, 0 to 5, not 6"),
        ("idefics3", {"max_pixels": 3}, "'max_pixels' is not supported"),
        ("smolvlm", {"do_image_splitting": 1}, "must be true or false, not 1"),
        ("qwen2", {"patch_size": 16}, "'patch_size' is not supported"),
        ("qwen2", {"min_pixels": "3"}, "must be a positive integer, not '3'"),
        ("qwen2", {"size": 3}, "'size' must have the keys 'shortest_edge' and 'longest_edge'"),
        ("glm4v", {"max_pixels": 9}, "'max_pixels' is not supported for Glm4vImageProcessor"),
        ("pixtral", {"patch_size": 14}, "'patch_size' is not supported for PixtralImageProcessor"),
        ("gemma3", {"pan_and_scan_min_ratio_to_activate": 0}, "must be a positive number, not 0"),
        ("gemma3", {"pan_and_scan_max_num_crops": 0.5}, "positive integer, not 0.5"),
        ("gemma4", {"size": {"height": 3, "width": 3}}, "'size' is not supported for Gemma4Ima"),
        ("gemma4", {"max_soft_tokens": 71}, "must be one of 70, 140, 280, 560, 1120, not 71"),
    ],
)
def test_a_change_that_is_wrong_is_named(name: str, changes: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        rules_of_request(settings(PROCESSORS[name]), changes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_processor_type": "ViTImageProcessor"}, "'ViTImageProcessor' is not supp"),
        ({"image_processor_type": "PixtralImageProcessor", "do_center_crop": True}, "'do_center"),
        ({"image_processor_type": "PixtralImageProcessor", "patch_size": [14, 16]}, "a square"),
        ({"image_processor_type": "LlavaImageProcessor", "do_pad": True}, "'do_pad' is not supp"),
        ({"image_processor_type": "LlavaNextImageProcessor", "size": 64}, "'crop_size' .* must be"),
        (
            {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": [[224, 9]]},
            "'image_grid_pinpoints' must list .* multiples of a tile's 224 pixels, not",
        ),
        ({"image_processor_type": "CLIPImageProcessor", "size": "x"}, "'size' must have the keys"),
        ({"image_processor_type": "Qwen2VLImageProcessor", "merge_size": 0}, "'merge_size' must"),
        (
            {"image_processor_type": "PaddleOCRVLImageProcessor", "temporal_patch_size": 2},
            "'temporal_patch_size' must be 1, not 2",
        ),
    ],
)
def test_settings_that_are_not_supported_are_named(fields: Any, message: str) -> None:
    with pytest.raises(EngineStartError, match=f"file: .*{message}"):
        rules_of_model(settings_of(fields, "file"))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (CLIPImageProcessorPil, 50),
        (CLIPImageProcessorPil, [40, 50]),
        (SiglipImageProcessorPil, 50),
        (Gemma3ImageProcessorPil, 50),
        (Gemma3ImageProcessorPil, [40, 50]),
    ],
)
def test_older_forms_of_a_size_mean_what_they_mean_in_transformers(
    kind: Any, value: Any, random_image: Callable[..., Image.Image]
) -> None:
    fields = {"image_processor_type": kind.__name__, "size": value, "crop_size": 45}
    read = settings_of(fields, "file")
    image = random_image(61, 83)
    tiles = rules_of_model(read).tiles(image)
    compare(kind(size=value, crop_size=45), tiles, image)
