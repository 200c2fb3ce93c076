"""Expanded prompts are those of transformers' processors, as text and as token ids.

LLaVA's, Idefics3's and Gemma 3's processors run as they are. Qwen's run without their video
processor, which needs torchvision, and Mistral 3's with the module on pillow in place of the one on
torchvision. SmolVLM's needs packages that are not installed; its text comes
from the function of its module that makes it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from PIL import Image
from support.torchvision_modules import without_videos
from transformers import (
    CLIPVisionConfig,
    DeepseekOcr2Config,
    DeepseekVLConfig,
    Ernie4_5_VLMoeConfig,
    Exaone4_5_Config,
    Gemma3Config,
    Gemma4Config,
    Glm4vConfig,
    Glm4vMoeConfig,
    Glm46VConfig,
    GlmOcrConfig,
    GotOcr2Config,
    GraniteDoclingConfig,
    HyperCLOVAXVisionV2Config,
    Idefics3Config,
    InternVLConfig,
    LightOnOcrConfig,
    LlavaConfig,
    LlavaNextConfig,
    MiniMaxM3VLConfig,
    Mistral3Config,
    Ovis2Config,
    PaddleOCRVLConfig,
    QianfanOCRConfig,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SiglipVisionConfig,
    SmolVLMConfig,
    VideoLlama3Config,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import (
    DeepseekVLImageProcessorPil,
)
from transformers.models.deepseek_vl.processing_deepseek_vl import DeepseekVLProcessor
from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import (
    Ernie4_5_VLMoeImageProcessorPil,
)
from transformers.models.ernie4_5_vl_moe.processing_ernie4_5_vl_moe import Ernie4_5_VLMoeProcessor
from transformers.models.exaone4_5.processing_exaone4_5 import Exaone4_5_Processor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
    GotOcr2ImageProcessorPil,
)
from transformers.models.granite4_vision.processing_granite4_vision import (
    Granite4VisionProcessor,
)
from transformers.models.granite_docling.image_processing_pil_granite_docling import (
    GraniteDoclingImageProcessorPil,
)
from transformers.models.granite_docling.processing_granite_docling import (
    GraniteDoclingProcessor,
)
from transformers.models.hyperclovax_vision_v2.processing_hyperclovax_vision_v2 import (
    HyperCLOVAXVisionV2Processor,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.minimax_m3_vl.processing_minimax_m3_vl import MiniMaxM3VLProcessor
from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil
from transformers.models.ovis2.processing_ovis2 import Ovis2Processor
from transformers.models.pixtral import image_processing_pil_pixtral as pixtral_on_pillow
from transformers.models.qianfan_ocr.processing_qianfan_ocr import QianfanOCRProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string
from transformers.models.video_llama_3.image_processing_pil_video_llama_3 import (
    VideoLlama3ImageProcessorPil,
)
from transformers.models.video_llama_3.processing_video_llama_3 import VideoLlama3Processor

from shmllm.errors import EngineStartError, RequestError
from shmllm.frontend.items.registry import processors_of_model
from shmllm.frontend.placeholders.registry import placeholders_of_model

QWEN = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
GLM = ["<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"]
GEMMA = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
GEMMA4 = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
GEMMA4 |= {"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"}
ERNIE = {
    f"{kind}{place}_token": f"<|{kind.upper()}_{mark}|>"
    for kind in ("image", "video")
    for place, mark in (("", "PLACEHOLDER"), ("_start", "START"), ("_end", "END"))
}
IDEFICS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>"]
VISION = {"image_size": 64, "patch_size": 16}
NAMES = ["llava", "llava, full", "llava, siglip", "idefics3", "qwen2", "qwen2.5", "qwen3", "gemma3"]
NAMES += ["gemma4", "mistral3", "mistral3, other tokens", "llava_next", "internvl", "glm4v"]
NAMES += [
    "exaone4.5",
    "hyperclovax",
    "video_llama_3",
    "vipllava",
    "deepseek_vl",
    "granite4_vision",
    "qianfan_ocr",
    "qianfan_ocr, other text",
    "granite_docling",
]
NAMES += ["ernie4.5", "pixtral", "minimax_m3", "ovis2", "ovis2, one token"]


def pixtral_processor() -> Any:
    """The class, whose module imports one that needs torchvision."""
    package = "transformers.models.pixtral"
    with patch.dict(sys.modules, {f"{package}.image_processing_pixtral": pixtral_on_pillow}):
        return importlib.import_module(f"{package}.processing_pixtral").PixtralProcessor


class Model:
    """A processor of transformers and what we make of its files."""

    def __init__(self, processor: Any, config: Any, directory: Path) -> None:
        self.theirs = processor
        if isinstance(processor, Ovis2Processor):  # which reads arrays alone
            self.theirs = partial(processor, return_tensors="np")
        self.tokenizer = processor.tokenizer
        whole = type(processor).__name__ in ("PixtralProcessor", "QianfanOCRProcessor")
        (processor if whole else processor.image_processor).save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
        ours = processors_of_model(directory, config)["image"]
        assert ours is not None
        self.ours = ours
        self.tokens = {ours.token_id, *config.get("visual_indicator_token_ids", ())}

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def _llava(tokens: Any, name: str) -> tuple[Any, dict[str, Any]]:
    tokenizer = tokens(["<image>"])
    siglip = name.endswith("siglip")
    strategy = "default" if name == "llava" else "full"
    images = (
        SiglipImageProcessorPil(size={"height": 64, "width": 64})
        if siglip
        else CLIPImageProcessorPil(size=64, crop_size=64)
    )
    processor = LlavaProcessor(
        images,
        tokenizer,
        patch_size=16,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=0 if siglip else 1,
    )
    vision = SiglipVisionConfig(**VISION) if siglip else CLIPVisionConfig(**VISION)
    config = LlavaConfig(
        vision_config=vision,
        vision_feature_select_strategy=strategy,
        image_token_index=processor.image_token_id,
    )
    return processor, config.to_dict() | {"architectures": ["LlavaForConditionalGeneration"]}


def _vipllava(tokens: Any, name: str) -> tuple[Any, dict[str, Any]]:
    processor, config = _llava(tokens, "llava")
    return processor, config | {"architectures": ["VipLlavaForConditionalGeneration"]}


def _deepseek_vl(tokens: Any, name: str) -> tuple[Any, dict[str, Any]]:
    tokenizer = tokens(["<image_placeholder>"], image_token="<image_placeholder>")
    images = DeepseekVLImageProcessorPil(size={"height": 64, "width": 64})
    processor = DeepseekVLProcessor(images, tokenizer, num_image_tokens=16)
    config = DeepseekVLConfig(
        vision_config=SiglipVisionConfig(**VISION), image_token_id=processor.image_token_id
    )
    return processor, config.to_dict() | {"architectures": ["DeepseekVLForConditionalGeneration"]}


def _llava_next(tokens: Any, name: str) -> tuple[Any, dict[str, Any]]:
    sizes = [[64, 320], [320, 64], [128, 128], [64, 128]]
    images = LlavaNextImageProcessorPil(size=64, crop_size=64, image_grid_pinpoints=sizes)
    is_granite = name == "granite4_vision"
    kind: Any = Granite4VisionProcessor if is_granite else LlavaNextProcessor
    rate = {"downsample_rate": "1/2"} if is_granite else {}
    processor = kind(
        images,
        tokens(["<image>"]),
        patch_size=16,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        **rate,
    )
    config = LlavaNextConfig(
        vision_config=CLIPVisionConfig(**VISION),
        image_token_index=processor.image_token_id,
        image_grid_pinpoints=sizes,
    )
    architecture = f"{'Granite4Vision' if is_granite else 'LlavaNext'}ForConditionalGeneration"
    return processor, config.to_dict() | rate | {"architectures": [architecture]}


def _idefics3(tokens: Any, name: str) -> tuple[Any, dict[str, Any]]:
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 192}, max_image_size={"longest_edge": 64}
    )
    length, scale = (1, 4) if name.endswith("one") else (4, 2)
    tokenizer = tokens(["<row_1_col_1>", *IDEFICS])
    processor = Idefics3Processor(images, tokenizer, image_seq_len=length)
    config = Idefics3Config(
        vision_config=VISION, scale_factor=scale, image_token_id=processor.image_token_id
    )
    return processor, config.to_dict() | {"architectures": ["Idefics3ForConditionalGeneration"]}


def _qwen(tokens: Any, name: str) -> tuple[Any, dict[str, Any]]:
    kind, config_kind, architecture, patch = {
        "qwen2": (Qwen2VLProcessor, Qwen2VLConfig, "Qwen2VL", 14),
        "qwen2.5": (Qwen2_5_VLProcessor, Qwen2_5_VLConfig, "Qwen2_5_VL", 14),
        "qwen3": (Qwen3VLProcessor, Qwen3VLConfig, "Qwen3VL", 16),
        "exaone4.5": (Exaone4_5_Processor, Exaone4_5_Config, "Exaone4_5_", 14),
        "hyperclovax": (
            *(HyperCLOVAXVisionV2Processor, HyperCLOVAXVisionV2Config),
            *("HyperCLOVAXVisionV2", 14),
        ),
        "video_llama_3": (VideoLlama3Processor, VideoLlama3Config, "VideoLlama3", 16),
    }[name]
    of_images = Qwen2VLImageProcessorPil
    if kind is VideoLlama3Processor:
        of_images = VideoLlama3ImageProcessorPil
    images = of_images(min_pixels=3136, max_pixels=20000, patch_size=patch)
    processor = without_videos(kind)(images, tokens(QWEN), None)
    config = config_kind(image_token_id=processor.image_token_id).to_dict()
    return processor, config | {"architectures": [f"{architecture}ForConditionalGeneration"]}


def _ernie4_5_vl(tokens: Any, name: str) -> tuple[Any, dict[str, Any]]:
    tokenizer = tokens([*ERNIE.values()], **ERNIE)
    images = Ernie4_5_VLMoeImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 20000})
    processor = without_videos(Ernie4_5_VLMoeProcessor)(images, tokenizer, None)
    config = Ernie4_5_VLMoeConfig(image_token_id=tokenizer.image_token_id).to_dict()
    return processor, config | {"architectures": ["Ernie4_5_VLMoeForConditionalGeneration"]}


def _gemma3(tokens: Any, name: str) -> tuple[Any, dict[str, Any]]:
    tokenizer = tokens([*GEMMA.values()], newlines=5, **GEMMA)
    images = Gemma3ImageProcessorPil(size={"height": 64, "width": 64})
    processor = Gemma3Processor(images, tokenizer, image_seq_length=4)
    config = Gemma3Config(
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=tokenizer.image_token_id,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
    )
    return processor, config.to_dict() | {"architectures": ["Gemma3ForConditionalGeneration"]}


def _gemma4(tokens: Any, name: str) -> tuple[Any, dict[str, Any]]:
    tokenizer = tokens([*GEMMA4.values()], **GEMMA4, pad_token="<|audio|>")
    images = Gemma4ImageProcessorPil(max_soft_tokens=70, patch_size=4)
    processor = without_videos(Gemma4Processor)(
        Gemma4AudioFeatureExtractor(), images, tokenizer, None
    )
    config = Gemma4Config(
        vision_config={"patch_size": 4},
        image_token_id=tokenizer.image_token_id,
        boi_token_id=tokenizer.boi_token_id,
        eoi_token_id=tokenizer.eoi_token_id,
    )
    return processor, config.to_dict() | {"architectures": ["Gemma4ForConditionalGeneration"]}


def _glm4v(tokens: Any, name: str) -> tuple[Any, dict[str, Any]]:
    images = Glm4vImageProcessorPil(size={"shortest_edge": 6272, "longest_edge": 40000})
    processor = without_videos(Glm4vProcessor)(images, tokens(GLM), None)
    config = Glm4vConfig(image_token_id=processor.image_token_id)
    return processor, config.to_dict() | {"architectures": ["Glm4vForConditionalGeneration"]}


def _minimax_m3(tokens: Any, name: str) -> tuple[Any, dict[str, Any]]:
    images = Qwen2VLImageProcessorPil(min_pixels=3136, max_pixels=20000)
    kind = without_videos(MiniMaxM3VLProcessor)
    names = "IMAGE_TOKEN", "VIDEO_TOKEN", "VISION_START_TOKEN", "VISION_END_TOKEN"
    processor = kind(images, tokens([getattr(kind, each) for each in names]), None)
    config = MiniMaxM3VLConfig(image_token_index=processor.image_token_id).to_dict()
    return processor, config | {"architectures": ["MiniMaxM3SparseForConditionalGeneration"]}


def _internvl(tokens: Any, name: str) -> tuple[Any, dict[str, Any]]:
    """The processor cuts images although the image processor's own setting is not to. Prompts of
    Qianfan-OCR have a text of their own for an image."""
    texts = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    images = GotOcr2ImageProcessorPil(size={"height": 64, "width": 64}, max_patches=5)
    assert not images.crop_to_patches
    tokenizer = tokens([*texts.values()], **texts)
    vision = {"image_size": 64, "patch_size": 16}
    ids = {"image_token_id": tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")}
    if name.startswith("qianfan"):
        mark = {"image_placeholder_token": "<page>"} if name.endswith("other text") else {}
        other = QianfanOCRProcessor(images, tokenizer, image_seq_length=4, **mark)
        config: Any = QianfanOCRConfig(vision_config=vision, **ids)
        architecture = "QianfanOCRForConditionalGeneration"
        return other, config.to_dict() | {"architectures": [architecture]}
    processor = without_videos(InternVLProcessor)(images, tokenizer, None, image_seq_length=4)
    config = InternVLConfig(vision_config=vision, **ids)
    return processor, config.to_dict() | {"architectures": ["InternVLForConditionalGeneration"]}


def _granite_docling(tokens: Any, name: str) -> tuple[Any, dict[str, Any]]:
    places = [f"<row_{row}_col_{column}>" for row in range(1, 6) for column in range(1, 6)]
    tokenizer = tokens(["<image>", "<fake_token_around_image>", "<global-img>", *places])
    images = GraniteDoclingImageProcessorPil(size={"height": 64, "width": 64}, max_patches=5)
    processor = GraniteDoclingProcessor(images, tokenizer, image_seq_len=4)
    config = GraniteDoclingConfig(
        vision_config={"image_size": 64, "patch_size": 16, "scale_factor": 2},
        image_token_id=processor.image_token_id,
    )
    architecture = "GraniteDoclingForConditionalGeneration"
    return processor, config.to_dict() | {"architectures": [architecture]}


def _ovis2(tokens: Any, name: str) -> tuple[Any, dict[str, Any]]:
    marks = [f"<IMG_{each}>" for each in ("START", "GRID", "COL", "ROW", "END")]
    tokenizer = tokens(["<IMG_ATOM>", *marks, *(["<image>"] if "," in name else [])])
    sizes = {"size": {"height": 64, "width": 64}, "crop_to_patches": True, "max_patches": 5}
    processor = Ovis2Processor(Ovis2ImageProcessorPil(**sizes), tokenizer, image_seq_length=4)
    config = Ovis2Config(
        vision_config={"image_size": 64, "patch_size": 16, "hidden_stride": 2},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_ATOM>"),
        visual_indicator_token_ids=tokenizer.convert_tokens_to_ids(marks),
    )
    return processor, config.to_dict() | {"architectures": ["Ovis2ForConditionalGeneration"]}


def _mistral3(tokens: Any, name: str) -> tuple[Any, dict[str, Any]]:
    texts = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]"}
    if name.endswith("other tokens"):
        texts = {"image_token": "<see>", "image_break_token": "<break>"}
    texts["image_end_token"] = "[IMG_END]"
    merge = 1 if name == "pixtral" else 2
    images = pixtral_on_pillow.PixtralImageProcessorPil(size={"longest_edge": 150})
    processor = pixtral_processor()(
        images, tokens([*texts.values()]), patch_size=14, spatial_merge_size=merge, **texts
    )
    if merge == 1:
        vision = {"model_type": "pixtral", "patch_size": 14}
        llava = LlavaConfig(vision_config=vision, image_token_index=processor.image_token_id)
        return processor, llava.to_dict() | {"architectures": ["LlavaForConditionalGeneration"]}
    config = Mistral3Config(
        vision_config={"model_type": "pixtral", "patch_size": 14},
        image_token_index=processor.image_token_id,
    )
    return processor, config.to_dict() | {"architectures": ["Mistral3ForConditionalGeneration"]}


MAKERS = {
    "llava": _llava,
    "vipllava": _vipllava,
    "deepseek_vl": _deepseek_vl,
    "llava_next": _llava_next,
    "granite4_vision": _llava_next,
    "idefics3": _idefics3,
    "ernie4.5": _ernie4_5_vl,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "qwen2": _qwen,
    "mistral3": _mistral3,
    "pixtral": _mistral3,
    "internvl": _internvl,
    "qianfan_ocr": _internvl,
    "granite_docling": _granite_docling,
    "ovis2": _ovis2,
    "glm4v": _glm4v,
    "minimax_m3": _minimax_m3,
}


@pytest.fixture
def model(
    request: pytest.FixtureRequest, make_tokenizer: Callable[..., Any], tmp_path: Path
) -> Model:
    family = request.param.split(",")[0]
    maker = MAKERS.get(family, _qwen)
    return Model(*maker(make_tokenizer, request.param), tmp_path)


TEXTS = ["{}", "Describe {} and\n{}\n\nplease.", "{}{}", "a\n\n{}\n{}\n\n\n{}\n", " {} \n{} "]
SIDES = [(64, 64), (200, 90), (40, 170)]


@pytest.mark.parametrize("model", NAMES, indirect=True)
@pytest.mark.parametrize("form", TEXTS)
def test_prompts_are_expanded_as_transformers_expands_them(
    model: Model, form: str, random_image: Callable[..., Image.Image]
) -> None:
    pictures = [random_image(*sides) for sides in SIDES[: form.count("{}")]]
    prompt = form.format(*[model.ours.mark] * len(pictures))
    expected = list(map(int, model.theirs(text=prompt, images=pictures)["input_ids"][0]))
    images = [model.ours.prepare(each) for each in pictures]

    assert model.encode(model.ours.expand_text("prompt", prompt, images)) == expected
    ids = model.ours.expand_ids("prompt", model.encode(prompt), images, model.encode)
    assert ids == expected
    assert model.ours.expand_ids("prompt", expected, images, model.encode) == expected

    runs = model.ours.runs("prompt", expected, images)
    for image, intervals in zip(images, runs, strict=True):
        assert sum(end - start for start, end in intervals) == image.num_tokens
    positions = [i for each in runs for start, end in each for i in range(start, end)]
    assert positions == [i for i, each in enumerate(expected) if each in model.tokens]


CROPPING = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 16,
    "pan_and_scan_max_num_crops": 3,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


@pytest.mark.parametrize("model", ["gemma3"], indirect=True)
@pytest.mark.parametrize("form", TEXTS)
def test_crops_are_expanded_as_transformers_expands_them(
    model: Model, form: str, random_image: Callable[..., Image.Image]
) -> None:
    pictures = [random_image(*sides) for sides in SIDES[: form.count("{}")]]
    prompt = form.format(*[model.ours.mark] * len(pictures))
    expected = model.theirs(text=prompt, images=pictures, images_kwargs=CROPPING)["input_ids"][0]
    images = [model.ours.prepare(each, CROPPING) for each in pictures]
    assert [each.grid[0] for each in images] == [1, 3, 4][: len(images)]
    assert model.encode(model.ours.expand_text("prompt", prompt, images)) == expected
    assert model.ours.expand_ids("prompt", model.encode(prompt), images, model.encode) == expected
    assert len(model.ours.runs("prompt", expected, images)[-1]) == images[-1].grid[0]


@pytest.mark.parametrize("sides", [(64, 64), (200, 90), (40, 170)])
def test_smolvlm_has_the_text_of_its_module(
    sides: tuple[int, int],
    make_tokenizer: Callable[..., Any],
    random_image: Callable[..., Image.Image],
    tmp_path: Path,
) -> None:
    tokenizer = make_tokenizer([*IDEFICS, "<global-img>"])
    SmolVLMImageProcessorPil(
        size={"longest_edge": 192 if sides != (64, 64) else 64},
        max_image_size={"longest_edge": 64},
    ).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    token = tokenizer.convert_tokens_to_ids("<image>")
    config = SmolVLMConfig(vision_config=VISION, scale_factor=2, image_token_id=token).to_dict()
    config["architectures"] = ["SmolVLMForConditionalGeneration"]
    ours = processors_of_model(tmp_path, config)["image"]
    assert ours is not None
    image = ours.prepare(random_image(*sides))
    assert (image.grid[1:] == (0, 0)) == (sides == (64, 64))
    text = get_image_prompt_string(
        *image.grid[1:],
        4,
        fake_token_around_image="<fake_token_around_image>",
        image_token="<image>",
        global_image_token="<global-img>",
    )
    assert ours.expand_text("prompt", "a<image>b", [image]) == f"a{text}b"
    assert text.count("<image>") == image.num_tokens


@pytest.mark.parametrize("model", ["idefics3, one"], indirect=True)
@pytest.mark.parametrize("form", ["{}", "a {} b", "{}{}"])
def test_marks_and_expansions_of_one_embedding_are_told_apart(
    model: Model, form: str, random_image: Callable[..., Image.Image]
) -> None:
    prompt = form.format(*[model.ours.mark] * 2)
    pictures = [random_image(3, 3)] * form.count("{}")
    images = [model.ours.prepare(each, {"do_image_splitting": False}) for each in pictures]
    whole = {"do_image_splitting": False}
    expected = model.theirs(text=prompt, images=pictures, images_kwargs=whole)["input_ids"][0]
    for ids in (model.encode(prompt), expected):
        assert model.ours.expand_ids("prompt", ids, images, model.encode) == expected


@pytest.mark.parametrize("model", NAMES, indirect=True)
def test_other_numbers_of_marks_are_refused_with_both_numbers(
    model: Model, random_image: Callable[..., Image.Image]
) -> None:
    images = [model.ours.prepare(random_image(64, 64))] * 2
    total = 2 * images[0].num_tokens
    prompt = f"a {model.ours.mark} b"
    with pytest.raises(RequestError, match=r"prompt 7 has 2 images, and its text .* 1 times"):
        model.ours.expand_text("prompt 7", prompt, images)
    with pytest.raises(RequestError, match=rf"prompt 7 has 2 images: .*{total} tokens"):
        model.ours.expand_ids("prompt 7", model.encode(prompt), images, model.encode)
    expanded = model.encode(model.ours.expand_text("prompt", prompt, images[:1]))
    with pytest.raises(RequestError, match=rf"prompt 7 has 2 images: .*{total} tokens"):
        model.ours.expand_ids("prompt 7", expanded, images, model.encode)
    with pytest.raises(RequestError, match=f"prompt 7 has .* {total // 2} times, .* needs {total}"):
        model.ours.runs("prompt 7", expanded, images)


@pytest.mark.parametrize("model", ["idefics3", "gemma3"], indirect=True)
def test_a_tokenizer_without_the_tokens_is_refused(
    model: Model, random_image: Callable[..., Image.Image]
) -> None:
    image = model.ours.prepare(random_image(64, 64))
    ids = model.encode(model.ours.mark)
    with pytest.raises(RequestError, match="the tokenizer makes 0 tokens"):
        model.ours.expand_ids("prompt 7", ids, [image], lambda text: [1] * len(text))


@pytest.mark.parametrize("model", ["llava", "gemma3"], indirect=True)
def test_a_prompt_without_images_stays(model: Model) -> None:
    ids = model.encode("no image")
    assert model.ours.expand_ids("prompt", ids, [], model.encode) == ids
    assert model.ours.expand_text("prompt", "no image", []) == "no image"
    assert model.ours.runs("prompt", ids, []) == []
    with pytest.raises(RequestError, match=r"has 0 images, and its text .* 1 times"):
        model.ours.expand_text("prompt", model.ours.mark, [])


def test_architectures_without_images_have_no_placeholder(tmp_path: Path) -> None:
    for architectures in (["LlamaForCausalLM"], [], None, [3]):
        assert placeholders_of_model(tmp_path, {"architectures": architectures}) == {}
    assert processors_of_model(tmp_path, {"architectures": ["LlamaForCausalLM"]}) == {}


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    """A config.json may leave out what it has in common with the class."""
    for config, architecture, token in (
        (Qwen2VLConfig(), "Qwen2VLForConditionalGeneration", "image_token_id"),
        (Qwen3VLConfig(), "Qwen3VLForConditionalGeneration", "image_token_id"),
        (Qwen3VLMoeConfig(), "Qwen3VLMoeForConditionalGeneration", "image_token_id"),
        (Qwen3_5Config(), "Qwen3_5ForConditionalGeneration", "image_token_id"),
        (Qwen3_5MoeConfig(), "Qwen3_5MoeForConditionalGeneration", "image_token_id"),
        (InternVLConfig(), "InternVLForConditionalGeneration", "image_token_id"),
        (Glm4vConfig(), "Glm4vForConditionalGeneration", "image_token_id"),
        (Glm4vMoeConfig(), "Glm4vMoeForConditionalGeneration", "image_token_id"),
        (Glm46VConfig(), "Glm46VForConditionalGeneration", "image_token_id"),
        (GlmOcrConfig(), "GlmOcrForConditionalGeneration", "image_token_id"),
        (PaddleOCRVLConfig(), "PaddleOCRVLForConditionalGeneration", "image_token_id"),
        (Ernie4_5_VLMoeConfig(), "Ernie4_5_VLMoeForConditionalGeneration", "image_token_id"),
        (GotOcr2Config(), "GotOcr2ForConditionalGeneration", "image_token_index"),
        (DeepseekOcr2Config(), "DeepseekOcr2ForConditionalGeneration", "image_token_id"),
        (Ovis2Config(), "Ovis2ForConditionalGeneration", "image_token_id"),
        (GraniteDoclingConfig(), "GraniteDoclingForConditionalGeneration", "image_token_id"),
        (QianfanOCRConfig(), "QianfanOCRForConditionalGeneration", "image_token_id"),
        (LlavaNextConfig(), "LlavaNextForConditionalGeneration", "image_token_index"),
        (LlavaConfig(), "LlavaForConditionalGeneration", "image_token_index"),
        (Mistral3Config(), "Mistral3ForConditionalGeneration", "image_token_index"),
        (LightOnOcrConfig(), "LightOnOcrForConditionalGeneration", "image_token_id"),
        (Gemma3Config(), "Gemma3ForConditionalGeneration", "image_token_index"),
        (Idefics3Config(), "Idefics3ForConditionalGeneration", "image_token_id"),
        (SmolVLMConfig(), "SmolVLMForConditionalGeneration", "image_token_id"),
        (Qwen2_5_VLConfig(), "Qwen2_5_VLForConditionalGeneration", "image_token_id"),
    ):
        whole = config.to_dict() | {"architectures": [architecture]}
        expected = placeholders_of_model(tmp_path, whole)["image"]
        assert expected is not None
        assert expected.token_id == whole[token]
        assert (
            placeholders_of_model(tmp_path, {"architectures": [architecture]})["image"] == expected
        )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vision_config": 3}, "'vision_config' must be an object"),
        ({"vision_config": {"model_type": "dinov2"}}, "'model_type' must be one of clip_vision_"),
        ({"vision_config": {"image_size": [3, 3]}}, "'image_size' must be an integer"),
        ({"image_token_index": "x"}, "'image_token_id' must be an integer of at least 0"),
        (
            {"vision_feature_select_strategy": "cls"},
            "'vision_feature_select_strategy' must be one of default",
        ),
    ],
)
def test_a_wrong_field_is_named(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = config | {"architectures": ["LlavaForConditionalGeneration"]}
    with pytest.raises(EngineStartError, match=rf"config\.json.*: {message}"):
        placeholders_of_model(tmp_path, config)
