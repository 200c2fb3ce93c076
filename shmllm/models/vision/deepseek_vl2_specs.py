"""What the tower of DeepSeek-VL2 is. This module must not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.models.vision.encoder_spec import EncoderSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekVL2Tower:
    """An encoder, and projections of squares of its results; where a square reaches beyond the last
    row or column, it has zeros. An embedding of its own ends each row of the whole image, and of
    the picture that tiles make up; another one is between both.

    The grid is (tiles, rows, columns); the whole image is the first tile, before rows * columns.

    Attributes:
        encoder: the encoder.
        factor: the number of rows and of columns of patches in a square.
        depth: the number of projections.
        inner: the width of the results of all but the last one.
    """

    encoder: EncoderSpec
    factor: int
    depth: int
    inner: int

    @property
    def side(self) -> int:
        """The number of embeddings in a row of a tile."""
        return -(-self.encoder.side // self.factor)

    def num_embeddings(self, grid: tuple[int, int, int]) -> int:
        """Returns how many embeddings an image has; 0: there is no such grid."""
        tiles, rows, columns = grid
        if rows < 1 or columns < 1 or tiles != 1 + rows * columns:
            return 0
        return self.side * (self.side + 1 + rows * (self.side * columns + 1)) + 1

    @property
    def num_elements(self) -> int:
        of_first = self.factor**2 * self.encoder.hidden_size * self.inner
        return self.encoder.num_elements + of_first + (self.depth - 1) * self.inner**2
