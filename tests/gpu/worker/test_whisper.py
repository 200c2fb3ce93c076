"""Whisper in a whole engine on a GPU."""

from __future__ import annotations

from conformance.gpu_whisper import WhisperOnDeviceConformance, subject

__all__ = ["subject"]


class TestWhisper(WhisperOnDeviceConformance):
    pass
