"""The form of what tells a caller which experts computed each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RoutedInfo:
    """The experts of one token, as an engine sends them: of each layer with experts their numbers,
    uint8 or uint16.

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
    def item_bytes(self) -> int:
        """The size of a number: the smallest that has all experts, as in vLLM."""
        return 1 if self.num_experts <= 2**8 else 2

    @property
    def shape(self) -> tuple[int, int]:
        """(layers with experts, top_k)"""
        return len(self.layers), self.top_k

    @property
    def token_bytes(self) -> int:
        """The size of the numbers of one token."""
        return len(self.layers) * self.top_k * self.item_bytes

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> RoutedInfo:
        """The inverse of `dataclasses.asdict`, for JSON, which makes lists of tuples."""
        return cls(**fields | {"layers": tuple(fields["layers"])})
