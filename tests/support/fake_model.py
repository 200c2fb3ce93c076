"""A model that is nothing but weights."""

from __future__ import annotations

from typing import Any

import torch

from shmllm.models.layers import NamedWeights
from shmllm.models.model import Model
from shmllm.models.weight_names import model_name


class FakeModel(Model):
    """
    Args:
        weights: the views of each weight, by name.

    Attributes:
        weights: as given.
    """

    def __init__(self, weights: NamedWeights) -> None:
        config: Any = None
        super().__init__(config, torch.float32)
        self.weights = weights

    def known_name(self, name: str) -> str | None:
        return model_name(name, tied=True)

    def _name_weights(self) -> NamedWeights:
        return self.weights

    def _name_module_weights(self) -> NamedWeights:
        return {}

    def values(self) -> dict[str, list[Any]]:
        """The numbers of each weight, as lists."""
        return {name: views[0].clone().tolist() for name, views in self.weights.items()}
