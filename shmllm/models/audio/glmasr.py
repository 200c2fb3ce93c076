"""The tower of GLM-ASR: Whisper's encoder with rotations, and two projections of neighbouring
results together.

The encoder of transformers has no mask: a sound reads the silence behind it, as far as the longest
one goes.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from shmllm.models.audio.convolutions import KERNEL, convolve
from shmllm.models.audio.frames import check_frames
from shmllm.models.audio.rotation import Rotation
from shmllm.models.audio.specs import GlmAsrTower
from shmllm.models.audio.whisper import ENCODER, EPS, PROJECTOR, LayerNames, WhisperLayer
from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS, Tower
from shmllm.models.vision.grids import Grid

_NAMES = LayerNames(
    "input_layernorm", "post_attention_layernorm", "self_attn.o_proj", "mlp.fc1", "mlp.fc2"
)


class GlmAsr(Tower):
    """See `specs.GlmAsrTower`."""

    def __init__(self, spec: GlmAsrTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width = spec.hidden_size
        self._first = self.make_dense(f"{ENCODER}conv1", width, spec.num_mels, KERNEL)
        self._second = self.make_dense(f"{ENCODER}conv2", width, width, KERNEL)
        self._layers = [
            WhisperLayer(spec, f"{ENCODER}layers.{layer}", self, names=_NAMES)
            for layer in range(spec.num_layers)
        ]
        self._norm = self.make_layer_norm(f"{ENCODER}norm", width, EPS)
        self._activation = ACTIVATIONS[spec.projector_activation]
        merged, between = spec.factor * width, 2 * hidden_size
        self._up = self.make_dense(f"{PROJECTOR}linear_1", between, merged)
        self._down = self.make_dense(f"{PROJECTOR}linear_2", hidden_size, between)

    def __call__(self, inputs: Tensor, grid: Grid) -> Tensor:
        """Computes the embeddings of a sound.

        Args:
            inputs: [most_frames, num_mels]: those of the sound, and of silence.
            grid: (frames of the sound, 1, 1).
        """
        spec, frames = self._spec, grid[0]
        check_frames(inputs, frames, (spec.most_frames, spec.num_mels))
        x = F.gelu(convolve(self._first, inputs.to(self.dtype), stride=1))
        x = F.gelu(convolve(self._second, x, stride=2))
        rotate = Rotation(len(x), spec.rotary_dim, spec.theta, x)
        for layer in self._layers:
            x = layer(x, rotate=rotate)
        count = spec.num_embeddings(frames)
        together = self._norm(x[: count * spec.factor]).view(count, -1)
        return self._down(self._activation(self._up(together)))
