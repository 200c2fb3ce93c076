"""The form of what tells a caller which experts computed each token.

This module must not know how the numbers are collected, nor how they cross between processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

RoutedExperts = npt.NDArray[Any]
"""(tokens, layers, top_k) uint8 or uint16."""


@dataclass(frozen=True, slots=True)
class RoutedShape:
    """The experts of one token.

    Attributes:
        layers: the indices of the layers with experts.
        num_layers: the number of all layers.
        top_k: the experts of each token and layer; a layer with fewer has zeros behind them.
        num_experts: the largest number of experts of a layer.
    """

    layers: tuple[int, ...]
    num_layers: int
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest dtype that has all experts, as in vLLM."""
        return np.dtype(np.uint8 if self.num_experts <= 2**8 else np.uint16)

    @property
    def of_token(self) -> tuple[int, int]:
        """The shape of what an engine sends of one token, which leaves other layers out."""
        return len(self.layers), self.top_k

    @property
    def token_bytes(self) -> int:
        """The size of what an engine sends of one token."""
        return len(self.layers) * self.top_k * self.dtype.itemsize

    def read(self, data: bytes | bytearray) -> RoutedExperts:
        """Return the experts of the tokens that an engine sent, with zeros for other layers."""
        sent = np.frombuffer(data, self.dtype).reshape(-1, *self.of_token)
        read = np.zeros((len(sent), self.num_layers, self.top_k), self.dtype)
        read[:, self.layers] = sent
        return read

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> RoutedShape:
        """The inverse of `dataclasses.asdict`, for JSON, which makes lists of tuples."""
        return cls(**fields | {"layers": tuple(fields["layers"])})
