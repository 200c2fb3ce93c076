"""The encoder of Moonshine (Jeffries et al., 2024), which reads samples, and what the layers of its
decoder read of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from shmllm.formats.audio_counts import CONVOLUTIONS
from shmllm.models.audio.convolutions import convolve_windows
from shmllm.models.audio.frames import check_frames
from shmllm.models.audio.keys_specs import MoonshineTower
from shmllm.models.audio.rotation import Rotation
from shmllm.models.audio.whisper import DECODER, ENCODER, EPS, LayerNames, WhisperLayer
from shmllm.models.layer_keys import LayerKeys
from shmllm.models.layers import Storage
from shmllm.models.tower import LayerNorm, Tower
from shmllm.models.vision.grids import Grid

_NAMES = LayerNames(
    "input_layernorm", "post_attention_layernorm", "self_attn.o_proj", "mlp.fc1", "mlp.fc2"
)


class Moonshine(Tower):
    """See `keys_specs.MoonshineTower`."""

    prefixes: ClassVar[Mapping[str, str]] = MappingProxyType({"model.encoder.": ENCODER})

    def __init__(self, spec: MoonshineTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width, (first, second, third) = spec.hidden_size, CONVOLUTIONS
        self._first = self.make_dense(f"{ENCODER}conv1", width, 1, first[0], bias=False)
        self._second = self.make_dense(f"{ENCODER}conv2", 2 * width, width, second[0])
        self._third = self.make_dense(f"{ENCODER}conv3", width, 2 * width, third[0])
        self._of_first = self.make_layer_norm(f"{ENCODER}groupnorm", width, EPS)
        biases = "qkv" if spec.bias else ""
        self._layers = [
            WhisperLayer(spec, f"{ENCODER}layers.{layer}", self, biases, _NAMES, norm_bias=False)
            for layer in range(spec.num_layers)
        ]
        self._norm = self.make_layer_norm(f"{ENCODER}layer_norm", width, EPS, bias=False)
        sizes = spec.num_decoder_layers, width, spec.kv_width
        self._keys = LayerKeys(self, *sizes, _name_of_keys, biases)

    def __call__(self, inputs: Tensor, grid: Grid) -> Tensor:
        """Computes what the decoder's layers read of a sound.

        Args:
            inputs: [samples, 1].
            grid: (samples, 1, 1).

        Returns:
            [positions, embedding_width]: for each layer its keys, then its values.
        """
        spec, (first, second, third) = self._spec, CONVOLUTIONS
        check_frames(inputs, grid[0], (grid[0], 1))
        x = convolve_windows(self._first, inputs.to(self.dtype), *first).tanh()
        x = F.gelu(convolve_windows(self._second, _normed(x, self._of_first), *second))
        x = F.gelu(convolve_windows(self._third, x, *third))
        rotate = Rotation(len(x), spec.rotary_dim, spec.theta, x, interleaved=True)
        for layer in self._layers:
            x = layer(x, rotate=rotate)
        return self._keys(self._norm(x))


def _normed(x: Tensor, norm: LayerNorm) -> Tensor:
    """Returns ``x`` [n, width] with one mean and variance of all its numbers (Wu and He, 2018)."""
    normed: Tensor = F.group_norm(x.T[None], 1, norm.weight, norm.bias, norm.eps)[0].T
    return normed


def _name_of_keys(layer: int, kind: str) -> str:
    return f"{DECODER}layers.{layer}.encoder_attn.{kind}_proj"
