"""The tower of Fun-ASR-Nano: the encoder of SenseVoice, and layers behind two projections."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from shmllm.models.audio.conformer_specs import FunAsrTower, SanmLayers
from shmllm.models.audio.convolutions import convolve_columns
from shmllm.models.audio.frames import check_frames
from shmllm.models.audio.whisper import ENCODER, PROJECTOR
from shmllm.models.layers import Storage
from shmllm.models.sinusoids import sinusoids
from shmllm.models.tower import ACTIVATIONS, Tower, attend
from shmllm.models.vision.grids import Grid


class FunAsr(Tower):
    """See `conformer_specs.FunAsrTower`."""

    def __init__(self, spec: FunAsrTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width, between = spec.encoder.hidden_size, spec.projector_width
        self._layers = [
            _Layer(
                spec.encoder,
                f"{ENCODER}layers.{layer}",
                self,
                inputs=width if layer else spec.num_mels,
                kernel=spec.kernel,
                has_norm=layer in spec.normed,
            )
            for layer in range(spec.encoder.num_layers)
        ]
        self._activation = ACTIVATIONS[spec.projector_activation]
        self._up = self.make_dense(f"{PROJECTOR}linear_1", between, width)
        self._down = self.make_dense(f"{PROJECTOR}linear_2", hidden_size, between)
        self._adaptor = [
            _Layer(spec.adaptor, f"{PROJECTOR}layers.{layer}", self, inputs=hidden_size)
            for layer in range(spec.adaptor.num_layers)
        ]

    def __call__(self, inputs: Tensor, grid: Grid) -> Tensor:
        """Computes the embeddings of a sound.

        Args:
            inputs: [frames, num_mels].
            grid: (frames, 1, 1).
        """
        spec, frames = self._spec, grid[0]
        check_frames(inputs, frames, (frames, spec.num_mels))
        positions = sinusoids(frames + 1, spec.num_mels, inputs.device)[1:]
        x = inputs.to(self.dtype) * spec.encoder.hidden_size**0.5 + positions.to(self.dtype)
        for layer in self._layers:
            x = layer(x)
        x = self._down(self._activation(self._up(x)))
        for layer in self._adaptor:
            x = layer(x)
        return x


class _Layer:
    """One layer. What it reads is added to its attention only if that has the same width.

    Args:
        spec: what the layers compute.
        prefix: of the weights' names.
        tower: owns the weights.
        inputs: the width of what it reads.
        kernel: the length of the convolution of values; 0: there is none.
        has_norm: whether its results are normalised.
    """

    def __init__(
        self,
        spec: SanmLayers,
        prefix: str,
        tower: Tower,
        *,
        inputs: int,
        kernel: int = 0,
        has_norm: bool = False,
    ) -> None:
        width, self._heads = spec.hidden_size, spec.num_heads
        self._adds, self._activation = inputs == width, ACTIVATIONS[spec.activation]
        self._before = tower.make_layer_norm(f"{prefix}.input_layernorm", inputs, spec.eps)
        self._behind = tower.make_layer_norm(f"{prefix}.post_attention_layernorm", width, spec.eps)
        self._last = (
            tower.make_layer_norm(f"{prefix}.final_layernorm", width, spec.eps)
            if has_norm
            else None
        )
        self._qkv = [
            tower.make_dense(f"{prefix}.self_attn.{name}_proj", width, inputs) for name in "qkv"
        ]
        self._out = tower.make_dense(f"{prefix}.self_attn.o_proj", width, width)
        self._kernel = (
            tower.tensor(f"{prefix}.self_attn.fsmn.conv.weight", width, 1, kernel)
            if kernel
            else None
        )
        self._up = tower.make_dense(f"{prefix}.mlp.fc1", spec.inner, width)
        self._down = tower.make_dense(f"{prefix}.mlp.fc2", width, spec.inner)

    def __call__(self, x: Tensor) -> Tensor:
        """Runs the layer: [frames, inputs] -> [frames, width]."""
        read = self._attend(self._before(x))
        x = x + read if self._adds else read
        x = x + self._down(self._activation(self._up(self._behind(x))))
        return x if self._last is None else self._last(x)

    def _attend(self, normed: Tensor) -> Tensor:
        q, k, v = (dense(normed) for dense in self._qkv)
        shape = 1, len(q), self._heads, -1
        attended = attend(q.view(shape), k.view(shape), v.view(shape))
        read: Tensor = self._out(attended[0].flatten(1))
        if self._kernel is None:
            return read
        size = self._kernel.shape[-1]
        padded = F.pad(v, (0, 0, (size - 1) // 2, size // 2))
        return read + (convolve_columns(padded, self._kernel) + v)
