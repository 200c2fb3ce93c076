"""The placeholders of a model, by the name of its architecture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shmllm.formats.processor_files import PROCESSOR, read_object
from shmllm.formats.published import in_terms_of_transformers
from shmllm.formats.thinker import thinker_of
from shmllm.frontend.placeholders.aya_vision import (
    AyaVisionPlaceholder,
    Cohere2VisionPlaceholder,
)
from shmllm.frontend.placeholders.clip import ClipPlaceholder, Siglip2Placeholder
from shmllm.frontend.placeholders.deepseek_ocr2 import (
    DeepseekOcr2Placeholder,
    DeepseekOcrPlaceholder,
)
from shmllm.frontend.placeholders.deepseek_vl2 import DeepseekVL2Placeholder
from shmllm.frontend.placeholders.exaone4_5 import (
    Exaone45Placeholder,
    Exaone45VideoPlaceholder,
    HyperClovaPlaceholder,
)
from shmllm.frontend.placeholders.family import Config, Placeholder
from shmllm.frontend.placeholders.fun_asr_nano import FunAsrPlaceholder
from shmllm.frontend.placeholders.gemma3 import Gemma3Placeholder
from shmllm.frontend.placeholders.gemma4 import (
    Gemma4AudioPlaceholder,
    Gemma4Placeholder,
    Gemma4UnifiedAudioPlaceholder,
    Gemma4UnifiedPlaceholder,
    Gemma4UnifiedVideoPlaceholder,
    Gemma4VideoPlaceholder,
)
from shmllm.frontend.placeholders.glm4v import (
    Glm4vMoePlaceholder,
    Glm4vMoeVideoPlaceholder,
    Glm4vPlaceholder,
    Glm4vVideoPlaceholder,
    Glm46VPlaceholder,
    Glm46VVideoPlaceholder,
    GlmOcrPlaceholder,
    GlmOcrVideoPlaceholder,
)
from shmllm.frontend.placeholders.got_ocr2 import GotOcr2Placeholder
from shmllm.frontend.placeholders.granite_speech import GraniteSpeechPlaceholder
from shmllm.frontend.placeholders.hunyuan_vl import HunYuanVLPlaceholder
from shmllm.frontend.placeholders.idefics3 import (
    ColModernVBertPlaceholder,
    GraniteDoclingPlaceholder,
    Idefics3Placeholder,
)
from shmllm.frontend.placeholders.internvl import InternVLPlaceholder, QianfanOcrPlaceholder
from shmllm.frontend.placeholders.janus import DeepseekVLPlaceholder, JanusPlaceholder
from shmllm.frontend.placeholders.kimi import KimiK25Placeholder, KimiVLPlaceholder
from shmllm.frontend.placeholders.lfm2_vl import Lfm2VlPlaceholder
from shmllm.frontend.placeholders.lighton_ocr import LightOnOcrPlaceholder
from shmllm.frontend.placeholders.llama4 import Llama4Placeholder
from shmllm.frontend.placeholders.llava import (
    Granite4VisionPlaceholder,
    LlavaNextPlaceholder,
    LlavaNextVideoImagePlaceholder,
    LlavaNextVideoPlaceholder,
    LlavaOnevisionPlaceholder,
    LlavaOnevisionVideoPlaceholder,
    LlavaPlaceholder,
    VipLlavaPlaceholder,
)
from shmllm.frontend.placeholders.minicpmv4_6 import (
    MiniCPMOcrPlaceholder,
    MiniCPMVPlaceholder,
)
from shmllm.frontend.placeholders.mistral3 import Mistral3Placeholder, PixtralPlaceholder
from shmllm.frontend.placeholders.moonshine import MoonshinePlaceholder
from shmllm.frontend.placeholders.moss import MossPlaceholder
from shmllm.frontend.placeholders.muse_glimmer import (
    MuseGlimmerPlaceholder,
    MuseGlimmerVideoPlaceholder,
)
from shmllm.frontend.placeholders.nemotron_omni import NemotronOmniAudioPlaceholder
from shmllm.frontend.placeholders.omniasr import OmniAsrPlaceholder
from shmllm.frontend.placeholders.ovis2 import Ovis2Placeholder
from shmllm.frontend.placeholders.paligemma import Blip2Placeholder, PaliGemmaPlaceholder
from shmllm.frontend.placeholders.parakeet import CohereAsrPlaceholder, ParakeetPlaceholder
from shmllm.frontend.placeholders.qwen2_audio import (
    AudioFlamingoPlaceholder,
    GlmAsrPlaceholder,
    MusicFlamingoPlaceholder,
    Qwen2AudioPlaceholder,
)
from shmllm.frontend.placeholders.qwen_omni import (
    Omni3AudioPlaceholder,
    Omni3Placeholder,
    Omni3VideoPlaceholder,
    OmniAudioPlaceholder,
    OmniPlaceholder,
    OmniVideoPlaceholder,
    Qwen3ASRPlaceholder,
)
from shmllm.frontend.placeholders.qwen_vl import (
    DotsOcrPlaceholder,
    Ernie45VLPlaceholder,
    Lfm3VlPlaceholder,
    Lfm3VlVideoPlaceholder,
    MiniMaxM3Placeholder,
    PaddleOcrVlPlaceholder,
    Qwen3VideoPlaceholder,
    Qwen3VLPlaceholder,
    Qwen35Placeholder,
    Qwen35VideoPlaceholder,
    QwenVideoPlaceholder,
    QwenVLPlaceholder,
    VideoLlama3Placeholder,
)
from shmllm.frontend.placeholders.voxtral import VoxtralPlaceholder
from shmllm.frontend.placeholders.whisper import WhisperPlaceholder
from shmllm.params.items import Modality

FAMILIES: dict[str, tuple[type[Placeholder], ...]] = {
    "AudioFlamingo3ForConditionalGeneration": (AudioFlamingoPlaceholder,),
    "AyaVisionForConditionalGeneration": (AyaVisionPlaceholder,),
    "Blip2ForConditionalGeneration": (Blip2Placeholder,),
    "Cohere2VisionForConditionalGeneration": (Cohere2VisionPlaceholder,),
    "CanaryForConditionalGeneration": (ParakeetPlaceholder,),
    "CohereAsrForConditionalGeneration": (CohereAsrPlaceholder,),
    **dict.fromkeys(
        ("CLIPModel", "ChineseCLIPModel", "MetaClip2Model", "SiglipModel"), (ClipPlaceholder,)
    ),
    "ColModernVBertForRetrieval": (ColModernVBertPlaceholder,),
    "ColPaliForRetrieval": (PaliGemmaPlaceholder,),
    **dict.fromkeys(("ColQwen2ForRetrieval", "JinaVLForRanking"), (QwenVLPlaceholder,)),
    "ColQwen3ForRetrieval": (Qwen3VLPlaceholder, Qwen3VideoPlaceholder),
    "ColQwen3_5ForRetrieval": (Qwen35Placeholder, Qwen35VideoPlaceholder),
    "DeepseekOcr2ForConditionalGeneration": (DeepseekOcr2Placeholder,),
    "DeepseekOcrForConditionalGeneration": (DeepseekOcrPlaceholder,),
    "DeepseekVLForConditionalGeneration": (DeepseekVLPlaceholder,),
    "DeepseekVLV2ForCausalLM": (DeepseekVL2Placeholder,),
    "DotsOCRForCausalLM": (DotsOcrPlaceholder,),
    "Ernie4_5_VLMoeForConditionalGeneration": (Ernie45VLPlaceholder,),
    "Ernie4_5_VL_MoeForConditionalGeneration": (Ernie45VLPlaceholder,),
    "Exaone4_5_ForConditionalGeneration": (Exaone45Placeholder, Exaone45VideoPlaceholder),
    "FunAsrNanoForConditionalGeneration": (FunAsrPlaceholder,),
    "Glm46VForConditionalGeneration": (Glm46VPlaceholder, Glm46VVideoPlaceholder),
    "Glm4vForConditionalGeneration": (Glm4vPlaceholder, Glm4vVideoPlaceholder),
    "Glm4vMoeForConditionalGeneration": (Glm4vMoePlaceholder, Glm4vMoeVideoPlaceholder),
    "GlmAsrForConditionalGeneration": (GlmAsrPlaceholder,),
    "GlmOcrForConditionalGeneration": (GlmOcrPlaceholder, GlmOcrVideoPlaceholder),
    "GotOcr2ForConditionalGeneration": (GotOcr2Placeholder,),
    "Granite4VisionForConditionalGeneration": (Granite4VisionPlaceholder,),
    "GraniteDoclingForConditionalGeneration": (GraniteDoclingPlaceholder,),
    "GraniteSpeechForConditionalGeneration": (GraniteSpeechPlaceholder,),
    "GraniteSpeechPlusForConditionalGeneration": (GraniteSpeechPlaceholder,),
    "HCXVisionV2ForCausalLM": (HyperClovaPlaceholder,),
    "HunYuanVLForConditionalGeneration": (HunYuanVLPlaceholder,),
    "HyperCLOVAXVisionV2ForConditionalGeneration": (HyperClovaPlaceholder,),
    "InternVLForConditionalGeneration": (InternVLPlaceholder,),
    "Lfm2VlForConditionalGeneration": (Lfm2VlPlaceholder,),
    "Lfm3VlForConditionalGeneration": (Lfm3VlPlaceholder, Lfm3VlVideoPlaceholder),
    "LightOnOCRForConditionalGeneration": (LightOnOcrPlaceholder,),
    "LightOnOcrForConditionalGeneration": (LightOnOcrPlaceholder,),
    "Llama4ForConditionalGeneration": (Llama4Placeholder,),
    "JanusForConditionalGeneration": (JanusPlaceholder,),
    "KimiK25ForConditionalGeneration": (KimiK25Placeholder,),
    "KimiVLForConditionalGeneration": (KimiVLPlaceholder,),
    "Kimi_K25ForConditionalGeneration": (KimiK25Placeholder,),
    "LlavaForConditionalGeneration": (LlavaPlaceholder, PixtralPlaceholder),
    "LlavaNextForConditionalGeneration": (LlavaNextPlaceholder,),
    "LlavaNextVideoForConditionalGeneration": (
        LlavaNextVideoImagePlaceholder,
        LlavaNextVideoPlaceholder,
    ),
    "LlavaOnevisionForConditionalGeneration": (
        LlavaOnevisionPlaceholder,
        LlavaOnevisionVideoPlaceholder,
    ),
    "Idefics3ForConditionalGeneration": (Idefics3Placeholder,),
    "SmolVLMForConditionalGeneration": (Idefics3Placeholder,),
    "MiniCPMOcrForConditionalGeneration": (MiniCPMOcrPlaceholder,),
    "MiniCPMV4_6ForConditionalGeneration": (MiniCPMVPlaceholder,),
    "MiniCPMV4_7ForConditionalGeneration": (MiniCPMVPlaceholder,),
    "MiniMaxM3SparseForConditionalGeneration": (MiniMaxM3Placeholder,),
    "Mistral3ForConditionalGeneration": (Mistral3Placeholder,),
    "MoonshineForConditionalGeneration": (MoonshinePlaceholder,),
    "MossTranscribeDiarizeForConditionalGeneration": (MossPlaceholder,),
    "OmniASRForConditionalGeneration": (OmniAsrPlaceholder,),
    "NemotronHOmniForConditionalGeneration": (NemotronOmniAudioPlaceholder,),
    "Ovis2ForConditionalGeneration": (Ovis2Placeholder,),
    "MuseGlimmerForConditionalGeneration": (
        MuseGlimmerPlaceholder,
        MuseGlimmerVideoPlaceholder,
    ),
    "MusicFlamingoForConditionalGeneration": (MusicFlamingoPlaceholder,),
    "PaddleOCRVLForConditionalGeneration": (PaddleOcrVlPlaceholder,),
    "PaliGemmaForConditionalGeneration": (PaliGemmaPlaceholder,),
    "QianfanOCRForConditionalGeneration": (QianfanOcrPlaceholder,),
    "Qwen2AudioForConditionalGeneration": (Qwen2AudioPlaceholder,),
    "Qwen2VLForConditionalGeneration": (QwenVLPlaceholder, QwenVideoPlaceholder),
    "Qwen2_5OmniThinkerForConditionalGeneration": (
        OmniPlaceholder,
        OmniVideoPlaceholder,
        OmniAudioPlaceholder,
    ),
    "Qwen2_5_VLForConditionalGeneration": (QwenVLPlaceholder, QwenVideoPlaceholder),
    "Qwen3ASRForConditionalGeneration": (Qwen3ASRPlaceholder,),
    "Qwen3ASRForTokenClassification": (Qwen3ASRPlaceholder,),
    "Qwen3ASRForcedAlignerForTokenClassification": (Qwen3ASRPlaceholder,),
    "Qwen3OmniMoeThinkerForConditionalGeneration": (
        Omni3Placeholder,
        Omni3VideoPlaceholder,
        Omni3AudioPlaceholder,
    ),
    "Qwen3VLForConditionalGeneration": (Qwen3VLPlaceholder, Qwen3VideoPlaceholder),
    "Qwen3VLMoeForConditionalGeneration": (Qwen3VLPlaceholder, Qwen3VideoPlaceholder),
    "Qwen3_5ForConditionalGeneration": (Qwen35Placeholder, Qwen35VideoPlaceholder),
    "Qwen3_5MoeForConditionalGeneration": (Qwen35Placeholder, Qwen35VideoPlaceholder),
    "Siglip2Model": (Siglip2Placeholder,),
    "VideoLlama3ForConditionalGeneration": (VideoLlama3Placeholder,),
    "VipLlavaForConditionalGeneration": (VipLlavaPlaceholder,),
    "VoxtralForConditionalGeneration": (VoxtralPlaceholder,),
    "WhisperForConditionalGeneration": (WhisperPlaceholder,),
    "Gemma3ForConditionalGeneration": (Gemma3Placeholder,),
    "Gemma4ForConditionalGeneration": (
        Gemma4Placeholder,
        Gemma4VideoPlaceholder,
        Gemma4AudioPlaceholder,
    ),
    "Gemma4UnifiedForConditionalGeneration": (
        Gemma4UnifiedPlaceholder,
        Gemma4UnifiedVideoPlaceholder,
        Gemma4UnifiedAudioPlaceholder,
    ),
}
"""One for each modality that the architecture takes."""

_TOKENIZER = "tokenizer_config.json"
_NAMED = ("model_specific_special_tokens", "extra_special_tokens")


def placeholders_of_model(
    directory: Path, config: Mapping[str, Any]
) -> dict[Modality, Placeholder]:
    """The placeholders of a model, by modality.

    Args:
        directory: the model's directory; its tokenizer may name the special tokens.
        config: the content of its config.json.

    Raises:
        EngineStartError: a file cannot be read, or a field is wrong.
    """
    config = in_terms_of_transformers(config, directory)
    config = thinker_of(config, str(directory / "config.json"))
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    families = FAMILIES.get(name, ()) if isinstance(name, str) else ()
    if not families:
        return {}
    processor = read_object(directory / PROCESSOR)
    found = Config(config, str(directory / "config.json"), processor)
    texts = _special_texts(directory / PROCESSOR) | _special_texts(directory / _TOKENIZER)
    return {each.modality: each.of(found, texts) for each in families if each.is_taken(found)}


def _special_texts(path: Path) -> dict[str, str]:
    """The texts of special tokens by their names in a file, such as "image_token". A token may be
    its text or an object with its text."""
    content = read_object(path) or {}
    named = [content.get(key) for key in _NAMED]
    texts: dict[str, str] = {}
    for table in (content, *(each for each in named if isinstance(each, dict))):
        for name, value in table.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str) and text:
                texts[name] = text
    return texts
