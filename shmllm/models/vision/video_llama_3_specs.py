"""What the tower of VideoLLaMA 3 is.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.models.vision.squares_specs import ROTATING, RotatedTower


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoLlama3Tower(RotatedTower):
    """Each patch becomes an embedding.

    Attributes:
        eps: of the norms.
    """

    eps: float

    @property
    def num_elements(self) -> int:
        """About the number of its parameters, without those behind the encoder."""
        of_layers = self.num_layers * (4 * self.hidden_size + 2 * self.inner)
        return self.hidden_size * (of_layers + 3 * self.patch_size**2)

    @property
    def most_activations(self) -> int:
        """See `EncoderSpec.most_activations`: its MLPs have two."""
        return max(2 * self.inner, ROTATING * self.hidden_size) + 3 * self.hidden_size
