"""What the tower of dots.ocr is.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.models.vision.squares_specs import RotatedTower


@dataclass(frozen=True, slots=True, kw_only=True)
class DotsOcrTower(RotatedTower):
    """All patches of an image attend to one another.

    Attributes:
        bias: whether the projections of its layers have biases.
        eps: of the norms of patches, in layers and behind these.
        has_last_norm: whether there is a norm behind the layers.
    """

    bias: bool
    eps: float
    has_last_norm: bool
