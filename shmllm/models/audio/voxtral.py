"""The tower of Voxtral: Whisper's encoder, and two projections of neighbouring results together.

A sound fills all positions: those behind its end are silent.
"""

from __future__ import annotations

from torch import Tensor

from shmllm.models.audio.specs import VoxtralTower
from shmllm.models.audio.whisper import PROJECTOR, WhisperEncoder
from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS
from shmllm.models.vision.grids import Grid


class Voxtral(WhisperEncoder):
    """See `specs.VoxtralTower`."""

    def __init__(self, spec: VoxtralTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(spec, storage)
        self._factor = spec.factor
        self._activation = ACTIVATIONS[spec.projector_activation]
        merged = spec.factor * spec.hidden_size
        self._up = self.make_dense(f"{PROJECTOR}linear_1", hidden_size, merged, bias=False)
        self._down = self.make_dense(f"{PROJECTOR}linear_2", hidden_size, hidden_size, bias=False)

    def __call__(self, inputs: Tensor, grid: Grid) -> Tensor:
        """See `WhisperEncoder.encode`."""
        x = self._norm(self.encode(inputs, grid))
        together = x[: len(x) // self._factor * self._factor].unflatten(0, (-1, self._factor))
        return self._down(self._activation(self._up(together.flatten(1))))
