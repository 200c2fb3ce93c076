"""Encoder-decoders of sounds of any length in a whole engine on the fake GPU."""

from __future__ import annotations

import pytest
from conformance.encoder_decoders import OnDeviceConformance
from conformance.gpu_sound_encoders import subject

__all__ = ["subject"]
pytestmark = pytest.mark.slow


class TestSoundEncoders(OnDeviceConformance):
    pass
