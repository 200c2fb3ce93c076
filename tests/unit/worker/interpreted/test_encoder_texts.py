"""Encoder-decoders of texts in a whole engine on the fake GPU."""

from __future__ import annotations

from conformance.encoder_decoders import OnDeviceConformance
from conformance.gpu_encoder_texts import subject

__all__ = ["subject"]


class TestEncoderTexts(OnDeviceConformance):
    pass
