"""How many parameters a model has. This module must not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from shmllm.models.mixer_specs import MixerSpec
from shmllm.models.specs import FeedForwardSpec
from shmllm.models.stream_specs import PerLayerSpec


class Sizes(Protocol):
    """What of a `ModelConfig` decides on its size."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_learned_positions(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_streams(self) -> int: ...
    @property
    def mixers(self) -> tuple[MixerSpec, ...]: ...
    @property
    def feed_forwards(self) -> tuple[FeedForwardSpec, ...]: ...
    @property
    def per_layer(self) -> PerLayerSpec | None: ...
    @property
    def towers(self) -> Mapping[str, Any]: ...


def num_elements(model: Sizes) -> int:
    """Returns about the number of parameters."""
    rows = model.vocab_size + model.num_learned_positions
    rows += sum(sum(mixer.linear_widths) + mixer.width for mixer in model.mixers)
    rows += 2 * (model.num_streams - 1) * model.hidden_size
    of_layers = sum(mlp.num_elements(model.hidden_size) for mlp in model.feed_forwards)
    if model.per_layer is not None:
        of_layers += model.per_layer.vocab_size * model.per_layer.width * model.num_layers
    specs = {id(spec): spec for spec in model.towers.values()}
    of_towers: int = sum(spec.tower.num_elements for spec in specs.values())
    return rows * model.hidden_size + of_layers + of_towers
