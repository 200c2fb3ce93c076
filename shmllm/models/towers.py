"""The kinds of towers: which class has the weights of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shmllm.models.audio.audio_flamingo3 import AudioFlamingo
from shmllm.models.audio.conformer_specs import FunAsrTower, GraniteSpeechTower
from shmllm.models.audio.fun_asr_nano import FunAsr
from shmllm.models.audio.gemma4 import Gemma4Audio
from shmllm.models.audio.glmasr import GlmAsr
from shmllm.models.audio.granite_speech import GraniteSpeech
from shmllm.models.audio.keys_specs import MoonshineTower
from shmllm.models.audio.moonshine import Moonshine
from shmllm.models.audio.moss import Moss
from shmllm.models.audio.music_flamingo import MusicFlamingo
from shmllm.models.audio.nemotron_omni import NemotronOmniAudio
from shmllm.models.audio.omni_specs import Qwen2_5OmniAudioTower, Qwen3OmniAudioTower
from shmllm.models.audio.omniasr import OmniAsr
from shmllm.models.audio.omniasr_specs import OmniAsrTower
from shmllm.models.audio.parakeet import Parakeet
from shmllm.models.audio.parakeet_specs import NemotronOmniAudioTower, ParakeetTower
from shmllm.models.audio.qwen2_5_omni import Qwen2_5OmniAudio
from shmllm.models.audio.qwen3_omni import Qwen3OmniAudio
from shmllm.models.audio.samples import Samples
from shmllm.models.audio.specs import (
    AudioFlamingoTower,
    AudioSpec,
    Gemma4AudioTower,
    GlmAsrTower,
    KeysTower,
    MossTower,
    MusicFlamingoTower,
    SamplesTower,
    VoxtralTower,
    WhisperTower,
)
from shmllm.models.audio.voxtral import Voxtral
from shmllm.models.audio.whisper import Whisper, WhisperKeys
from shmllm.models.layers import Storage
from shmllm.models.text.bart import BartEncoder
from shmllm.models.text.gemma import GemmaEncoder
from shmllm.models.text.specs import BartTower, GemmaTower, T5Tower, TextSpec
from shmllm.models.text.t5 import T5Encoder
from shmllm.models.tower import Tower
from shmllm.models.vision.aya_vision import AyaVision
from shmllm.models.vision.blip_2 import Blip2
from shmllm.models.vision.blip_2_specs import Blip2Tower
from shmllm.models.vision.deepseek_ocr import DeepseekOcr
from shmllm.models.vision.deepseek_ocr2 import DeepseekOcr2
from shmllm.models.vision.deepseek_vl2 import DeepseekVL2
from shmllm.models.vision.deepseek_vl2_specs import DeepseekVL2Tower
from shmllm.models.vision.dots_ocr import DotsOcr
from shmllm.models.vision.dots_ocr_specs import DotsOcrTower
from shmllm.models.vision.ernie4_5_vl import Ernie45VL
from shmllm.models.vision.ernie4_5_vl_specs import Ernie45VLTower
from shmllm.models.vision.gemma3 import Gemma3
from shmllm.models.vision.gemma4 import Gemma4
from shmllm.models.vision.glm4v import Glm4v
from shmllm.models.vision.glm_ocr import GlmOcr
from shmllm.models.vision.got_ocr2 import GotOcr2
from shmllm.models.vision.granite4_vision import Granite4Vision
from shmllm.models.vision.granite4_vision_specs import Granite4VisionTower
from shmllm.models.vision.granite_docling import GraniteDocling
from shmllm.models.vision.hunyuan_vl import HunYuanVL
from shmllm.models.vision.hunyuan_vl_specs import HunYuanVLTower
from shmllm.models.vision.idefics3 import Idefics3
from shmllm.models.vision.internvl import InternVL
from shmllm.models.vision.janus import DeepseekVL, Janus
from shmllm.models.vision.kimi import Kimi
from shmllm.models.vision.lfm2_vl import Lfm2Vl
from shmllm.models.vision.lfm3_vl import Lfm3Vl
from shmllm.models.vision.llama4 import Llama4
from shmllm.models.vision.llava import (
    Llava,
    LlavaNext,
    LlavaNextVideo,
    LlavaOnevision,
    VipLlava,
)
from shmllm.models.vision.llava_specs import (
    LlavaNextTower,
    LlavaNextVideoTower,
    LlavaOnevisionTower,
    LlavaTower,
    VipLlavaTower,
)
from shmllm.models.vision.minicpmv4_6 import MiniCPMV
from shmllm.models.vision.minimax_m3 import MiniMaxM3
from shmllm.models.vision.minimax_m3_specs import MiniMaxM3Tower
from shmllm.models.vision.muse_glimmer import MuseGlimmer
from shmllm.models.vision.ovis2 import Ovis2
from shmllm.models.vision.ovis2_specs import Ovis2Tower
from shmllm.models.vision.paddleocr_vl import PaddleOcrVl
from shmllm.models.vision.paligemma import PaliGemma
from shmllm.models.vision.pixels import Pixels
from shmllm.models.vision.pixtral import Pixtral
from shmllm.models.vision.pooled import Pooled
from shmllm.models.vision.pooled_specs import PooledTower
from shmllm.models.vision.projected_specs import (
    AyaVisionTower,
    DeepseekVLTower,
    Gemma3Tower,
    GraniteDoclingTower,
    Idefics3Tower,
    InternVLTower,
    JanusTower,
    Llama4Tower,
    PaliGemmaTower,
)
from shmllm.models.vision.qwen2_5_vl import Qwen2_5
from shmllm.models.vision.qwen2_vl import Qwen2
from shmllm.models.vision.qwen3_vl import Qwen3
from shmllm.models.vision.sam_specs import DeepseekOcr2Tower, DeepseekOcrTower, GotOcr2Tower
from shmllm.models.vision.siglip2 import PooledSiglip2
from shmllm.models.vision.siglip2_specs import Lfm2VlTower, PooledSiglip2Tower
from shmllm.models.vision.specs import VisionSpec
from shmllm.models.vision.squares_specs import (
    Gemma4Tower,
    Glm4vTower,
    GlmOcrTower,
    KimiTower,
    Lfm3VlTower,
    MiniCPMVTower,
    MuseGlimmerTower,
    PaddleOcrVlTower,
    PixelsTower,
    PixtralTower,
    Qwen2_5Tower,
    Qwen2Tower,
    Qwen3Tower,
)
from shmllm.models.vision.video_llama_3 import VideoLlama3
from shmllm.models.vision.video_llama_3_specs import VideoLlama3Tower

TOWERS: dict[type[Any], Callable[[Any, int, Storage], Tower]] = {
    LlavaTower: Llava,
    VipLlavaTower: VipLlava,
    Granite4VisionTower: Granite4Vision,
    LlavaNextTower: LlavaNext,
    LlavaNextVideoTower: LlavaNextVideo,
    LlavaOnevisionTower: LlavaOnevision,
    Idefics3Tower: Idefics3,
    Ovis2Tower: Ovis2,
    GraniteDoclingTower: GraniteDocling,
    JanusTower: Janus,
    DeepseekVLTower: DeepseekVL,
    DeepseekVL2Tower: DeepseekVL2,
    InternVLTower: InternVL,
    Llama4Tower: Llama4,
    AyaVisionTower: AyaVision,
    Gemma3Tower: Gemma3,
    GotOcr2Tower: GotOcr2,
    PaliGemmaTower: PaliGemma,
    PooledTower: Pooled,
    PooledSiglip2Tower: PooledSiglip2,
    Blip2Tower: Blip2,
    DeepseekOcrTower: DeepseekOcr,
    DeepseekOcr2Tower: DeepseekOcr2,
    Qwen2Tower: Qwen2,
    Qwen2_5Tower: Qwen2_5,
    Qwen3Tower: Qwen3,
    PaddleOcrVlTower: PaddleOcrVl,
    PixelsTower: Pixels,
    PixtralTower: Pixtral,
    Glm4vTower: Glm4v,
    GlmOcrTower: GlmOcr,
    DotsOcrTower: DotsOcr,
    Ernie45VLTower: Ernie45VL,
    HunYuanVLTower: HunYuanVL,
    KimiTower: Kimi,
    Lfm2VlTower: Lfm2Vl,
    Lfm3VlTower: Lfm3Vl,
    MiniCPMVTower: MiniCPMV,
    MiniMaxM3Tower: MiniMaxM3,
    MuseGlimmerTower: MuseGlimmer,
    VideoLlama3Tower: VideoLlama3,
    Gemma4Tower: Gemma4,
    VoxtralTower: Voxtral,
    WhisperTower: Whisper,
    KeysTower: WhisperKeys,
    AudioFlamingoTower: AudioFlamingo,
    MusicFlamingoTower: MusicFlamingo,
    GlmAsrTower: GlmAsr,
    MossTower: Moss,
    GraniteSpeechTower: GraniteSpeech,
    FunAsrTower: FunAsr,
    Gemma4AudioTower: Gemma4Audio,
    Qwen2_5OmniAudioTower: Qwen2_5OmniAudio,
    Qwen3OmniAudioTower: Qwen3OmniAudio,
    SamplesTower: Samples,
    MoonshineTower: Moonshine,
    ParakeetTower: Parakeet,
    NemotronOmniAudioTower: NemotronOmniAudio,
    OmniAsrTower: OmniAsr,
    BartTower: BartEncoder,
    GemmaTower: GemmaEncoder,
    T5Tower: T5Encoder,
}
"""By the type of a tower's spec: (the spec, the width of embeddings, storage) -> the tower."""


def make_tower(
    spec: VisionSpec | AudioSpec | TextSpec, hidden_size: int, storage: Storage
) -> Tower:
    """Allocates a tower, whose weights are not set."""
    return TOWERS[type(spec.tower)](spec.tower, hidden_size, storage)


def make_towers(
    specs: Mapping[str, VisionSpec | AudioSpec | TextSpec], hidden_size: int, storage: Storage
) -> dict[str, Tower]:
    """Allocates the towers of a model, by modality. Modalities with the same spec share one."""
    made: dict[int, Tower] = {}
    for spec in specs.values():
        if id(spec) not in made:
            made[id(spec)] = make_tower(spec, hidden_size, storage)
    return {name: made[id(spec)] for name, spec in specs.items()}
