"""Models that read pages: prompts and pixels of transformers' processors, also for large pages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image
from support.torchvision_modules import without_videos
from support.variants import slow
from transformers import DeepseekOcr2Config, GlmOcrConfig, GotOcr2Config, LightOnOcrConfig
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import (
    DeepseekOcr2ImageProcessorPil,
)
from transformers.models.deepseek_ocr2.processing_deepseek_ocr2 import DeepseekOcr2Processor
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.got_ocr2.processing_got_ocr2 import GotOcr2Processor
from transformers.models.hunyuan_vl.image_processing_pil_hunyuan_vl import (
    HunYuanVLImageProcessorPil,
)
from transformers.models.hunyuan_vl.processing_hunyuan_vl import HunYuanVLProcessor
from transformers.models.lighton_ocr.processing_lighton_ocr import LightOnOcrProcessor
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)
from transformers.models.paddleocr_vl.processing_paddleocr_vl import PaddleOCRVLProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

from shmllm.errors import EngineStartError, RequestError
from shmllm.formats.image_settings import pixel_table
from shmllm.frontend.items.registry import processors_of_model
from shmllm.frontend.placeholders.hunyuan_vl import HunYuanVLPlaceholder
from shmllm.frontend.placeholders.qwen_vl import DotsOcrPlaceholder

Make = Callable[..., Any]
PADDLE = ["<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"]
GLM = ["<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"]
LIGHTON = {
    "image_token": "<|image_pad|>",
    "image_break_token": "<|vision_pad|>",
    "image_end_token": "<|vision_end|>",
}


class Reader(NamedTuple):
    """transformers' processor, and what we make of its files.

    Attributes:
        theirs: the processor.
        ours: ours for images.
        template: a chat with one image, as the authors' template writes it.
    """

    theirs: Any
    ours: Any
    template: str

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.theirs.tokenizer.encode(text, add_special_tokens=False)
        return ids


def lighton_ocr(make_tokenizer: Make, directory: Path, **images: Any) -> Reader:
    """The settings of LightOnOCR-2-1B."""
    tokenizer = make_tokenizer([*LIGHTON.values(), "<|im_start|>", "<|im_end|>"], **LIGHTON)
    settings = {"size": {"longest_edge": 1540}, "patch_size": 14} | images
    processor = LightOnOcrProcessor(PixtralImageProcessorPil(**settings), tokenizer)
    processor.save_pretrained(directory)
    config = LightOnOcrConfig(image_token_id=processor.image_token_id).to_dict()
    config["architectures"] = ["LightOnOcrForConditionalGeneration"]
    ours = processors_of_model(directory, config)["image"]
    template = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return Reader(processor, ours, template)


def glm_ocr(make_tokenizer: Make, directory: Path, **images: Any) -> Reader:
    """The settings of GLM-OCR."""
    tokenizer = make_tokenizer(["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", *GLM])
    settings = {"size": {"shortest_edge": 12_544, "longest_edge": 9_633_792}} | images
    pictures = Glm46VImageProcessorPil(**settings)
    processor = without_videos(Glm46VProcessor)(pictures, tokenizer, None)
    pictures.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    config = GlmOcrConfig(image_token_id=processor.image_token_id).to_dict()
    config["architectures"] = ["GlmOcrForConditionalGeneration"]
    ours = processors_of_model(directory, config)["image"]
    template = "[gMASK]<sop><|user|>\n{}\nText Recognition:<|assistant|>\n"
    return Reader(processor, ours, template)


def paddleocr_vl(make_tokenizer: Make, directory: Path, **images: Any) -> Reader:
    """The settings of PaddleOCR-VL, and its fields, which are not nested."""
    tokenizer = make_tokenizer(
        ["<|begin_of_sentence|>", *PADDLE], image_token="<|IMAGE_PLACEHOLDER|>"
    )
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    bounds = {"min_pixels": 147_384, "max_pixels": 2_822_400}
    processor = PaddleOCRVLProcessor(
        PaddleOCRVLImageProcessorPil(**half, **bounds, **images), tokenizer
    )
    settings = {"image_processor_type": "PaddleOCRVLImageProcessor"} | half | bounds | images
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    tokenizer.save_pretrained(directory)
    config = {
        "architectures": ["PaddleOCRVLForConditionalGeneration"],
        "image_token_id": processor.image_token_id,
        "vision_config": {"model_type": "paddleocr_vl", "patch_size": 14},
    }
    ours = processors_of_model(directory, config)["image"]
    return Reader(processor, ours, "<|begin_of_sentence|>User: {}OCR:\nAssistant:\n")


def hunyuan_vl(make_tokenizer: Make, directory: Path, **images: Any) -> Reader:
    """The settings of HunyuanOCR, of which the filter does not count, and its fields, which are not
    nested."""
    texts = HunYuanVLPlaceholder.TEXTS
    marks = {"image_token": texts.image}
    marks |= {"image_start_token": texts.begin[1], "image_end_token": texts.end[1]}
    tokenizer = make_tokenizer([*marks.values()], **marks, pad_token=texts.image)
    bounds = {"min_pixels": 512 * 512, "max_pixels": 2048 * 2048} | images
    processor = HunYuanVLProcessor(HunYuanVLImageProcessorPil(**bounds, resample=1), tokenizer)
    settings = {"image_processor_type": "HunYuanVLImageProcessor", "resample": 1} | bounds
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    tokenizer.save_pretrained(directory)
    config = {
        "architectures": ["HunYuanVLForConditionalGeneration"],
        "image_token_id": processor.image_token_id,
        "vision_config": {"patch_size": 16, "spatial_merge_size": 2},
    }
    ours = processors_of_model(directory, config)["image"]
    assert ours.mark == f"{texts.begin[1]}{texts.image}{texts.end[1]}"
    return Reader(processor, ours, "System. {}Read it.")


def dots_ocr(make_tokenizer: Make, directory: Path, **images: Any) -> Reader:
    """The settings of dots.ocr, and its fields, which are not nested. vLLM reads pages with
    Qwen2-VL's processor and this token of images."""
    texts = DotsOcrPlaceholder.TEXTS
    tokenizer = make_tokenizer(
        ["<|user|>", "<|endofuser|>", texts.begin[1], texts.end[1], texts.image]
    )
    settings = {"min_pixels": 3136, "max_pixels": 11_289_600, "temporal_patch_size": 1} | images
    pictures = Qwen2VLImageProcessorPil(**settings)
    own = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2}
    (directory / "preprocessor_config.json").write_text(json.dumps(own | settings))
    tokenizer.save_pretrained(directory)
    tokenizer.image_token = texts.image
    processor = without_videos(Qwen2VLProcessor)(pictures, tokenizer, None)
    config = {
        "architectures": ["DotsOCRForCausalLM"],
        "image_token_id": processor.image_token_id,
        "vision_config": {"patch_size": 14, "spatial_merge_size": 2},
    }
    ours = processors_of_model(directory, config)["image"]
    assert ours.mark == "<|img|><|imgpad|><|endofimg|>"
    return Reader(processor, ours, "<|user|>{}Read it.<|endofuser|>")


READERS: dict[str, Callable[..., Reader]] = {
    "dots_ocr": dots_ocr,
    "hunyuan_vl": hunyuan_vl,
    "lighton_ocr": lighton_ocr,
    "glm_ocr": glm_ocr,
    "paddleocr_vl": paddleocr_vl,
}
IN_ROWS = ("hunyuan_vl", "paddleocr_vl")
"""Models whose patches follow one another row by row, those of others square by square."""
PAGES = [(900, 1200), (480, 97)]
PAGES += map(slow, ((1654, 2339), (1700, 2200), (3000, 800), (2480, 3508)))
SMALL = [(200, 90), (57, 171), (90, 400)]


def pixels(reader: Reader, item: Any) -> np.ndarray:
    """The inputs of the tower, float32 [3, height, width]."""
    planes = np.moveaxis(item.data[0], -1, 0)
    return pixel_table(reader.ours.settings)[np.arange(3)[:, None, None], planes]


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("sides", PAGES)
def test_pages_are_those_of_transformers(
    name: str,
    sides: tuple[int, int],
    make_tokenizer: Make,
    random_image: Callable[..., Image.Image],
    tmp_path: Path,
) -> None:
    reader = READERS[name](make_tokenizer, tmp_path)
    page = random_image(*sides)
    text = reader.template.format(reader.ours.mark)
    expected = reader.theirs(text=[text], images=[page])
    item = reader.ours.prepare(page)
    ids = list(map(int, expected["input_ids"][0]))
    assert reader.encode(reader.ours.expand_text("prompt", text, [item])) == ids
    assert reader.ours.expand_ids("prompt", reader.encode(text), [item], reader.encode) == ids
    assert ids.count(reader.ours.token_id) == item.num_tokens
    ours, theirs = pixels(reader, item), np.asarray(expected["pixel_values"])
    if "image_grid_thw" in expected:
        assert np.asarray(expected["image_grid_thw"]).tolist() == [list(item.grid)]
        theirs = picture(theirs, item.grid, name in IN_ROWS)
    assert ours.tobytes() == theirs.reshape(ours.shape).tobytes()


def picture(patches: np.ndarray, grid: tuple[int, int, int], in_rows: bool) -> np.ndarray:
    """The planes, [3, height, width], of patches that follow one another row by row, or as flat
    ones square by square, with one frame or several."""
    _, rows, columns = grid
    if in_rows:
        side = 14 if patches[0].size == 3 * 14 * 14 else 16
        planes = patches.reshape(rows, columns, 3, side, side).transpose(2, 0, 3, 1, 4)
        return np.ascontiguousarray(planes).reshape(3, rows * side, columns * side)
    split = patches.reshape(rows // 2, columns // 2, 2, 2, 3, -1, 14, 14)
    planes = split[:, :, :, :, :, 0].transpose(4, 0, 2, 5, 1, 3, 6)
    return np.ascontiguousarray(planes).reshape(3, rows * 14, columns * 14)


@pytest.mark.parametrize("is_cut", [False, True])
def test_pages_of_got_ocr_2_are_those_of_transformers(
    is_cut: bool, make_tokenizer: Make, random_image: Callable[..., Image.Image], tmp_path: Path
) -> None:
    """Its processor has its own prompt, and cuts no page unless it is asked to."""
    marks = ["<imgpad>", "<img>", "</img>", "<|im_start|>", "<|im_end|>"]
    tokenizer = make_tokenizer(marks)
    images = GotOcr2ImageProcessorPil(size={"height": 64, "width": 64}, crop_to_patches=True)
    theirs = GotOcr2Processor(images, tokenizer)
    images.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = GotOcr2Config(
        vision_config={"image_size": 64, "patch_size": 1}, image_token_index=theirs.image_token_id
    ).to_dict()
    config["architectures"] = ["GotOcr2ForConditionalGeneration"]
    ours = processors_of_model(tmp_path, config)["image"]
    page, changes = random_image(200, 90), {"crop_to_patches": True} if is_cut else {}
    expected = theirs(images=page, return_tensors="np", **changes)
    item = ours.prepare(page, changes)
    assert item.grid == ((9, 2, 4) if is_cut else (1, 1, 1))
    reader = Reader(theirs, ours, "")
    ids = list(map(int, expected["input_ids"][0]))
    query = " OCR upon the patch reference: " if is_cut else " OCR: "
    text = (
        f"<|im_start|>{theirs.system_query}<|im_end|><|im_start|>user\n{ours.mark}\n{query}"
        "<|im_end|><|im_start|>assistant\n"
    )
    assert reader.encode(ours.expand_text("prompt", text, [item])) == ids
    assert ours.expand_ids("prompt", reader.encode(text), [item], reader.encode) == ids
    planes = np.moveaxis(item.data, -1, 1)
    found = pixel_table(ours.settings)[np.arange(3)[:, None, None], planes]
    assert found.tobytes() == np.asarray(expected["pixel_values"]).tobytes()


def deepseek_ocr2(make_tokenizer: Make, directory: Path, **images: Any) -> Reader:
    """The settings of DeepSeek-OCR 2; those of cutting in the file do not count."""
    tokenizer = make_tokenizer(["<image>"])
    pictures = DeepseekOcr2ImageProcessorPil(max_patches=3, **images)
    processor = DeepseekOcr2Processor(pictures, tokenizer)
    pictures.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    config = DeepseekOcr2Config(image_token_id=processor.image_token_id).to_dict()
    config["architectures"] = ["DeepseekOcr2ForConditionalGeneration"]
    return Reader(processor, processors_of_model(directory, config)["image"], "")


@pytest.mark.parametrize(
    "sides", [(100, 768), (1200, 900), *map(slow, ((769, 20), (3000, 800), (2480, 3508)))]
)
def test_pages_of_deepseek_ocr_2_are_those_of_transformers(
    sides: tuple[int, int],
    make_tokenizer: Make,
    random_image: Callable[..., Image.Image],
    tmp_path: Path,
) -> None:
    reader = deepseek_ocr2(make_tokenizer, tmp_path)
    ours, page = reader.ours, random_image(*sides)
    text = f"a {ours.mark}\n{ours.mark}OCR:"
    expected = reader.theirs(text=[text], images=[page, page])
    item = ours.prepare(page)
    count = expected["num_local_patches"][0]
    assert item.num_tokens == 257 + 144 * count
    assert len(item.parts) == 1 + (count > 0)
    ids = list(map(int, expected["input_ids"][0]))
    assert reader.encode(ours.expand_text("prompt", text, [item, item])) == ids
    assert ours.expand_ids("prompt", reader.encode(text), [item, item], reader.encode) == ids
    wanted = [*map(np.asarray, expected.get("pixel_values_local", ()))][:count]
    wanted.append(np.asarray(expected["pixel_values"][0]))
    planes = [plane for part in item.parts for plane in np.moveaxis(part.data, -1, 1)]
    for plane, theirs in zip(planes, wanted, strict=True):
        found = pixel_table(ours.settings)[np.arange(3)[:, None, None], plane]
        assert found.tobytes() == theirs.tobytes()


def test_changes_of_deepseek_ocr_2_are_those_of_transformers(
    make_tokenizer: Make, random_image: Callable[..., Image.Image], tmp_path: Path
) -> None:
    reader = deepseek_ocr2(make_tokenizer, tmp_path)
    page = random_image(900, 900)
    for changes in ({"max_patches": 4, "min_patches": 3, "resample": 2}, {"max_patches": 1}):
        expected = reader.theirs(text=["<image>"], images=[page], **changes)
        tiles, _ = reader.ours.prepare(page, changes).parts
        planes = np.moveaxis(tiles.data, -1, 1)
        found = pixel_table(reader.ours.settings)[np.arange(3)[:, None, None], planes]
        assert found.tobytes() == np.stack(expected["pixel_values_local"]).tobytes()
    with pytest.raises(RequestError, match="is too narrow: it becomes 0x1024"):
        reader.ours.prepare(random_image(1, 3000))
    with pytest.raises(RequestError, match=r"'max_patches' .* allows images of"):
        reader.ours.prepare(page, {"max_patches": 10**6})
    with pytest.raises(RequestError, match="'crop_to_patches' is not supported"):
        reader.ours.prepare(page, {"crop_to_patches": False})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile_size": 640}, "tiles of 768 and whole images of 1024 pixels, .* makes 640 and 1024"),
        ({"size": {"height": 1024, "width": 640}}, "'size' must be a square"),
        ({"background_color": [1, 2]}, "'background_color' must have 3 numbers from 0 to 255"),
    ],
)
def test_settings_that_deepseek_ocr_2_does_not_take_are_refused(
    changes: dict[str, Any], message: str, make_tokenizer: Make, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=message):
        deepseek_ocr2(make_tokenizer, tmp_path, **changes)


def test_several_images_of_lighton_ocr_are_expanded(
    make_tokenizer: Make, random_image: Callable[..., Image.Image], tmp_path: Path
) -> None:
    reader = lighton_ocr(make_tokenizer, tmp_path, size={"longest_edge": 150})
    images = [random_image(*sides) for sides in SMALL]
    text = f"a {reader.ours.mark}\n{reader.ours.mark}{reader.ours.mark} b"
    items = [reader.ours.prepare(image) for image in images]
    assert [item.grid for item in items] == [(1, 5, 11), (1, 11, 4), (1, 11, 3)]
    assert [item.num_tokens for item in items] == [10, 10, 5]
    ids = list(map(int, reader.theirs(text=[text], images=images)["input_ids"][0]))
    assert reader.encode(reader.ours.expand_text("prompt", text, items)) == ids


def test_lighton_ocr_may_have_multiples_of_merged_patches(
    make_tokenizer: Make, random_image: Callable[..., Image.Image], tmp_path: Path
) -> None:
    reader = lighton_ocr(make_tokenizer, tmp_path, patch_size=28, size={"longest_edge": 150})
    image = random_image(200, 90)
    item = reader.ours.prepare(image)
    assert item.grid == (1, 6, 12)
    theirs = np.asarray(reader.theirs(text=[reader.ours.mark], images=[image])["pixel_values"])
    assert pixels(reader, item).tobytes() == theirs[0].tobytes()


def test_an_image_without_a_square_is_refused(
    make_tokenizer: Make, random_image: Callable[..., Image.Image], tmp_path: Path
) -> None:
    reader = lighton_ocr(make_tokenizer, tmp_path)
    with pytest.raises(RequestError, match=r"becomes 14x112 pixels .* must have 28 at least"):
        reader.ours.prepare(random_image(9, 100))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": 16}, r"patches of 14 pixels .* has 16 and 2"),
        ({"spatial_merge_size": 3}, r"squares of 2, .* has 14 and 3"),
        ({"spatial_merge_size": 0}, "'spatial_merge_size' must be a positive integer"),
    ],
)
def test_a_processor_that_does_not_suit_the_tower_is_refused(
    changes: dict[str, Any], message: str, make_tokenizer: Make, tmp_path: Path
) -> None:
    lighton_ocr(make_tokenizer, tmp_path)
    path = tmp_path / "processor_config.json"
    values = json.loads(path.read_text())
    if changes.get("patch_size"):  # the image processor's, too, is a multiple
        values["image_processor"]["patch_size"] = 16
    path.write_text(json.dumps(values | changes))
    config = LightOnOcrConfig().to_dict()
    config["architectures"] = ["LightOnOCRForConditionalGeneration"]
    with pytest.raises(EngineStartError, match=message):
        processors_of_model(tmp_path, config)
    values["image_processor"]["patch_size"] = 20
    path.write_text(json.dumps(values))
    with pytest.raises(EngineStartError, match=r"\(20\) must be a multiple of the .* \(14\)"):
        processors_of_model(tmp_path, config)
