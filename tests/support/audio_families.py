"""What the small models that hear sounds are; `audio_models.make_audio_model` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from support.reference_models import VARIANTS
from support.vision_families import TEXT

GLM_ASR = {
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 200,
}
"""Names of its own for the sizes of the encoder."""


GRANITE_SPEECH: dict[str, Any] = {
    "hidden_dim": 32,
    "num_layers": 4,
    "num_heads": 2,
    "dim_head": 12,
    "input_dim": 16,
    "output_dim": 5,
    "context_size": 10,
    "max_pos_emb": 14,
    "conv_kernel_size": 5,
}
GRANITE_PROJECTOR = {
    "model_type": "blip_2_qformer",
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 40,
}
GRANITE_SPEECH_SETTINGS: dict[str, Any] = {
    "feature_extractor_type": "GraniteSpeechFeatureExtractor",
    "n_mels": 8,
    "projector_window_size": 6,
    "projector_downsample_rate": 3,
}


FUN_ASR: dict[str, Any] = {
    "num_mel_bins": 8,
    "num_stacked_frames": 3,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_timestamp_prediction_layers": 1,
    "fsmn_kernel_size": 4,
    "max_position_embeddings": 151,
}
FUN_ASR_SETTINGS: dict[str, Any] = {
    "feature_extractor_type": "FunAsrNanoFeatureExtractor",
    "feature_size": 8,
    "num_frames_lfr": 3,
    "stride_lfr": 4,
}


OMNI: dict[str, Any] = {
    "model_type": "parakeet_encoder",
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 64,
    "num_mel_bins": 16,
    "subsampling_conv_channels": 6,
    "projection_hidden_size": 40,
    "projection_bias": False,
}


OMNIASR: dict[str, Any] = {
    "model_type": "omniasr_audio",
    "hidden_size": 32,
    "conv_dim": [12, 10, 8],
    "conv_kernel": [10, 5, 9],
    "conv_stride": [10, 8, 8],
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_conv_pos_embeddings": 6,
    "num_conv_pos_embedding_groups": 4,
    "intermediate_size": 48,
}


class AudioFamily(NamedTuple):
    """
    Attributes:
        model: the name of transformers' class, without `end_of_name`.
        text, audio: what config.json has beside TEXT and AUDIO.
        begin, token, end: what stands for a sound.
        outer: what config.json has beside these.
        settings: what the feature extractor's settings are beside WHISPER_SETTINGS.
        part: the field of config.json with `audio`.
        end_of_name: the end of the name of the class.
        further: further tokens.
    """

    model: str
    text: dict[str, Any]
    audio: dict[str, Any]
    begin: str
    token: str
    end: str
    outer: Mapping[str, Any] = MappingProxyType({})
    settings: Mapping[str, Any] = MappingProxyType({})
    part: str = "audio_config"
    end_of_name: str = "ForConditionalGeneration"
    further: tuple[str, ...] = ()


AUDIO_FAMILIES = {
    "fun_asr_nano": AudioFamily(
        "FunAsrNano",
        {"model_type": "qwen3", "head_dim": 16},
        FUN_ASR | {"model_type": "fun_asr_nano_encoder"},
        *("", "<|object_ref_start|>", ""),
        outer={
            "adaptor_config": {
                "hidden_size": TEXT["hidden_size"],
                "num_attention_heads": 4,
                "intermediate_size": TEXT["hidden_size"] // 4,
                "projector_hidden_size": 48,
            }
        },
        settings=FUN_ASR_SETTINGS,
    ),
    "omniasr": AudioFamily(
        "OmniASR",
        {"model_type": "llama", "head_dim": 16},
        OMNIASR,
        *("", "<extra_id_1>", ""),
        settings={
            "feature_extractor_type": "OmniASRFeatureExtractor",
            "feature_size": 1,
            "do_normalize": True,
        },
        further=("<extra_id_0>", "<|lang:auto|>", "<|lang:deu_latn|>", "<s>"),
    ),
    "nemotron_h_omni": AudioFamily(
        "NemotronH_Omni_Reasoning_V3",
        {"model_type": "nemotron_h", **VARIANTS["nemotron_h"][1]},
        OMNI,
        *("", "<so_embedding>", ""),
        outer={
            "vision_config": {
                "model_type": "radio",
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "video_temporal_patch_size": 2,
            },
            "vision_hidden_size": 32,
            "projector_hidden_size": 32,
        },
        settings={"feature_extractor_type": "ParakeetFeatureExtractor"},
        end_of_name="",
    ),
    "qwen2_audio": AudioFamily(
        "Qwen2Audio", {"model_type": "qwen2"}, {}, "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"
    ),
    "voxtral": AudioFamily(
        "Voxtral",
        {"model_type": "llama", "head_dim": 16},
        {"encoder_ffn_dim": 96},
        *("[BEGIN_AUDIO]", "[AUDIO]", ""),
    ),
    "qwen3_asr": AudioFamily(
        "Qwen3ASR",
        {"model_type": "qwen3", "head_dim": 16},
        {"output_dim": 64, "n_window_infer": 200, "downsample_hidden_size": 6},
        *("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),
        settings={"feature_extractor_type": "Qwen3ASRFeatureExtractor"},
    ),
    "audioflamingo3": AudioFamily(
        "AudioFlamingo3",
        {"model_type": "qwen2"},
        {"model_type": "audioflamingo3_encoder"},
        *("", "<sound>", ""),
    ),
    "musicflamingo": AudioFamily(
        "MusicFlamingo",
        {"model_type": "qwen2"},
        {"model_type": "audioflamingo3_encoder"},
        *("", "<sound>", ""),
    ),
    "glmasr": AudioFamily(
        "GlmAsr",
        {"model_type": "llama", "head_dim": 16},
        GLM_ASR | {"model_type": "glmasr_encoder"},
        *("<|begin_of_audio|>", "<|pad|>", "<|end_of_audio|>"),
        settings={"chunk_length": 4},
    ),
    "moss_transcribe_diarize": AudioFamily(
        "MossTranscribeDiarize",
        {"model_type": "qwen3", "head_dim": 16},
        {"model_type": "moss_transcribe_diarize_audio", "max_source_positions": 200},
        *("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),
        outer={"audio_chunk_size": 64_000},
        settings={
            "feature_extractor_type": "MossTranscribeDiarizeFeatureExtractor",
            "chunk_length": 4,
        },
    ),
    **{
        name: AudioFamily(
            f"GraniteSpeech{end}",
            {"model_type": "granite", "embedding_multiplier": 3.0, "residual_multiplier": 0.7},
            GRANITE_SPEECH | more,
            *("", "<|audio|>", ""),
            outer={
                "has_lora_adapter": False,
                "window_size": 6,
                "downsample_rate": 3,
                "projector_config": GRANITE_PROJECTOR | {"encoder_hidden_size": width},
            },
            settings=GRANITE_SPEECH_SETTINGS,
            part="encoder_config",
        )
        for name, end, more, width in (
            ("granite_speech", "", {"model_type": "granite_speech_encoder"}, 32),
            (
                "granite_speech_plus",
                "Plus",
                {"model_type": "granite_speech_plus_encoder", "cat_hidden_layers": [0, 2]},
                96,
            ),
        )
    },
}
