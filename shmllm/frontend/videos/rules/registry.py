"""The rules of a model and a request: which family, and which values."""

from __future__ import annotations

from shmllm.errors import EngineStartError, RequestError
from shmllm.formats.image_settings import ImageSettings
from shmllm.frontend.videos.rules.family import VideoRules
from shmllm.frontend.videos.rules.gemma4 import Gemma4VideoRules
from shmllm.frontend.videos.rules.glm4v import Glm4vVideoRules, Glm46VVideoRules
from shmllm.frontend.videos.rules.muse_glimmer import MuseGlimmerVideoRules
from shmllm.frontend.videos.rules.qwen_vl import Qwen2VLVideoRules, Qwen3VLVideoRules
from shmllm.frontend.videos.rules.tiles import CutVideoRules, TilesVideoRules

FAMILIES: dict[str, type[VideoRules]] = {
    "Gemma4UnifiedVideoProcessor": Gemma4VideoRules,
    "Gemma4VideoProcessor": Gemma4VideoRules,
    "Glm46VVideoProcessor": Glm46VVideoRules,
    "Glm4vVideoProcessor": Glm4vVideoRules,
    "LlavaNextVideoVideoProcessor": CutVideoRules,
    "LlavaOnevisionVideoProcessor": TilesVideoRules,
    "MuseGlimmerVideoProcessor": MuseGlimmerVideoRules,
    "Qwen2VLVideoProcessor": Qwen2VLVideoRules,
    "Qwen3VLVideoProcessor": Qwen3VLVideoRules,
}
"""By the names of transformers' classes."""


def rules_of_model(settings: ImageSettings) -> VideoRules:
    """The rules of a model.

    Raises:
        EngineStartError: a field is wrong.
    """
    try:
        return FAMILIES[settings.processor].of(settings, {})
    except RequestError as error:
        raise EngineStartError(f"{settings.where}: {error}") from None
