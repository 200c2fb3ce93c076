"""Encoder-decoders of sounds of any length in a whole engine on a GPU."""

from __future__ import annotations

from conformance.encoder_decoders import OnDeviceConformance
from conformance.gpu_sound_encoders import subject

__all__ = ["subject"]


class TestSoundEncoders(OnDeviceConformance):
    pass
