"""The tower of Qwen 3 Omni and Qwen 3 ASR: convolutions within chunks of a sound, and Whisper's
layers within several chunks.

transformers pads the last chunk to the length of the others, and so does this tower, as the
convolutions read what is behind it; of a sound that is one chunk nothing is behind it in Omni.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.audio.convolutions import KERNEL, convolve_plane
from shmllm.models.audio.frames import check_frames
from shmllm.models.audio.omni_specs import Qwen3OmniAudioTower
from shmllm.models.audio.specs import num_convolved
from shmllm.models.audio.whisper import ENCODER, EPS, PROJECTOR, WhisperLayer
from shmllm.models.layers import Storage
from shmllm.models.sinusoids import sinusoids
from shmllm.models.tower import ACTIVATIONS, Tower
from shmllm.models.vision.grids import Grid


class Qwen3OmniAudio(Tower):
    """See `specs.Qwen3OmniAudioTower`."""

    def __init__(self, spec: Qwen3OmniAudioTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width, channels = spec.hidden_size, spec.channels
        self._convolutions = [
            self.make_dense(f"{ENCODER}conv2d{number}", channels, inputs, KERNEL, KERNEL)
            for number, inputs in ((1, 1), (2, channels), (3, channels))
        ]
        self._input = self.make_dense(
            f"{ENCODER}conv_out", width, channels * num_convolved(spec.num_mels), bias=False
        )
        self._layers = [
            WhisperLayer(spec, f"{ENCODER}layers.{layer}", self, biases="qkvo")
            for layer in range(spec.num_layers)
        ]
        self._norm = self.make_layer_norm(f"{ENCODER}ln_post", width, EPS)
        names = [f"{ENCODER}proj1", f"{ENCODER}proj2"]
        if spec.has_projector:
            names = [f"{PROJECTOR}linear_1", f"{PROJECTOR}linear_2"]
        self._up = self.make_dense(names[0], width, width)
        self._activation = ACTIVATIONS[spec.activation]
        self._down = self.make_dense(names[1], hidden_size, width)

    def __call__(self, inputs: Tensor, grid: Grid) -> Tensor:
        """Computes the embeddings of a sound.

        Args:
            inputs: [frames, num_mels].
            grid: (frames, 1, 1).
        """
        spec, frames = self._spec, grid[0]
        check_frames(inputs, frames, (frames, spec.num_mels))
        size = spec.chunk if spec.fills else min(frames, spec.chunk)
        parts = inputs.split(size * spec.chunks_together)
        x = torch.cat([self._encode(part, size) for part in parts])
        return self._down(self._activation(self._up(self._norm(x))))

    def _encode(self, part: Tensor, size: int) -> Tensor:
        """Returns what the layers compute of frames that attend to one another, [frames, num_mels]
        -> [positions, width].

        Args:
            part: the frames.
            size: those of a chunk.
        """
        spec, frames = self._spec, len(part)
        padded = F.pad(part.to(self.dtype), (0, 0, 0, -frames % size))
        x = padded.view(-1, size, spec.num_mels).transpose(1, 2)[:, None]
        for convolution in self._convolutions:
            x = F.gelu(convolve_plane(convolution, x)).permute(0, 3, 1, 2)
        rows = x.permute(0, 3, 1, 2).flatten(2)  # [chunks, positions, channels * features]
        positions = sinusoids(rows.shape[1], spec.hidden_size, x.device).to(self.dtype)
        x = self._input(rows.flatten(0, 1)).view(*rows.shape[:2], -1) + positions
        whole, rest = divmod(frames, size)
        x = x.flatten(0, 1)[: whole * rows.shape[1] + num_convolved(rest)]
        for layer in self._layers:
            x = layer(x)
        return x
