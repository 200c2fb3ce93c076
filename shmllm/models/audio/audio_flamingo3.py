"""The tower of Audio Flamingo 3: Whisper's encoder, means of pairs of its results, and two
projections."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.audio.specs import AudioFlamingoTower
from shmllm.models.audio.whisper import PROJECTOR, WhisperEncoder, means_of_pairs
from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS
from shmllm.models.vision.grids import Grid


class AudioFlamingo(WhisperEncoder):
    """See `specs.AudioFlamingoTower`."""

    def __init__(self, spec: AudioFlamingoTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(spec, storage)
        self._activation = ACTIVATIONS[spec.projector_activation]
        width, bias = spec.hidden_size, spec.projector_bias
        self._up = self.make_dense(f"{PROJECTOR}linear_1", hidden_size, width, bias=bias)
        self._down = self.make_dense(f"{PROJECTOR}linear_2", hidden_size, hidden_size, bias=bias)

    def __call__(self, inputs: Tensor, grid: Grid) -> Tensor:
        """See `WhisperEncoder.encode`."""
        pairs = self._norm(means_of_pairs(self.encode(inputs, grid)))
        return self._down(self._activation(self._up(self.prepare(pairs, grid))))

    def prepare(self, x: Tensor, grid: Grid) -> Tensor:
        """Returns what the projections read of the encoder's results ``x`` [n, width]."""
        return x
