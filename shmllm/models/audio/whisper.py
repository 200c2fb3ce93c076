"""Whisper's encoder (Radford et al., 2022): the tower of Qwen 2 Audio, and of Whisper itself.
Towers of others have its layers.

transformers pads every sound to the longest one and masks what is behind it. Here it is not there:
the results are those of the positions that are not masked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.audio.convolutions import KERNEL, convolve
from shmllm.models.audio.frames import check_frames
from shmllm.models.audio.specs import KeysTower, WhisperTower, num_positions
from shmllm.models.layer_keys import LayerKeys
from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS, Tower, attend
from shmllm.models.vision.encoder_spec import LayerSizes
from shmllm.models.vision.grids import Grid

ENCODER, PROJECTOR, DECODER = "audio_tower.", "multi_modal_projector.", "model.decoder."
EPS = 1e-5


class LayerNames(NamedTuple):
    """What the weights of a layer are called: the norms before attention and MLP, the last
    projections of both, and what has the other projections of attention."""

    before_attention: str
    before_mlp: str
    out: str
    up: str
    down: str
    attention: str = "self_attn"


OF_WHISPER = LayerNames(
    "self_attn_layer_norm", "final_layer_norm", "self_attn.out_proj", "fc1", "fc2"
)


class WhisperEncoder(Tower):
    """The encoder, without what becomes of its results. See `specs.WhisperTower`."""

    def __init__(self, spec: WhisperTower, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width = spec.hidden_size
        self._first = self.make_dense(f"{ENCODER}conv1", width, spec.num_mels, KERNEL)
        self._second = self.make_dense(f"{ENCODER}conv2", width, width, KERNEL)
        self._positions = self.tensor(f"{ENCODER}embed_positions.weight", spec.num_positions, width)
        self._layers = [
            WhisperLayer(spec, f"{ENCODER}layers.{layer}", self) for layer in range(spec.num_layers)
        ]
        self._norm = self.make_layer_norm(f"{ENCODER}layer_norm", width, EPS)

    def encode(self, inputs: Tensor, grid: Grid) -> Tensor:
        """Returns what the layers compute of a sound, [positions, hidden_size].

        Args:
            inputs: [frames, num_mels]: those of the sound and FRAMES_BEHIND behind it, as far as
                the longest sound has so many.
            grid: (frames of the sound, 1, 1).
        """
        spec, frames = self._spec, grid[0]
        check_frames(inputs, frames, (spec.num_inputs(frames), spec.num_mels))
        count = num_positions(frames)
        x = F.gelu(convolve(self._first, inputs.to(self.dtype), stride=1))
        x = F.gelu(convolve(self._second, x, stride=2)[:count])
        x = x + self._positions[:count]
        for layer in self._layers:
            x = layer(x)
        return x


class Whisper(WhisperEncoder):
    """The tower of Qwen 2 Audio: means of pairs of the encoder's results, a norm and a
    projection."""

    def __init__(self, spec: WhisperTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(spec, storage)
        self._project = self.make_dense(f"{PROJECTOR}linear", hidden_size, spec.hidden_size)

    def __call__(self, inputs: Tensor, grid: Grid) -> Tensor:
        """See `WhisperEncoder.encode`."""
        return self._project(self._norm(means_of_pairs(self.encode(inputs, grid))))


class WhisperKeys(WhisperEncoder):
    """What the layers of a decoder attend to: keys and values of the encoder's results. See
    `specs.KeysTower`."""

    prefixes: ClassVar[Mapping[str, str]] = MappingProxyType({"model.encoder.": ENCODER})

    def __init__(self, spec: KeysTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(spec, storage)
        sizes = spec.num_decoder_layers, spec.hidden_size, spec.kv_width
        self._keys = LayerKeys(self, *sizes, _name_of_projection, biases="v")

    def __call__(self, inputs: Tensor, grid: Grid) -> Tensor:
        """See `WhisperEncoder.encode`.

        Returns:
            [positions, embedding_width]: for each layer its keys, then its values.
        """
        return self._keys(self._norm(self.encode(inputs, grid)))


def _name_of_projection(layer: int, name: str) -> str:
    return f"{DECODER}layers.{layer}.encoder_attn.{name}_proj"


class WhisperLayer:
    """One layer: attention and an MLP, each behind a norm.

    Args:
        spec: what the tower computes.
        prefix: of the weights' names, such as "audio_tower.layers.0".
        tower: owns the weights.
        biases: which projections have biases: to queries, keys, values, and the last one ("o").
        names: of its weights.
        norm_bias: whether its norms have biases.
    """

    def __init__(
        self,
        spec: LayerSizes,
        prefix: str,
        tower: Tower,
        biases: str = "qvo",
        names: LayerNames = OF_WHISPER,
        norm_bias: bool = True,
    ) -> None:
        width = spec.hidden_size
        self._heads, self._activation = spec.num_heads, ACTIVATIONS[spec.activation]
        self._norms = [
            tower.make_layer_norm(f"{prefix}.{name}", width, EPS, norm_bias)
            for name in (names.before_attention, names.before_mlp)
        ]
        self._qkv = [
            tower.make_dense(
                f"{prefix}.{names.attention}.{name}_proj", width, width, bias=name in biases
            )
            for name in "qkv"
        ]
        self._out = tower.make_dense(f"{prefix}.{names.out}", width, width, bias="o" in biases)
        self._up = tower.make_dense(f"{prefix}.{names.up}", spec.inner, width)
        self._down = tower.make_dense(f"{prefix}.{names.down}", width, spec.inner)

    def __call__(
        self, x: Tensor, num_parts: int = 1, rotate: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Runs the layer: [positions, width] -> [positions, width].

        Args:
            x: the positions.
            num_parts: positions attend within so many parts of equal length.
            rotate: what becomes of queries and keys, [parts, places, heads, head_dim].
        """
        normed, places = self._norms[0](x), len(x) // num_parts
        q, k, v = (dense(normed).view(num_parts, places, self._heads, -1) for dense in self._qkv)
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        x = x + self._out(attend(q, k, v).reshape(x.shape))
        x = x + self._down(self._activation(self._up(self._norms[1](x))))
        if x.dtype == torch.float16:  # large activations of some checkpoints
            largest = torch.finfo(x.dtype).max - 1000
            x = x.clamp(-largest, largest)
        return x


def means_of_pairs(x: Tensor) -> Tensor:
    """Returns the means of neighbouring rows, [n, width] -> [n / 2, width]; of an odd number the
    last one has none."""
    means: Tensor = x[: len(x) // 2 * 2].unflatten(0, (-1, 2)).mean(1)
    return means
