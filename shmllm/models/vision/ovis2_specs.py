"""What the tower of Ovis 2 is. See `specs.py`; this module must not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from shmllm.models.vision.encoder_spec import EncoderSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class VisualWordsSpec(EncoderSpec):
    """An encoder behind which squares of patches have a probability for each of many words.

    Attributes:
        num_words: the number of words.
        factor: the side of a square, which divides that of a tile.
    """

    num_words: int
    factor: int

    @property
    def num_squares(self) -> int:
        """The number of squares of a tile."""
        return (self.side // self.factor) ** 2

    @property
    def num_elements(self) -> int:
        encoder = super(VisualWordsSpec, self).num_elements
        return encoder + 2 * self.num_words * self.hidden_size * self.factor**2

    @property
    def most_activations(self) -> int:
        """See `EncoderSpec.most_activations`, or three numbers of each word for each square."""
        encoder = super(VisualWordsSpec, self).most_activations
        return max(encoder, 3 * self.num_words * self.num_squares // self.side**2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ovis2Tower:
    """An encoder with RMSNorms and gates, and for each square of its results the mean of the
    embeddings of a table's words by their probabilities. Further words of it mark where an image
    begins and ends, and what is between tiles.

    The grid is (tiles, rows, columns); the whole image is the first tile, or the only one: (1, 1,
    1).

    Attributes:
        encoder: the encoder.
        qkv_bias: whether the projections of attention have biases.
        mlp_bias: whether those of the MLPs have.
    """

    encoder: VisualWordsSpec
    qkv_bias: bool
    mlp_bias: bool

    def num_embeddings(self, grid: tuple[int, int, int]) -> int:
        """Returns how many embeddings an image has, with those of marks; 0: there is none."""
        tiles, rows, columns = grid
        if tiles != rows * columns + (rows * columns > 1):
            return 0
        return tiles * self.encoder.num_squares + 2 + rows * columns

    @property
    def num_elements(self) -> int:
        return self.encoder.num_elements
