"""The tower of Granite Speech: a conformer (Gulati et al., 2020) and a Q-Former.

transformers pads the last block of frames and masks what is behind it. Here it is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.audio.conformer_specs import GraniteSpeechTower
from shmllm.models.audio.convolutions import convolve_columns
from shmllm.models.audio.frames import check_frames
from shmllm.models.audio.qformer import QFormerProjector
from shmllm.models.audio.whisper import ENCODER
from shmllm.models.layers import Storage
from shmllm.models.tower import Tower, attend
from shmllm.models.vision.grids import Grid

EPS = 1e-5
_ROWS_AT_ONCE = 1024
"""How many frames MLPs and convolutions compute at a time, whose results are wide."""
_BLOCKS_AT_ONCE = 8


class GraniteSpeech(Tower):
    """See `conformer_specs.GraniteSpeechTower`."""

    prefixes = MappingProxyType({"model.encoder.": ENCODER, "encoder.": ENCODER})

    def __init__(self, spec: GraniteSpeechTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width = spec.hidden_size
        self._input = self.make_dense(f"{ENCODER}input_linear", width, spec.num_mels)
        self._layers = [
            _Layer(spec, f"{ENCODER}layers.{layer}", self) for layer in range(spec.num_layers)
        ]
        self._classify = self.make_dense(f"{ENCODER}out", spec.num_classes, width)
        self._add_classes = self.make_dense(f"{ENCODER}out_mid", width, spec.num_classes)
        self._project = QFormerProjector(spec.projector, spec.read_width, hidden_size, self)

    def __call__(self, inputs: Tensor, grid: Grid) -> Tensor:
        """Computes the embeddings of a sound.

        Args:
            inputs: [frames, num_mels].
            grid: (frames, 1, 1).
        """
        spec, frames = self._spec, grid[0]
        check_frames(inputs, frames, (frames, spec.num_mels))
        x = self._input(inputs.to(self.dtype))
        collected = [x] * (0 in spec.collected)
        for number, layer in enumerate(self._layers, 1):
            x = layer(x)
            if number == spec.num_layers // 2:
                x = x + self._add_classes(self._classify(x).softmax(-1))
            if number in spec.collected:
                collected.append(x)
        return self._project(torch.cat([*collected, x], 1))


class _Layer:
    """One layer: attention and a convolution between two MLPs, of which half is added."""

    def __init__(self, spec: GraniteSpeechTower, prefix: str, tower: Tower) -> None:
        self._first, self._second = (
            _FeedForward(spec, f"{prefix}.ff{number}", tower) for number in (1, 2)
        )
        self._attention = _Attention(spec, f"{prefix}.attn", tower)
        self._convolution = _Convolution(spec, f"{prefix}.conv", tower)
        self._norm = tower.make_layer_norm(f"{prefix}.post_norm", spec.hidden_size, EPS)

    def __call__(self, x: Tensor) -> Tensor:
        """Runs the layer: [frames, width] -> [frames, width]."""
        x = x + 0.5 * _in_pieces(self._first, x)
        x = x + self._attention(x)
        x = x + self._convolution(x)
        x = x + 0.5 * _in_pieces(self._second, x)
        return self._norm(x)


def _in_pieces(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Returns what is computed of each row, for some rows at a time."""
    return torch.cat([compute(piece) for piece in x.split(_ROWS_AT_ONCE)])


class _FeedForward:
    """An MLP behind a norm."""

    def __init__(self, spec: GraniteSpeechTower, prefix: str, tower: Tower) -> None:
        width = spec.hidden_size
        self._norm = tower.make_layer_norm(f"{prefix}.pre_norm", width, EPS)
        self._up = tower.make_dense(f"{prefix}.up_proj", spec.inner, width)
        self._down = tower.make_dense(f"{prefix}.down_proj", width, spec.inner)

    def __call__(self, x: Tensor) -> Tensor:
        """Runs it: [frames, width] -> [frames, width]."""
        return self._down(F.silu(self._up(self._norm(x))))


class _Attention:
    """Attention within blocks, whose scores have a part of the query and the distance of the
    key."""

    def __init__(self, spec: GraniteSpeechTower, prefix: str, tower: Tower) -> None:
        self._spec = spec
        width, inner = spec.hidden_size, spec.num_heads * spec.head_dim
        self._norm = tower.make_layer_norm(f"{prefix}.pre_norm", width, EPS)
        self._q = tower.make_dense(f"{prefix}.to_q", inner, width, bias=False)
        self._kv = tower.make_dense(f"{prefix}.to_kv", 2 * inner, width, bias=False)
        self._out = tower.make_dense(f"{prefix}.to_out", width, inner)
        self._distances = tower.tensor(
            f"{prefix}.rel_pos_emb.weight", 2 * spec.most_distance + 1, spec.head_dim
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Runs it: [frames, width] -> [frames, width]."""
        block = self._spec.block
        whole = len(x) // block * block
        parts = [*x[:whole].unflatten(0, (-1, block)).split(_BLOCKS_AT_ONCE), x[None, whole:]]
        return torch.cat([self._attend(part).flatten(0, 1) for part in parts if part.numel()])

    def _attend(self, blocks: Tensor) -> Tensor:
        """The same of blocks of one length, [blocks, frames, width]."""
        spec, (count, size, _) = self._spec, blocks.shape
        normed = self._norm(blocks.flatten(0, 1))
        shape = count, size, spec.num_heads, spec.head_dim
        q = self._q(normed).view(shape)
        k, v = (each.view(shape) for each in self._kv(normed).chunk(2, 1))
        places = torch.arange(size, device=q.device)
        keys = self._distances[places[:, None] - places + spec.most_distance]
        # [frames, blocks * heads, head_dim] @ [frames, head_dim, frames]
        scores = q.permute(1, 0, 2, 3).flatten(1, 2) @ keys.transpose(1, 2)
        bias = scores.view(size, count, spec.num_heads, size).permute(1, 2, 0, 3)
        read = attend(q, k, v, bias=bias * spec.head_dim**-0.5)
        return self._out(read.flatten(2).flatten(0, 1)).view(blocks.shape)


class _Convolution:
    """A gate, a convolution of each column over frames, a norm by fixed numbers, and a
    projection."""

    def __init__(self, spec: GraniteSpeechTower, prefix: str, tower: Tower) -> None:
        width, inner = spec.hidden_size, spec.expansion * spec.hidden_size
        self._norm = tower.make_layer_norm(f"{prefix}.norm", width, EPS)
        self._up = tower.make_dense(f"{prefix}.up_conv", 2 * inner, width, 1)
        self._down = tower.make_dense(f"{prefix}.down_conv", width, inner, 1)
        self._kernel = tower.tensor(f"{prefix}.depth_conv.conv.weight", inner, 1, spec.kernel)
        self._fixed = tower.make_fixed_norm(f"{prefix}.batch_norm", inner, EPS)

    def __call__(self, x: Tensor) -> Tensor:
        """Runs it: [frames, width] -> [frames, width]."""
        rows = range(0, len(x), _ROWS_AT_ONCE)
        return torch.cat([self._piece(x, row, min(row + _ROWS_AT_ONCE, len(x))) for row in rows])

    def _piece(self, x: Tensor, first: int, end: int) -> Tensor:
        """The result for some rows, which read rows around them, or zeros."""
        size = self._kernel.shape[-1]
        before, behind = first - size // 2, end + (size - 1) // 2
        begin, stop = max(before, 0), min(behind, len(x))
        gated = F.glu(self._up(self._norm(x[begin:stop])), -1)
        gated = F.pad(gated, (0, 0, begin - before, behind - stop))
        return self._down(F.silu(self._fixed(convolve_columns(gated, self._kernel))))
