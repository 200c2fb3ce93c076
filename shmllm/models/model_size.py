"""How many parameters a model has. This module must not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from shmllm.models.combined_specs import FeedForwardSpec
from shmllm.models.mixer_specs import MixerSpec
from shmllm.models.stream_specs import ConnectionSpec, PerLayerSpec

MOST_PARAMETERS = 2**44
"""Ten times those of the largest models. Sizes beyond come from a damaged file, and products of
them are numbers that no tensor can have."""


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
    def connections(self) -> ConnectionSpec | None: ...
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
    if model.connections is not None:
        of_layers += model.connections.num_elements(model.hidden_size, model.num_layers)
    specs = {id(spec): spec for spec in model.towers.values()}
    of_towers: int = sum(spec.tower.num_elements for spec in specs.values())
    return rows * model.hidden_size + of_layers + of_towers


def problem_of_size(model: Sizes) -> str:
    """Returns what is wrong with a model's sizes; "" if nothing is."""
    count = num_elements(model)
    if count <= MOST_PARAMETERS:
        return ""
    return f"its sizes are those of {count:,} parameters: one of them is wrong"
