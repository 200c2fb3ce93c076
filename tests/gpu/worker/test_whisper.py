"""Whisper in a whole engine on a GPU."""

from __future__ import annotations

from conformance.encoder_decoders import OnDeviceConformance
from conformance.gpu_whisper import subject

__all__ = ["subject"]


class TestWhisper(OnDeviceConformance):
    pass
