"""What transformers' models take for sounds that are encoded one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from support.audio_families import FUN_ASR_SETTINGS, GRANITE_SPEECH_SETTINGS
from support.sound_encoders import parakeet_inputs
from support.whisper_models import RATE
from torch import Tensor
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function
from transformers.models.fun_asr_nano.feature_extraction_fun_asr_nano import (
    FunAsrNanoFeatureExtractor,
)


def granite_features(sound: npt.NDArray[np.float32]) -> Tensor:
    """What `GraniteSpeechFeatureExtractor` computes of a sound with RATE samples a second by
    torchaudio, [frames, features]: its definition in terms of torch and transformers."""
    spectrum = torch.stft(
        torch.from_numpy(sound),
        n_fft=512,
        hop_length=160,
        win_length=400,
        window=torch.hann_window(400),
        return_complex=True,
    )
    num_mels = GRANITE_SPEECH_SETTINGS["n_mels"]
    filters = mel_filter_bank(257, num_mels, 0.0, RATE / 2, RATE, norm=None, mel_scale="htk")
    mels = spectrum.abs().square().double().T @ torch.from_numpy(filters)
    logs = mels.clamp(min=1e-10).log10()
    logs = torch.maximum(logs, logs.max() - 8.0) / 4 + 1
    return logs[: len(logs) // 2 * 2].reshape(-1, 2 * num_mels).float()


def fun_asr_features(sound: npt.NDArray[np.float32]) -> Tensor:
    """What `FunAsrNanoFeatureExtractor` computes of a sound with RATE samples a second by
    torchaudio, [frames, features]: its definition in terms of transformers, which computes Kaldi's
    features without torchaudio, too."""
    num_mels = FUN_ASR_SETTINGS["feature_size"]
    filters = mel_filter_bank(
        257,
        num_mels,
        20.0,
        RATE / 2,
        RATE,
        mel_scale="kaldi",
        triangularize_in_mel_space=True,
    )
    logs = spectrogram(
        sound,
        window_function(400, "hamming", periodic=False),
        frame_length=400,
        hop_length=160,
        fft_length=512,
        power=2.0,
        center=False,
        preemphasis=0.97,
        mel_filters=filters,
        log_mel="log",
        mel_floor=float(torch.finfo(torch.float32).eps),
        remove_dc_offset=True,
    ).T
    extractor: Any = object.__new__(FunAsrNanoFeatureExtractor)
    extractor.num_frames_lfr = FUN_ASR_SETTINGS["num_frames_lfr"]
    extractor.stride_lfr = FUN_ASR_SETTINGS["stride_lfr"]
    found: Tensor = extractor._apply_lfr(torch.tensor(logs).float())
    return found


def _granite_inputs(sound: npt.NDArray[np.float32]) -> dict[str, Tensor]:
    return {"input_features": granite_features(sound)[None]}


def _fun_asr_inputs(sound: npt.NDArray[np.float32]) -> dict[str, Tensor]:
    frames = fun_asr_features(sound)[None]
    return {
        "input_features": frames,
        "input_features_mask": torch.ones(frames.shape[:2], dtype=torch.long),
    }


def _omni_inputs(sound: npt.NDArray[np.float32]) -> dict[str, Tensor]:
    found = parakeet_inputs(sound)
    return {
        "input_features": found["input_features"],
        "input_features_mask": found["attention_mask"],
    }


def _omniasr_inputs(sound: npt.NDArray[np.float32]) -> dict[str, Tensor]:
    return dict(transformers.OmniASRFeatureExtractor()([sound], sampling_rate=RATE))


ALONE = {
    "omniasr": _omniasr_inputs,
    "granite_speech": _granite_inputs,
    "granite_speech_plus": _granite_inputs,
    "fun_asr_nano": _fun_asr_inputs,
    "nemotron_h_omni": _omni_inputs,
}
"""What makes the inputs of those whose sounds transformers has to encode one by one: where it fills
shorter ones, they read what is behind them."""
