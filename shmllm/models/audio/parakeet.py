"""The encoder of Parakeet (Rekesh et al., "Fast Conformer", 2023), and what the layers of a decoder
read of it.

transformers pads every sound and masks what is behind it. Here it is not there, unless a model has
an embedding of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.audio.convolutions import KERNEL, convolve_columns, convolve_plane
from shmllm.models.audio.frames import check_frames
from shmllm.models.audio.parakeet_specs import ParakeetEncoder, ParakeetTower
from shmllm.models.audio.whisper import DECODER, ENCODER
from shmllm.models.layer_keys import LayerKeys
from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS, Dense, Tower, attend
from shmllm.models.vision.grids import Grid

_EPS = 1e-5
_LONGEST = 10_000.0
"""The ratio of the longest wavelength of the embeddings of distances to the shortest."""
_IN_NEMO = {
    "subsampling.layers.": "pre_encode.conv.",
    "subsampling.linear.": "pre_encode.out.",
    **{f".self_attn.{each}_proj.": f".self_attn.linear_{each}." for each in "qkv"},
    ".self_attn.o_proj.": ".self_attn.linear_out.",
    ".self_attn.relative_k_proj.": ".self_attn.linear_pos.",
    ".self_attn.bias_": ".self_attn.pos_bias_",
    ".conv.norm.": ".conv.batch_norm.",
    f"{DECODER}proj.": "model.encoder_decoder_proj.",
    f"{DECODER}layers.": "model.transf_decoder._decoder.layers.",
    ".encoder_attn.k_proj.": ".second_sub_layer.key_net.",
    ".encoder_attn.v_proj.": ".second_sub_layer.value_net.",
}
"""What NeMo, and files of its names, call the weights."""


class Parakeet(Tower):
    """See `parakeet_specs.ParakeetTower`."""

    prefixes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"model.encoder.": ENCODER, "encoder.": ENCODER}
    )

    def __init__(self, spec: ParakeetTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        width = spec.hidden_size
        self._encode = EncoderOfSounds(spec, self)
        self._project: Dense | None = None
        if spec.projected is not None:
            self._project = self.make_dense(f"{DECODER}proj", spec.projected, width)
        sizes = spec.num_decoder_layers, spec.projected or width, spec.kv_width
        biases = "kv" if spec.key_bias else ""
        self._keys = LayerKeys(self, *sizes, _name_of_keys, biases)
        if spec.in_nemo:
            self.name_in_files(_IN_NEMO)

    def __call__(self, inputs: Tensor, grid: Grid) -> Tensor:
        """Computes what the decoder's layers read of a sound.

        Args:
            inputs: [frames, num_mels].
            grid: (frames, 1, 1).

        Returns:
            [positions, embedding_width]: for each layer its keys, then its values.
        """
        x = self._encode(inputs, grid[0])
        return self._keys(x if self._project is None else self._project(x))


class EncoderOfSounds:
    """The encoder of a tower, which owns its weights."""

    def __init__(self, spec: ParakeetEncoder, tower: Tower) -> None:
        self._spec = spec
        width, channels, name = spec.hidden_size, spec.channels, f"{ENCODER}subsampling."
        self._first = tower.make_dense(f"{name}layers.0", channels, 1, KERNEL, KERNEL)
        self._halvings = [
            (
                tower.make_dense(f"{name}layers.{3 * index + 2}", channels, 1, KERNEL, KERNEL),
                tower.make_dense(f"{name}layers.{3 * index + 3}", channels, channels, 1, 1),
            )
            for index in range(spec.num_halvings - 1)
        ]
        read = channels * (spec.num_mels >> spec.num_halvings)
        self._input = tower.make_dense(f"{name}linear", width, read)
        self._layers = [
            _Layer(spec, f"{ENCODER}layers.{layer}", tower) for layer in range(spec.num_layers)
        ]

    def __call__(self, inputs: Tensor, frames: int) -> Tensor:
        """Runs it: [frames, num_mels] -> [positions, width]. Positions behind those of the frames,
        if the tower has some, are silent."""
        spec = self._spec
        check_frames(inputs, frames, (frames, spec.num_mels))
        x = inputs.to(self._first.weight.dtype)
        x = convolve_plane(self._first, x[None, None])[0].relu_()
        for columns, channels in self._halvings:
            x = _convolve_planes(columns, x)
            x = channels(x.flatten(0, 1)).view(x.shape).relu_()
        read, heard = x.transpose(1, 2).flatten(1), len(x)
        read = F.pad(read, (0, 0, 0, spec.num_embeddings(frames) - heard))
        x = self._input(read) * spec.scale
        distances = _embed_distances(x)
        for layer in self._layers:
            x = layer(x, distances, heard)
        return x


def _name_of_keys(layer: int, kind: str) -> str:
    return f"{DECODER}layers.{layer}.encoder_attn.{kind}_proj"


def _convolve_planes(dense: Dense, x: Tensor) -> Tensor:
    """Returns the convolution of each channel over frames and features that reads every other of
    both, [frames, features, channels] -> [frames / 2, features / 2, channels]."""
    rows, columns = ((size + 1) // 2 for size in x.shape[:2])
    padded = F.pad(x, (0, 0, 1, 1, 1, 1))
    assert dense.bias is not None, "these convolutions have biases"
    out = dense.bias.expand(rows, columns, -1)
    for row in range(KERNEL):
        for column in range(KERNEL):
            read = padded[row : row + 2 * rows - 1 : 2, column : column + 2 * columns - 1 : 2]
            out = out + read * dense.weight[:, 0, row, column]
    return out


def _embed_distances(x: Tensor) -> Tensor:
    """Returns the embeddings of the distances of positions, the largest first, sines and cosines of
    each wavelength side by side, [2 * positions - 1, width] (Vaswani et al., 2017, section 3.5)."""
    count, width = x.shape
    exponents = torch.arange(0, width, 2, device=x.device) / width
    places = torch.arange(count - 1, -count, -1, device=x.device)
    angles = places[:, None].float() * (1.0 / _LONGEST**exponents)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1).to(x.dtype)


class _Layer:
    """One layer: attention and a convolution between two MLPs, of which half is added."""

    def __init__(self, spec: ParakeetEncoder, prefix: str, tower: Tower) -> None:
        width = spec.hidden_size
        self._first, self._second = (
            _FeedForward(spec, f"{prefix}.feed_forward{number}", tower) for number in (1, 2)
        )
        self._attention = _Attention(spec, f"{prefix}.self_attn", tower)
        self._convolution = _Convolution(spec, f"{prefix}.conv", tower)
        self._of_first, self._of_attention, self._of_convolution, self._of_second, self._last = (
            tower.make_layer_norm(f"{prefix}.norm_{name}", width, _EPS)
            for name in ("feed_forward1", "self_att", "conv", "feed_forward2", "out")
        )

    def __call__(self, x: Tensor, distances: Tensor, heard: int) -> Tensor:
        """Runs the layer: [positions, width] -> [positions, width], of which those from `heard` on
        are silent."""
        x = x + 0.5 * self._first(self._of_first(x))
        x = x + self._attention(self._of_attention(x), distances, heard)
        x = x + self._convolution(self._of_convolution(x), heard)
        return self._last(x + 0.5 * self._second(self._of_second(x)))


class _FeedForward:
    """An MLP."""

    def __init__(self, spec: ParakeetEncoder, prefix: str, tower: Tower) -> None:
        width = spec.hidden_size
        self._activation = ACTIVATIONS[spec.activation]
        self._up = tower.make_dense(f"{prefix}.linear1", spec.inner, width, bias=spec.bias)
        self._down = tower.make_dense(f"{prefix}.linear2", width, spec.inner, bias=spec.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Runs it: [positions, width] -> [positions, width]."""
        return self._down(self._activation(self._up(x)))


class _Attention:
    """Attention to the whole sound, whose scores have a part of the query and the distance of the
    key (Dai et al., 2019, section 3.3)."""

    def __init__(self, spec: ParakeetEncoder, prefix: str, tower: Tower) -> None:
        width, self._heads = spec.hidden_size, spec.num_heads
        head_dim = width // spec.num_heads
        self._scale = head_dim**-0.5
        self._qkv = [
            tower.make_dense(f"{prefix}.{name}_proj", width, width, bias=spec.bias)
            for name in "qkv"
        ]
        self._out = tower.make_dense(f"{prefix}.o_proj", width, width, bias=spec.bias)
        self._distances = tower.make_dense(f"{prefix}.relative_k_proj", width, width, bias=False)
        self._of_keys, self._of_distances = (
            tower.tensor(f"{prefix}.bias_{name}", spec.num_heads, head_dim) for name in "uv"
        )

    def __call__(self, x: Tensor, distances: Tensor, heard: int) -> Tensor:
        """Runs it: [positions, width] -> [positions, width]. No position attends to silent ones,
        and these attend to all alike, as in transformers.

        Args:
            x: the positions.
            distances: their embeddings, the largest first, [2 * positions - 1, width].
            heard: the number of positions in front of silent ones.
        """
        count = len(x)
        q, k, v = (dense(x).view(1, count, self._heads, -1) for dense in self._qkv)
        keys = self._distances(distances).view(len(distances), self._heads, -1)
        # [heads, positions, head_dim] @ [heads, head_dim, distances]
        scores = (q[0] + self._of_distances).transpose(0, 1) @ keys.permute(1, 2, 0)
        places = torch.arange(count, device=x.device)
        of_pairs = (count - 1 - places[:, None] + places).expand(self._heads, -1, -1)
        bias = scores.gather(2, of_pairs)[None] * self._scale
        if heard < count:
            least = torch.finfo(bias.dtype).min
            bias[..., heard:], bias[..., heard:, :] = least, least
        return self._out(attend(q + self._of_keys, k, v, bias=bias).reshape(x.shape))


class _Convolution:
    """A gate, a convolution of each column over positions, a norm by fixed numbers, and a
    projection."""

    def __init__(self, spec: ParakeetEncoder, prefix: str, tower: Tower) -> None:
        width, has_bias = spec.hidden_size, spec.convolution_bias
        self._activation = ACTIVATIONS[spec.activation]
        self._up = tower.make_dense(f"{prefix}.pointwise_conv1", 2 * width, width, 1, bias=has_bias)
        self._columns = tower.make_dense(
            f"{prefix}.depthwise_conv", width, 1, spec.kernel, bias=has_bias
        )
        self._fixed = tower.make_fixed_norm(f"{prefix}.norm", width, _EPS)
        self._down = tower.make_dense(f"{prefix}.pointwise_conv2", width, width, 1, bias=has_bias)

    def __call__(self, x: Tensor, heard: int) -> Tensor:
        """Runs it: [positions, width] -> [positions, width], of which those from `heard` on are
        silent."""
        around = self._columns.weight.shape[-1] // 2
        gated = F.pad(F.glu(self._up(x), -1)[:heard], (0, 0, around, around + len(x) - heard))
        mixed = convolve_columns(gated, self._columns.weight)
        if self._columns.bias is not None:
            mixed = mixed + self._columns.bias
        return self._down(self._activation(self._fixed(mixed)))
