"""What the tower of ERNIE 4.5 VL is.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.models.vision.squares_specs import RotatedTower

NUM_FRAMES = 2
"""How many frames become one behind the layers; an image is as many equal ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ernie45VLTower(RotatedTower):
    """All patches of an image attend to one another.

    Attributes:
        eps: of the LayerNorms.
        last_eps: of the norm of embeddings.
    """

    eps: float
    last_eps: float

    @property
    def num_elements(self) -> int:
        """About the number of its parameters."""
        of_square = (self.merge_size**2 * self.hidden_size) ** 2
        return super(Ernie45VLTower, self).num_elements + (2 + NUM_FRAMES) * of_square
