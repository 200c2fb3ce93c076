"""The tower of MOSS-Transcribe-Diarize: Whisper's encoder, two projections of neighbouring results
together, and a norm.

The encoder of transformers has no mask: a sound reads the silence behind it, as far as the longest
one goes.
"""

from __future__ import annotations

from torch import Tensor

from shmllm.models.audio.specs import MossTower
from shmllm.models.audio.whisper import PROJECTOR, WhisperEncoder
from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS
from shmllm.models.vision.grids import Grid


class Moss(WhisperEncoder):
    """See `specs.MossTower`."""

    def __init__(self, spec: MossTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(spec, storage)
        self._whole = spec.most_frames, 1, 1
        self._factor, self._count = spec.factor, spec.num_embeddings
        self._activation = ACTIVATIONS[spec.projector_activation]
        merged, bias = spec.factor * spec.hidden_size, spec.projector_bias
        self._up = self.make_dense(f"{PROJECTOR}linear_1", hidden_size, merged, bias=bias)
        self._down = self.make_dense(f"{PROJECTOR}linear_2", hidden_size, hidden_size, bias=bias)
        self._last = self.make_layer_norm(f"{PROJECTOR}norm", hidden_size, spec.eps)

    def __call__(self, inputs: Tensor, grid: Grid) -> Tensor:
        """Computes the embeddings of a sound.

        Args:
            inputs: [most_frames, num_mels]: those of the sound, and of silence.
            grid: (frames of the sound, 1, 1).
        """
        count = self._count(grid[0])
        x = self._norm(self.encode(inputs, self._whole)[: count * self._factor])
        return self._last(self._down(self._activation(self._up(x.view(count, -1)))))
