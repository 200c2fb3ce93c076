"""Several texts that an encoder reads at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Texts:
    """What of a layer is computed for all tokens together, and what for each text by itself: what
    torch computes of some rows may depend on their number.

    Args:
        lengths: the number of tokens of each text.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    def each(self, function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """Returns the rows that a function computes of each text's part of others.

        Args:
            function: returns [tokens, ...] of the parts, which are in its order of `rows`.
            rows: [all tokens, ...].
        """
        if len(self.lengths) == 1:
            return function(*rows)
        parts = zip(*(each.split(self.lengths) for each in rows), strict=True)
        return torch.cat([function(*part) for part in parts])
