"""The tower of Qwen 2.5 Omni: Whisper's layers, within chunks of a sound.

transformers pads the last chunk to the length of the others and masks what is behind it. Here it is
not there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.audio.convolutions import KERNEL, convolve
from shmllm.models.audio.frames import check_frames
from shmllm.models.audio.omni_specs import Qwen2_5OmniAudioTower
from shmllm.models.audio.whisper import ENCODER, EPS, WhisperLayer, means_of_pairs
from shmllm.models.layers import Storage
from shmllm.models.sinusoids import sinusoids
from shmllm.models.tower import Tower
from shmllm.models.vision.grids import Grid


class Qwen2_5OmniAudio(Tower):
    """See `specs.Qwen2_5OmniAudioTower`."""

    unused = (f"{ENCODER}audio_bos_eos_token.",)

    def __init__(self, spec: Qwen2_5OmniAudioTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width = spec.hidden_size
        self._first = self.make_dense(f"{ENCODER}conv1", width, spec.num_mels, KERNEL)
        self._second = self.make_dense(f"{ENCODER}conv2", width, width, KERNEL)
        self._layers = [
            WhisperLayer(spec, f"{ENCODER}layers.{layer}", self) for layer in range(spec.num_layers)
        ]
        self._norm = self.make_layer_norm(f"{ENCODER}ln_post", width, EPS)
        self._project = self.make_dense(f"{ENCODER}proj", hidden_size, width)

    def __call__(self, inputs: Tensor, grid: Grid) -> Tensor:
        """Computes the embeddings of a sound.

        Args:
            inputs: [frames, num_mels].
            grid: (frames, 1, 1).
        """
        spec, frames = self._spec, grid[0]
        check_frames(inputs, frames, (frames, spec.num_mels))
        size = 2 * spec.window
        chunks = inputs[: frames // size * size].unflatten(0, (-1, size))
        parts = [*chunks.split(spec.chunks_at_once), inputs[None, frames // size * size :]]
        x = torch.cat([self._encode(part) for part in parts if part.numel()])
        return self._project(self._norm(means_of_pairs(x)))

    def _encode(self, chunks: Tensor) -> Tensor:
        """Returns what the layers compute of chunks of equal length, [chunks, frames, num_mels] ->
        [positions, width]."""
        x = F.gelu(convolve(self._first, chunks.to(self.dtype), stride=1))
        x = F.gelu(convolve(self._second, x, stride=2))
        positions = sinusoids(self._spec.window, x.shape[-1], x.device).to(self.dtype)
        x = (x + positions[: x.shape[1]]).flatten(0, 1)
        for layer in self._layers:
            x = layer(x, len(chunks))
        return x
