"""What the tower of BLIP-2 is.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.models.audio.conformer_specs import QFormer
from shmllm.models.vision.encoder_spec import EncoderSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Blip2Tower:
    """An encoder, and queries that read its results, from which a projection makes embeddings.

    Attributes:
        encoder: the encoder.
        reader: the queries, whose window is a tile.
    """

    encoder: EncoderSpec
    reader: QFormer

    @property
    def num_elements(self) -> int:
        """About the number of its parameters."""
        return self.encoder.num_elements + self.reader.num_elements
