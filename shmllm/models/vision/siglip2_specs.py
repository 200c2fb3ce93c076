"""What the towers are that have SigLIP 2 for images of any size.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.models.vision.encoder_spec import VisionActivation
from shmllm.models.vision.squares_specs import SquaresTower


@dataclass(frozen=True, slots=True, kw_only=True)
class Siglip2Tower(SquaresTower):
    """
    Attributes:
        num_positions: the length of the table of positions, a square number.
        eps: of the norms of the encoder.
    """

    num_positions: int
    eps: float

    @property
    def num_elements(self) -> int:
        """About the number of its parameters."""
        of_layers = self.num_layers * (4 * self.hidden_size + 2 * self.inner)
        return self.hidden_size * (of_layers + 3 * self.patch_size**2 + self.num_positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledSiglip2Tower(Siglip2Tower):
    """A probe attends to all patches, which makes one vector of an image."""

    def num_squares(self, rows: int, columns: int) -> int:
        """Returns 1; 0: there is no image of so many patches."""
        return min(1, super(PooledSiglip2Tower, self).num_squares(rows, columns))

    @property
    def width(self) -> int:
        """The width of the vector."""
        return self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2VlTower(Siglip2Tower):
    """
    Attributes:
        projector_norm: whether squares have a norm before the projections.
        projector_inner: the width of the output of the first projection.
        projector_activation: the activation between the projections.
        projector_bias: whether these have a bias.
    """

    projector_norm: bool
    projector_inner: int
    projector_activation: VisionActivation
    projector_bias: bool

    @property
    def num_elements(self) -> int:
        """About the number of its parameters, without the last projection."""
        of_squares = self.merge_size**2 * self.projector_inner
        of_encoder: int = super(Lfm2VlTower, self).num_elements
        return of_encoder + self.hidden_size * of_squares
