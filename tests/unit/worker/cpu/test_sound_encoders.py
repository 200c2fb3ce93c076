"""Encoder-decoders of sounds of any length in a whole engine on the CPU."""

from __future__ import annotations

import pytest
from conformance.encoder_decoders import EncoderDecoderConformance
from conformance.gpu_sound_encoders import subject

__all__ = ["subject"]


@pytest.fixture
def gpu_device() -> None:
    """No device: the CPU computes."""


class TestSoundEncoders(EncoderDecoderConformance):
    pass
