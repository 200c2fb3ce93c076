"""Settings of image processors: both files, the defaults of transformers' classes, the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.chinese_clip.image_processing_pil_chinese_clip import (
    ChineseCLIPImageProcessorPil,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
    GotOcr2ImageProcessorPil,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from shmllm.errors import EngineStartError
from shmllm.formats.image_settings import pixel_table, read_image_settings, settings_of

PROCESSORS = [
    CLIPImageProcessorPil,
    ChineseCLIPImageProcessorPil,
    Gemma3ImageProcessorPil,
    Gemma4ImageProcessorPil,
    Glm4vImageProcessorPil,
    Glm46VImageProcessorPil,
    GotOcr2ImageProcessorPil,
    Idefics3ImageProcessorPil,
    LlavaImageProcessorPil,
    LlavaNextImageProcessorPil,
    LlavaOnevisionImageProcessorPil,
    PaddleOCRVLImageProcessorPil,
    PixtralImageProcessorPil,
    Qwen2VLImageProcessorPil,
    SiglipImageProcessorPil,
    Siglip2ImageProcessorPil,
    SmolVLMImageProcessorPil,
]


@pytest.mark.parametrize("factor", [1 / 255, 1 / 127.3])
def test_llama_4_rounds_every_result_to_bfloat16(factor: float) -> None:
    mean, std = [0.48, 0.5, 0.31], [0.27, 0.5, 0.3]
    values = {"rescale_factor": factor, "image_mean": mean, "image_std": std}
    table = pixel_table(settings_of(values, "file", "Llama4ImageProcessor"))
    scaled = torch.arange(256, dtype=torch.uint8).bfloat16() * factor
    means, stds = (torch.tensor(each).bfloat16()[:, None] for each in (mean, std))
    assert np.array_equal(table, ((scaled - means) / stds).float().numpy())


def plain(value: Any) -> Any:
    """Sizes as mappings, lists as tuples."""
    if hasattr(value, "shortest_edge") or isinstance(value, dict):
        return dict(value)
    return tuple(value) if isinstance(value, list) else value


@pytest.mark.parametrize("kind", PROCESSORS)
def test_a_file_without_fields_has_the_defaults_of_the_class(kind: Any) -> None:
    name = kind.__name__.removesuffix("Pil")
    read = settings_of({"image_processor_type": name}, "file")
    expected = kind()
    for field, value in read.options.items():
        default = plain(getattr(expected, field, None))
        of_processor = name.startswith(("Gemma3", "Pixtral")) and default is None
        if field != "image_processor_type" and not of_processor:
            assert plain(value) == default, field
    assert read.mean == tuple(expected.image_mean)
    assert read.std == tuple(expected.image_std)
    assert (read.do_rescale, read.do_normalize) == (expected.do_rescale, expected.do_normalize)
    assert read.rescale_factor == expected.rescale_factor
    assert read.processor == name


@pytest.mark.parametrize("kind", PROCESSORS)
def test_what_transformers_writes_is_read(kind: Any, tmp_path: Path) -> None:
    kind(image_mean=[0.1, 0.2, 0.3], do_normalize=False, resample=1).save_pretrained(tmp_path)
    read = read_image_settings(tmp_path)
    assert read is not None
    assert read.processor == kind.__name__.removesuffix("Pil")
    assert read.where == str(tmp_path / "preprocessor_config.json")
    assert read.mean == (0.1, 0.2, 0.3)
    assert read.do_normalize is False
    assert read.options["resample"] == 1


def test_the_part_of_processor_config_counts_before_the_older_file(tmp_path: Path) -> None:
    assert read_image_settings(tmp_path) is None
    old = {"image_processor_type": "CLIPImageProcessor", "rescale_factor": 0.5}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(old))
    (tmp_path / "processor_config.json").write_text('{"processor_class": "LlavaProcessor"}')
    read = read_image_settings(tmp_path)
    assert read is not None
    assert read.rescale_factor == 0.5
    new = {"image_processor": old | {"rescale_factor": 0.25}}
    (tmp_path / "processor_config.json").write_text(json.dumps(new))
    read = read_image_settings(tmp_path)
    assert read is not None
    assert read.rescale_factor == 0.25


def test_the_processor_of_pixtral_decides_on_squares(tmp_path: Path) -> None:
    fields = {"image_processor_type": "PixtralImageProcessorFast", "patch_size": 14}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    for whole, expected in (({}, (14, 1)), ({"patch_size": 16, "spatial_merge_size": 2}, (16, 2))):
        (tmp_path / "processor_config.json").write_text(json.dumps(whole))
        read = read_image_settings(tmp_path)
        assert read is not None
        assert (read.options["patch_size"], read.options["spatial_merge_size"]) == expected


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"image_processor_type": "Qwen2VLImageProcessorFast"}, "Qwen2VLImageProcessor"),
        ({"image_processor_type": "SiglipImageProcessorPil"}, "SiglipImageProcessor"),
        ({"feature_extractor_type": "CLIPFeatureExtractor"}, "CLIPImageProcessor"),
    ],
)
def test_names_of_one_class_are_one(fields: dict[str, str], name: str) -> None:
    assert settings_of(fields, "file").processor == name


@pytest.mark.parametrize("do_rescale", [False, True])
@pytest.mark.parametrize("do_normalize", [False, True])
def test_the_table_has_the_bits_of_transformers(do_rescale: bool, do_normalize: bool) -> None:
    fields = {"do_rescale": do_rescale, "do_normalize": do_normalize, "do_resize": False}
    values = np.arange(256, dtype=np.uint8)
    pixels = np.repeat(values.reshape(1, 16, 16), 3, axis=0)
    for kind in (CLIPImageProcessorPil, SiglipImageProcessorPil):
        processor = kind(**fields, do_center_crop=False)
        expected = np.float32(processor(pixels, return_tensors="np")["pixel_values"][0])
        table = pixel_table(settings_of(json.loads(processor.to_json_string()), "file"))
        assert table.dtype == np.float32
        assert table.reshape(3, 16, 16).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([], "must be an object"),
        ({}, "image_processor_type"),
        ({"image_mean": [0.5, 0.5]}, "'image_mean' must have 3 numbers, not 2"),
        ({"image_std": [1, 0, 1]}, "'image_std' must not contain 0"),
        ({"image_std": ["1", 1, 1]}, "finite numbers"),
        ({"do_rescale": 1}, "'do_rescale' must be true or false"),
        ({"rescale_factor": "x"}, "'rescale_factor'"),
    ],
)
def test_a_wrong_field_is_named(fields: Any, message: str) -> None:
    if isinstance(fields, dict) and fields:
        fields = fields | {"image_processor_type": "CLIPImageProcessor"}
    with pytest.raises(EngineStartError, match=message):
        settings_of(fields, "file")


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000, "\x00"])
def test_a_damaged_file_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(content)
    with pytest.raises(EngineStartError, match=r"preprocessor_config\.json"):
        read_image_settings(tmp_path)
