"""What the tower of HunyuanOCR is.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shmllm.models.vision.squares_specs import SquaresTower


@dataclass(frozen=True, slots=True, kw_only=True)
class HunYuanVLTower(SquaresTower):
    """A row of squares has one more embedding, which ends it; an image has one before and one
    behind all rows.

    Attributes:
        table_side: the number of rows, and of columns, of the table of positions.
        mode: how that is resized.
        eps: of the norms.
    """

    table_side: int
    mode: Literal["bilinear", "bicubic"]
    eps: float

    def num_squares(self, rows: int, columns: int) -> int:
        """See `SquaresTower.num_squares`: how many embeddings."""
        count = super(HunYuanVLTower, self).num_squares(rows, columns)
        return count + rows // self.merge_size + 2 if count else 0

    @property
    def most_activations(self) -> int:
        """See `EncoderSpec.most_activations`: an activation has up to three tensors."""
        return 3 * self.inner + 4 * self.hidden_size

    @property
    def num_elements(self) -> int:
        """About the number of its parameters, without the last projection."""
        of_layers = self.num_layers * (4 * self.hidden_size + 2 * self.inner)
        of_patches = 3 * self.patch_size**2 + self.table_side**2
        of_squares = (2 * self.merge_size**2 + 8) * self.hidden_size
        return self.hidden_size * (of_layers + of_patches + of_squares)
