"""Which experts compute each token, as operations pass it on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts compute each token.

    Attributes:
        ids: [tokens, top_k], in ascending order.
        weights: [tokens, top_k], the factors of their outputs, or of their inputs.
        shared_gates: [tokens], before the sigmoid that makes a factor of the shared expert's
            output of them; None: the factor is 1.
    """

    ids: Tensor
    weights: Tensor
    shared_gates: Tensor | None
