"""Small random models that hear sounds, made by transformers, and the tokens they generate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from support.audio_families import AUDIO_FAMILIES
from support.one_thread import one_thread
from support.sounds_alone import ALONE
from support.vision_families import FAMILIES, TEXT, WHISPER, WHISPER_SETTINGS
from support.vision_models import draw_weights, make_vision_model, tokenizer_with
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.models.audioflamingo3.processing_audioflamingo3 import AudioFlamingo3Processor
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import (
    Gemma4UnifiedAudioFeatureExtractor,
)
from transformers.models.glmasr.processing_glmasr import GlmAsrProcessor
from transformers.models.moss_transcribe_diarize.feature_extraction_moss_transcribe_diarize import (
    MossTranscribeDiarizeFeatureExtractor,
)
from transformers.models.moss_transcribe_diarize.processing_moss_transcribe_diarize import (
    MossTranscribeDiarizeProcessor,
)
from transformers.models.musicflamingo.processing_musicflamingo import MusicFlamingoProcessor
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor
from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

RATE = 16000
SECONDS = 3
"""The longest sound."""
AUDIO = WHISPER
_MOST = {"max_audio_len": 600}
_AROUND = {"audio_bos_token": "<|sound_bos|>", "audio_eos_token": "<|sound_eos|>"}
_MARKS = {"audio_merge_size": 4, "audio_tokens_per_second": 12.5, "time_marker_every_seconds": 2}
PROCESSORS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "audioflamingo3": (AudioFlamingo3Processor, transformers.WhisperFeatureExtractor, _MOST),
    "musicflamingo": (
        MusicFlamingoProcessor,
        transformers.WhisperFeatureExtractor,
        _MOST | _AROUND,
    ),
    "glmasr": (GlmAsrProcessor, transformers.WhisperFeatureExtractor, _MOST),
    "moss_transcribe_diarize": (
        MossTranscribeDiarizeProcessor,
        MossTranscribeDiarizeFeatureExtractor,
        _MARKS,
    ),
}
"""Those that divide sounds and prepare each part as one, with feature extractors and attributes."""
UNPADDED = {"padding": True, "truncation": False}
"""How the processors of Qwen 3 Omni and Qwen 3 ASR call the extractor."""
GEMMA4_AUDIO_MELS = 16
SAMPLES_OF_FRAME = 1600
GEMMA4_AUDIO: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [GEMMA4_AUDIO_MELS, 6],
    "attention_chunk_size": 4,
    "attention_context_left": 5,
    "output_proj_dims": 48,
}
TEMPLATE = (
    "{% set number = namespace(value=0) %}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if 'audio' in part or 'audio_url' in part %}"
    "{% set number.value = number.value + 1 %}"
    "Audio {{ number.value }}: MARK\n"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""It finds sounds as Qwen2-Audio's does: by the name of the field."""


def make_audio_model(
    directory: Path,
    name: str = "qwen2_audio",
    *,
    outer: dict[str, Any] | None = None,
    **audio: Any,
) -> Any:
    """A random float32 model of transformers' in `directory`.

    Args:
        directory: where its files are written to.
        name: one of AUDIO_FAMILIES.
        outer: further fields of config.json itself.
        audio: further fields of its ``audio_config``.
    """
    torch.manual_seed(7)
    family = AUDIO_FAMILIES[name]
    around = _AROUND.values() if name == "musicflamingo" else ()
    marks = (
        "<|im_end|>",
        "<|im_start|>",
        family.begin,
        family.token,
        family.end,
        *around,
        *family.further,
    )
    tokenizer = tokenizer_with([mark for mark in marks if mark])
    end, token = (tokenizer.token_to_id(mark) for mark in ("<|im_end|>", family.token))
    config = transformers.AutoConfig.for_model(
        name,
        text_config=TEXT | family.text | {"bos_token_id": None, "eos_token_id": end},
        audio_token_id=token,
        **{family.part: AUDIO | family.audio | audio},
        **({"tie_word_embeddings": False, **family.outer, **(outer or {})}),
    )
    make = getattr(transformers, f"{family.model}{family.end_of_name}")
    model = make(config).eval()
    draw_weights(model, 1.0)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith(("running_mean", "running_var")):
            buffer.uniform_(0.5, 1.5)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in {
        "generation_config.json": {"eos_token_id": end},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "chat_template": TEMPLATE.replace("MARK", family.begin + family.token + family.end),
        },
        "preprocessor_config.json": {**WHISPER_SETTINGS, **family.settings},
    }.items():
        (directory / name).write_text(json.dumps(content, indent=2))
    return model


def make_gemma4(
    directory: Path, audio: dict[str, Any] | None = None, name: str = "gemma4", **text: Any
) -> Any:
    """A random float32 Gemma 4 of transformers' in `directory`, which sees images, too.

    Args:
        directory: where its files are written to.
        audio: further fields of config.json's ``audio_config``.
        name: "gemma4", or "gemma4_unified" for one without towers.
        text: further fields of its ``text_config``.
    """
    has_tower = name == "gemma4"
    own: dict[str, Any] = GEMMA4_AUDIO if has_tower else {"audio_embed_dim": SAMPLES_OF_FRAME}
    if has_tower:
        text = {"use_bidirectional_attention": None} | text
    outer = {"audio_config": own | (audio or {})}
    model = make_vision_model(name, directory, outer=outer, **text)
    extractor = gemma4_extractor() if has_tower else samples_extractor()
    settings = {"feature_extractor": json.loads(extractor.to_json_string())}
    (directory / "processor_config.json").write_text(json.dumps(settings))
    return model


def make_omni(
    directory: Path,
    audio: dict[str, Any] | None = None,
    name: str = "qwen2_5_omni",
    **outer: Any,
) -> Any:
    """A random float32 thinker of Qwen Omni of transformers' in `directory`, which sees images and
    videos, too.

    Args:
        directory: where its files are written to.
        name: one of `vision_families.FAMILIES`.
        audio: further fields of config.json's ``audio_config``.
        outer: further fields of config.json itself.
    """
    outer = {"audio_config": FAMILIES[name].outer["audio_config"] | (audio or {})} | outer
    return make_vision_model(name, directory, outer=outer)


def gemma4_extractor(**settings: Any) -> Any:
    """transformers' feature extractor of that model."""
    return Gemma4AudioFeatureExtractor(**{"feature_size": GEMMA4_AUDIO_MELS} | settings)


def samples_extractor() -> Any:
    """That of a Gemma 4 without towers."""
    sizes = dict.fromkeys(("feature_size", "audio_samples_per_token"), SAMPLES_OF_FRAME)
    return Gemma4UnifiedAudioFeatureExtractor(**sizes)


def extractor(name: str = "qwen2_audio", make: Any = transformers.WhisperFeatureExtractor) -> Any:
    """transformers' feature extractor of a family that has Whisper's, or one that is made alike."""
    settings = {**WHISPER_SETTINGS, **AUDIO_FAMILIES[name].settings}
    return make(**{name: settings[name] for name in ("feature_size", "chunk_length")})


def audio_inputs(
    sounds: Sequence[npt.NDArray[np.float32]], model: str = "qwen2_audio"
) -> dict[str, Tensor]:
    """What transformers' model takes for sounds with RATE samples a second.

    Args:
        sounds: the sounds.
        model: the ``model_type`` of its config.
    """
    if model == "voxtral":
        return {"input_features": _parts_of(sounds)}
    if model in PROCESSORS:
        return processed_in_parts(sounds, model)[0]
    if model in ALONE:
        (sound,) = sounds
        return ALONE[model](sound)
    if model == "gemma4":
        return dict(gemma4_extractor()(list(sounds), return_tensors="pt"))
    if model == "gemma4_unified":
        return dict(samples_extractor()(list(sounds), return_tensors="pt"))
    if model.startswith("qwen3_omni"):
        features, mask = _each_alone(extractor(), sounds)
        return {"input_features": features, "feature_attention_mask": mask}
    if model == "qwen3_asr":
        features, mask = _each_alone(asr_extractor(), sounds)
        return {"input_features": features, "input_features_mask": mask}
    found = extractor()(
        list(sounds), sampling_rate=RATE, return_attention_mask=True, return_tensors="pt"
    )
    return {
        "input_features": found["input_features"],
        "feature_attention_mask": found["attention_mask"],
    }


def _each_alone(extract: Any, sounds: Sequence[npt.NDArray[np.float32]]) -> tuple[Tensor, Tensor]:
    """Features, [sounds, features, frames], and masks. transformers' processors would fill shorter
    sounds with silence, so that they depend on the longest one."""
    options = UNPADDED | {"return_attention_mask": True, "return_tensors": "pt"}
    found = [extract([sound], sampling_rate=RATE, **options) for sound in sounds]
    features = pad_sequence([each["input_features"][0].T for each in found], batch_first=True)
    mask = pad_sequence([each["attention_mask"][0] for each in found], batch_first=True)
    return features.transpose(1, 2), mask


def asr_extractor() -> Any:
    """transformers' feature extractor of Qwen3-ASR."""
    return Qwen3ASRFeatureExtractor(feature_size=AUDIO["num_mel_bins"])


def _parts_of(sounds: Sequence[npt.NDArray[np.float32]]) -> Tensor:
    """As `VoxtralProcessor` makes them with its own arguments of the extractor."""
    kind, given = VoxtralProcessor, VoxtralProcessor.audio_kwargs
    processor: Any = object.__new__(kind)
    processor.feature_extractor = extractor()
    most = {"pad_to_multiple_of": SECONDS * RATE, "max_source_positions": SECONDS * 100}
    found: Tensor = processor._retrieve_input_features(sounds, **(given | most))
    return found


def processed_in_parts(
    sounds: Sequence[npt.NDArray[np.float32]], name: str
) -> tuple[dict[str, Tensor], list[str]]:
    """What a processor of PROCESSORS makes of sounds: inputs of the model, and what stands for each
    in a prompt."""
    kind, make, own = PROCESSORS[name]
    processor: Any = object.__new__(kind)
    processor.feature_extractor = extractor(name, make)
    processor.audio_token = AUDIO_FAMILIES[name].token
    for attribute, value in own.items():
        setattr(processor, attribute, value)
    options = {"sampling_rate": RATE, "return_attention_mask": True, "return_tensors": "pt"}
    found, texts = processor._process_audio(list(sounds), **options)
    names = ("input_features", "input_features_mask", "padding_mask")
    return {each: torch.as_tensor(found[each]) for each in names if each in found}, texts


@one_thread()
@torch.inference_mode()
def gemma4_embeddings(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """transformers' embeddings of one sound.

    Args:
        model: what `make_gemma4` returned.
        inputs: what `audio_inputs` returned.
    """
    found = model.model.get_audio_features(**inputs, return_dict=True)
    embeddings: Tensor = found.pooler_output[found.attention_mask]
    return embeddings


@one_thread()
@torch.inference_mode()
def reference_tokens(
    model: Any,
    token_ids: Sequence[int],
    sounds: Sequence[npt.NDArray[np.float32]],
    max_new_tokens: int = 12,
) -> list[int]:
    """transformers' greedy tokens; nothing but their number ends them.

    Args:
        model: what `make_audio_model` or `make_gemma4` returned.
        token_ids: the prompt, with as many audio tokens as there are embeddings.
        sounds: its sounds, with RATE samples a second.
        max_new_tokens: how many.
    """
    ids = torch.tensor([list(token_ids)])
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens}
    options |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    kind = model.config.model_type
    if sounds and kind in ALONE:
        output = model.generate(inputs_embeds=_embeds_with(model, ids, sounds), **options)
        return list(output[0].tolist())
    output = model.generate(ids, **options, **(audio_inputs(sounds, kind) if sounds else {}))
    tokens: list[int] = output[0, len(token_ids) :].tolist()
    return tokens


def _embeds_with(model: Any, ids: Tensor, sounds: Sequence[npt.NDArray[np.float32]]) -> Tensor:
    """The embeddings of a prompt, [1, tokens, width], with those of its sounds, each of which is
    encoded alone: transformers pads shorter ones and lets the encoder read that."""
    kind, is_sound = model.config.model_type, ids == model.config.audio_token_id
    found = [model.get_audio_features(**audio_inputs([each], kind)) for each in sounds]
    embeds: Tensor = model.get_input_embeddings()(ids.masked_fill(is_sound, 0))
    embeds[is_sound] = torch.cat([each.pooler_output.flatten(0, -2) for each in found])
    return embeds
