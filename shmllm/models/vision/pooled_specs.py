"""What the towers are that make one vector of an image, which is the model's result.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.models.vision.encoder_spec import EncoderSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledTower:
    """An encoder, and what makes one vector of its results: a projection of the class token, or,
    where there is none ("siglip"), a probe that attends to all patches.

    Attributes:
        encoder: the encoder.
        width: that of the vector.
    """

    encoder: EncoderSpec
    width: int

    @property
    def num_elements(self) -> int:
        return self.encoder.num_elements
