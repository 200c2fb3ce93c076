"""What Gemma 4 12B has in place of a tower for sounds: a norm and a projection of samples."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.audio.frames import check_frames
from shmllm.models.audio.specs import SamplesTower
from shmllm.models.layers import Storage
from shmllm.models.tower import RMSNorm, Tower
from shmllm.models.vision.grids import Grid


class Samples(Tower):
    """See `specs.SamplesTower`."""

    def __init__(self, spec: SamplesTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._width, self._norm = spec.num_mels, RMSNorm(None, spec.eps)
        self._projection = self.make_dense(
            "embed_audio.embedding_projection", hidden_size, spec.num_mels, bias=False
        )

    def __call__(self, inputs: Tensor, grid: Grid) -> Tensor:
        """
        Args:
            inputs: [frames, samples].
            grid: (frames, 1, 1).
        """
        check_frames(inputs, grid[0], (grid[0], self._width))
        return self._projection(self._norm(inputs.to(self.dtype)))
