"""The rules of a model and a request: which family, and which values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmllm.errors import EngineStartError, RequestError, nearest
from shmllm.formats import deepseek_ocr, deepseek_vl2
from shmllm.formats.image_settings import ImageSettings
from shmllm.frontend.images.rules.clip import ClipRules
from shmllm.frontend.images.rules.cohere2_vision import Cohere2VisionRules
from shmllm.frontend.images.rules.deepseek_ocr2 import DeepseekOcr2Rules, DeepseekOcrRules
from shmllm.frontend.images.rules.deepseek_vl2 import DeepseekVL2Rules
from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.gemma3 import Gemma3Rules
from shmllm.frontend.images.rules.gemma4 import Gemma4Rules
from shmllm.frontend.images.rules.glm4v import Glm4vRules
from shmllm.frontend.images.rules.granite_docling import GraniteDoclingRules
from shmllm.frontend.images.rules.hunyuan_vl import HunYuanVLRules
from shmllm.frontend.images.rules.idefics3 import Idefics3Rules
from shmllm.frontend.images.rules.internvl import InternVLRules
from shmllm.frontend.images.rules.janus import JanusRules
from shmllm.frontend.images.rules.kimi import KimiRules, KimiVLRules
from shmllm.frontend.images.rules.lfm2_vl import Lfm2VlRules
from shmllm.frontend.images.rules.llama4 import Llama4Rules
from shmllm.frontend.images.rules.llava_next import LlavaNextRules
from shmllm.frontend.images.rules.llava_onevision import LlavaOnevisionRules
from shmllm.frontend.images.rules.minicpmv4_6 import MiniCPMVRules
from shmllm.frontend.images.rules.minimax_m3 import MiniMaxM3Rules
from shmllm.frontend.images.rules.muse_glimmer import MuseGlimmerRules
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.ovis2 import Ovis2Rules
from shmllm.frontend.images.rules.paddleocr_vl import PaddleOcrVlRules
from shmllm.frontend.images.rules.pixtral import PixtralRules
from shmllm.frontend.images.rules.qwen2_vl import OneFrameRules, Qwen2VLRules
from shmllm.frontend.images.rules.siglip import SiglipRules
from shmllm.frontend.images.rules.siglip2 import Siglip2Rules

FAMILIES: dict[str, type[Rules]] = {
    "BlipImageProcessor": SiglipRules,
    "CLIPImageProcessor": ClipRules,
    "ChineseCLIPImageProcessor": ClipRules,
    "LlavaImageProcessor": ClipRules,
    "LlavaNextImageProcessor": LlavaNextRules,
    "LlavaOnevisionImageProcessor": LlavaOnevisionRules,
    "Siglip2ImageProcessor": Siglip2Rules,
    "SiglipImageProcessor": SiglipRules,
    "Glm46VImageProcessor": Glm4vRules,
    "Glm4vImageProcessor": Glm4vRules,
    "Cohere2VisionImageProcessor": Cohere2VisionRules,
    "DeepseekOcr2ImageProcessor": DeepseekOcr2Rules,
    deepseek_ocr.PROCESSOR_CLASS: DeepseekOcrRules,
    deepseek_vl2.PROCESSOR_CLASS: DeepseekVL2Rules,
    "DeepseekVLImageProcessor": JanusRules,
    "Ernie4_5_VLMoeImageProcessor": OneFrameRules,
    "Ernie4_5_VL_MoeImageProcessor": OneFrameRules,
    "GotOcr2ImageProcessor": InternVLRules,
    "GraniteDoclingImageProcessor": GraniteDoclingRules,
    "Lfm2VlImageProcessor": Lfm2VlRules,
    "HunYuanVLImageProcessor": HunYuanVLRules,
    "JanusImageProcessor": JanusRules,
    "KimiK25VisionProcessor": KimiRules,
    "KimiVLImageProcessor": KimiVLRules,
    "Kimi_K25ImageProcessor": KimiRules,
    "Llama4ImageProcessor": Llama4Rules,
    "MiniCPMOcrImageProcessor": MiniCPMVRules,
    "MiniCPMV4_6ImageProcessor": MiniCPMVRules,
    "MiniMaxM3VLImageProcessor": MiniMaxM3Rules,
    "MuseGlimmerImageProcessor": MuseGlimmerRules,
    "Idefics3ImageProcessor": Idefics3Rules,
    "SmolVLMImageProcessor": Idefics3Rules,
    "Qwen2VLImageProcessor": Qwen2VLRules,
    "Qwen2_5_VLImageProcessor": Qwen2VLRules,
    "Gemma3ImageProcessor": Gemma3Rules,
    "Gemma4ImageProcessor": Gemma4Rules,
    "Ovis2ImageProcessor": Ovis2Rules,
    "Gemma4UnifiedImageProcessor": Gemma4Rules,
    "PaddleOCRVLImageProcessor": PaddleOcrVlRules,
    "PixtralImageProcessor": PixtralRules,
    "VideoLlama3ImageProcessor": OneFrameRules,
}
"""By the names of transformers' classes, without "Fast" and "Pil"."""


def rules_of_model(settings: ImageSettings) -> Rules:
    """The rules of a model.

    Raises:
        EngineStartError: the image processor is of an unknown family, or a field is wrong.
    """
    if settings.processor not in FAMILIES:
        raise EngineStartError(
            f"{settings.where}: the image processor {settings.processor!r} is not supported; "
            f"supported are {', '.join(FAMILIES)}"
        )
    try:
        return _rules(settings, {})
    except RequestError as error:
        raise EngineStartError(f"{settings.where}: {error}") from None


def rules_of_request(settings: ImageSettings, overrides: Mapping[str, Any]) -> Rules:
    """The rules of a model with what a request changes.

    Args:
        settings: those for which `rules_of_model` has worked.
        overrides: vLLM's `mm_processor_kwargs`.

    Raises:
        RequestError: a name is unknown to the family, or a value is wrong.
    """
    known = FAMILIES[settings.processor].OVERRIDES
    for name, value in overrides.items():
        if name not in known:
            near = nearest(str(name), known)
            raise RequestError(
                f"mm_processor_kwargs: {name!r} is not supported for {settings.processor}; did you "
                f"mean {near!r}? Supported are {', '.join(sorted(known))}",
                parameter="mm_processor_kwargs",
                value=name,
            )
        if value is None:
            raise RequestError(f"mm_processor_kwargs: {name!r} must have a value, not None")
    try:
        return _rules(settings, dict(overrides))
    except RequestError as error:
        raise RequestError(f"mm_processor_kwargs: {error}", parameter=error.parameter) from None


def _rules(settings: ImageSettings, changes: dict[str, Any]) -> Rules:
    family = FAMILIES[settings.processor]
    values = {**settings.options, "image_mean": settings.mean}
    return family.of(Options(family.merged(values, changes)))
