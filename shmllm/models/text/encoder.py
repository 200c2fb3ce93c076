"""What encoders of texts have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from shmllm.models.tower import Tower
from shmllm.models.vision.grids import Grid

ENCODER = "encoder."


class Encoder(Tower):
    """The encoder of a decoder's texts, which computes several at a time.

    Attributes:
        table: [vocab, hidden], the embeddings of tokens; None: those of the decoder.
    """

    table: Tensor | None = None

    unused: tuple[str, ...] = (f"{ENCODER}embed_tokens.",)

    def __call__(self, inputs: Tensor, grid: Grid) -> Tensor:
        """See `encode`, of one text; the grid is (tokens, 1, 1)."""
        return self.encode(inputs, [len(inputs)])

    @abstractmethod
    def encode(self, inputs: Tensor, lengths: Sequence[int]) -> Tensor:
        """Computes what the decoder's layers read of texts.

        Args:
            inputs: [all tokens, hidden], the embeddings of their tokens.
            lengths: the number of tokens of each text.

        Returns:
            [all tokens, embedding_width]: for each layer its keys, then its values.
        """
