"""The tower of Omnilingual ASR: the encoder of wav2vec 2.0 (Baevski et al., 2020), which reads
samples."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.audio.convolutions import convolve_windows
from shmllm.models.audio.frames import check_frames
from shmllm.models.audio.omniasr_specs import OmniAsrTower
from shmllm.models.audio.whisper import ENCODER, EPS, PROJECTOR, LayerNames, WhisperLayer
from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS, Dense, Tower
from shmllm.models.vision.grids import Grid

_NAMES = LayerNames(
    "layer_norm",
    "final_layer_norm",
    "attention.out_proj",
    "feed_forward.intermediate_dense",
    "feed_forward.output_dense",
    "attention",
)


class OmniAsr(Tower):
    """See `omniasr_specs.OmniAsrTower`."""

    def __init__(self, spec: OmniAsrTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec, self._activation = spec, ACTIVATIONS[spec.activation]
        width, name, bias = spec.hidden_size, f"{ENCODER}subsampling.", spec.convolution_bias
        self._convolutions, inputs = [], 1
        for index, outputs in enumerate(spec.channels):
            own, length = f"{name}conv_layers.{index}.", spec.convolutions[index][0]
            self._convolutions.append(
                (
                    self.make_dense(f"{own}conv", outputs, inputs, length, bias=bias),
                    self.make_layer_norm(f"{own}layer_norm", outputs, EPS),
                )
            )
            inputs = outputs
        self._before = self.make_layer_norm(f"{name}layer_norm", inputs, EPS)
        self._input = self.make_dense(f"{name}projection", width, inputs)
        self._positions = self._make_grouped(f"{ENCODER}encode_positions.conv")
        self._layers = [
            WhisperLayer(spec, f"{ENCODER}layers.{layer}", self, "qkvo", _NAMES)
            for layer in range(spec.num_layers)
        ]
        self._norm = self.make_layer_norm(f"{ENCODER}layer_norm", width, EPS)
        self._project = self.make_dense(PROJECTOR.removesuffix("."), hidden_size, width)

    def _make_grouped(self, name: str) -> list[Dense]:
        """Allocates a convolution, and returns the product of each group of columns."""
        width, groups = self._spec.hidden_size, self._spec.groups
        weight = self.tensor(f"{name}.weight", width, width // groups, self._spec.kernel)
        parts = zip(
            weight.chunk(groups), self.tensor(f"{name}.bias", width).chunk(groups), strict=True
        )
        return [Dense(rows, bias, self.products) for rows, bias in parts]

    def __call__(self, inputs: Tensor, grid: Grid) -> Tensor:
        """Computes the embeddings of a sound.

        Args:
            inputs: [samples, 1].
            grid: (samples, 1, 1).
        """
        check_frames(inputs, grid[0], (grid[0], 1))
        x = inputs.to(self.dtype)
        for (dense, norm), sizes in zip(self._convolutions, self._spec.convolutions, strict=True):
            x = self._activation(norm(convolve_windows(dense, x, *sizes)))
        x = self._input(self._before(x))
        x = x + self._activation(self._around(x))
        for layer in self._layers:
            x = layer(x)
        return self._project(self._norm(x))

    def _around(self, x: Tensor) -> Tensor:
        """The convolution over positions, each of which reads half of its length before it."""
        kernel = self._spec.kernel
        padded = F.pad(x, (0, 0, kernel // 2, kernel // 2 - 1))
        parts = padded.chunk(self._spec.groups, 1)
        convolved = zip(self._positions, parts, strict=True)
        return torch.cat([convolve_windows(dense, part, kernel, 1) for dense, part in convolved], 1)
