"""The audio tower of Gemma 4: a conformer (Gulati et al., 2020), whose positions attend to some
before their own, with embeddings of distances (Dai et al., 2019).

transformers pads every sound and masks what is behind it. Here it is not there: the results are
those of the positions that are not masked.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.audio.convolutions import convolve_plane
from shmllm.models.audio.frames import check_frames
from shmllm.models.audio.specs import Gemma4AudioTower
from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS, RMSNorm, Tower
from shmllm.models.vision.grids import Grid

_ENCODER = "audio_tower."
_CONVOLUTIONS = f"{_ENCODER}subsample_conv_projection."
_EPS = 1e-6
_SHORTEST, _LONGEST = 1.0, 10_000.0
"""The wavelengths of the embeddings of distances."""


class Gemma4Audio(Tower):
    """See `specs.Gemma4AudioTower`."""

    def __init__(self, spec: Gemma4AudioTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width, (first, second) = spec.hidden_size, spec.channels
        self._convolutions = [
            _Convolution(f"{_CONVOLUTIONS}layer{number}", sizes, spec.eps, self)
            for number, sizes in enumerate(((1, first), (first, second)))
        ]
        self._input = self.make_dense(
            f"{_CONVOLUTIONS}input_proj_linear", width, spec.num_mels // 4 * second, bias=False
        )
        self._layers = [
            _Layer(spec, f"{_ENCODER}layers.{layer}", self) for layer in range(spec.num_layers)
        ]
        self._output = self.make_dense(f"{_ENCODER}output_proj", spec.adapted, width)
        self._norm = RMSNorm(None, spec.eps)
        self._project = self.make_dense(
            "embed_audio.embedding_projection", hidden_size, spec.adapted, bias=False
        )

    def __call__(self, inputs: Tensor, grid: Grid) -> Tensor:
        """
        Args:
            inputs: [frames, num_mels].
            grid: (frames, 1, 1).
        """
        spec, frames = self._spec, grid[0]
        check_frames(inputs, frames, (frames, spec.num_mels))
        x = inputs.to(self.dtype)[None]
        for convolution in self._convolutions:
            x = convolution(x)
        x = self._input(x.permute(1, 2, 0).flatten(1))
        distances = _embed_distances(spec, x)
        for layer in self._layers:
            x = layer(x, distances)
        return self._project(self._norm(self._output(x)))


class _Convolution:
    """A convolution over frames and features that reads every other of both, a norm and ReLU."""

    def __init__(self, name: str, sizes: tuple[int, int], eps: float, tower: Tower) -> None:
        inputs, outputs = sizes
        self._dense = tower.make_dense(f"{name}.conv", outputs, inputs, 3, 3, bias=False)
        self._norm = tower.make_layer_norm(f"{name}.norm", outputs, eps, bias=False)

    def __call__(self, x: Tensor) -> Tensor:
        """Runs it: [in, frames, features] -> [out, frames / 2, features / 2]."""
        out: Tensor = F.relu(self._norm(convolve_plane(self._dense, x[None])[0]))
        return out.permute(2, 0, 1)


def _embed_distances(spec: Gemma4AudioTower, like: Tensor) -> Tensor:
    """Returns the embeddings of the distances that have one, the largest first, [distances,
    width]."""
    longest = (spec.chunk + spec.before - 1 + spec.behind) // 2
    count = spec.hidden_size // 2
    step = math.log(_LONGEST / _SHORTEST) / max(count - 1, 1)
    frequencies = _SHORTEST * torch.exp(torch.arange(count, device=like.device) * -step)
    angles = torch.arange(longest, -1, -1, device=like.device)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], -1).to(like.dtype)


class _Layer:
    """One layer: attention and a convolution between two MLPs, of which half is added."""

    def __init__(self, spec: Gemma4AudioTower, prefix: str, tower: Tower) -> None:
        width = spec.hidden_size
        self._bound = min(spec.bound, torch.finfo(tower.dtype).max)
        self._first, self._second = (
            _FeedForward(spec, f"{prefix}.feed_forward{number}", tower) for number in (1, 2)
        )
        self._attention = _Attention(spec, f"{prefix}.self_attn", tower)
        self._convolution = _LightConvolution(spec, f"{prefix}.lconv1d", tower)
        self._before, self._behind, self._last = (
            tower.make_rms_norm(f"{prefix}.{name}", width, _EPS)
            for name in ("norm_pre_attn", "norm_post_attn", "norm_out")
        )

    def __call__(self, x: Tensor, distances: Tensor) -> Tensor:
        """Runs the layer: [positions, width] -> [positions, width]."""
        x = self._first(x)
        read = self._attention(self._before(self._clip(x)), distances)
        x = self._convolution(x + self._behind(self._clip(read)))
        return self._last(self._clip(self._second(x)))

    def _clip(self, x: Tensor) -> Tensor:
        return x.clamp(-self._bound, self._bound)


class _FeedForward:
    """An MLP between two norms."""

    def __init__(self, spec: Gemma4AudioTower, prefix: str, tower: Tower) -> None:
        width, inner = spec.hidden_size, 4 * spec.hidden_size
        self._activation, self._scale = ACTIVATIONS[spec.activation], spec.residual_scale
        self._bound = min(spec.bound, torch.finfo(tower.dtype).max)
        self._up = tower.make_clipped(f"{prefix}.ffw_layer_1", inner, width, spec.clips)
        self._down = tower.make_clipped(f"{prefix}.ffw_layer_2", width, inner, spec.clips)
        self._before, self._behind = (
            tower.make_rms_norm(f"{prefix}.{name}_layer_norm", width, _EPS)
            for name in ("pre", "post")
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [positions, width] with what the MLP adds."""
        normed = self._before(x.clamp(-self._bound, self._bound))
        added = self._down(self._activation(self._up(normed)))
        return x + self._behind(added.clamp(-self._bound, self._bound)) * self._scale


class _Attention:
    """Attention of each position to those around it, computed in float32."""

    def __init__(self, spec: Gemma4AudioTower, prefix: str, tower: Tower) -> None:
        width = spec.hidden_size
        head_dim = width // spec.num_heads
        self._spec, self._head_dim = spec, head_dim
        self._q, self._k, self._v, self._out = (
            tower.make_clipped(f"{prefix}.{name}", width, width, spec.clips)
            for name in ("q_proj", "k_proj", "v_proj", "post")
        )
        self._distances = tower.make_dense(f"{prefix}.relative_k_proj", width, width, bias=False)
        self._scale = tower.tensor(f"{prefix}.per_dim_scale", head_dim)

    def __call__(self, x: Tensor, distances: Tensor) -> Tensor:
        """Runs it: [positions, width] -> [positions, width].

        Args:
            x: [positions, width].
            distances: [distances, width], their embeddings, the largest first.
        """
        spec = self._spec
        q, k, v = (
            dense(x).float().unflatten(1, (spec.num_heads, -1))
            for dense in (self._q, self._k, self._v)
        )
        q = q * (self._head_dim**-0.5 / math.log(2)) * F.softplus(self._scale)
        k = k * (math.log(1 + math.e) / math.log(2))
        before, behind = spec.before - 2, max(spec.behind - 1, 0)
        keys, values = (
            F.pad(each, (0, 0, 0, 0, before, behind)).unfold(0, before + 1 + behind, 1)
            for each in (k, v)
        )  # [positions, heads, head_dim, window]
        scores = (q[:, :, None] @ keys)[:, :, 0] + self._scores_of(q, distances, keys.shape[-1])
        scores = spec.cap * torch.tanh(scores / spec.cap)
        places = torch.arange(len(x), device=x.device)[:, None]
        places = places + torch.arange(-before, behind + 1, device=x.device)
        is_outside = (places < 0) | (places >= len(x))
        weights = scores.masked_fill(is_outside[:, None], -torch.inf).softmax(-1)
        read = (values @ weights[..., None]).flatten(1)
        return self._out(read.to(x.dtype))

    def _scores_of(self, q: Tensor, distances: Tensor, window: int) -> Tensor:
        """Returns what distances add to the scores, [positions, heads, window]. The largest one has
        an embedding, but no position attends so far; the last ones may have none."""
        rows = self._distances(distances)[1 : 1 + window].float()
        keys = F.pad(rows, (0, 0, 0, window - len(rows))).view(window, *q.shape[1:])
        return (q.transpose(0, 1) @ keys.permute(1, 2, 0)).transpose(0, 1)


class _LightConvolution:
    """A gate, a convolution of each column over positions up to its own, and a projection."""

    def __init__(self, spec: Gemma4AudioTower, prefix: str, tower: Tower) -> None:
        width = spec.hidden_size
        self._activation = ACTIVATIONS[spec.activation]
        self._bound = min(spec.bound, torch.finfo(tower.dtype).max)
        self._start = tower.make_clipped(f"{prefix}.linear_start", 2 * width, width, spec.clips)
        self._end = tower.make_clipped(f"{prefix}.linear_end", width, width, spec.clips)
        self._kernel = tower.tensor(f"{prefix}.depthwise_conv1d.weight", width, 1, spec.kernel)
        self._before = tower.make_rms_norm(f"{prefix}.pre_layer_norm", width, spec.eps)
        self._behind = tower.make_rms_norm(f"{prefix}.conv_norm", width, spec.eps)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [positions, width] with what the convolution adds."""
        gated = F.glu(self._start(self._before(x)), -1)
        size = self._kernel.shape[-1]
        windows = F.pad(gated, (0, 0, size - 1, 0)).unfold(0, size, 1)  # [positions, width, size]
        mixed: Tensor = (windows * self._kernel[:, 0]).sum(-1).clamp(-self._bound, self._bound)
        return x + self._end(self._activation(self._behind(mixed)))
