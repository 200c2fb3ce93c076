"""The tower of Music Flamingo: that of Audio Flamingo 3, and rotations of the encoder's results by
the number of a part, by places in it, and by times, as transformers' `MusicFlamingoRotaryEmbedding`
has them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shmllm.models.audio.audio_flamingo3 import AudioFlamingo
from shmllm.models.audio.specs import MusicFlamingoTower
from shmllm.models.layers import Storage
from shmllm.models.vision.grids import Grid


class MusicFlamingo(AudioFlamingo):
    """See `specs.MusicFlamingoTower`."""

    def __init__(self, spec: MusicFlamingoTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(spec, hidden_size, storage)
        self._times = spec

    def prepare(self, x: Tensor, grid: Grid) -> Tensor:
        """Returns the encoder's results ``x`` [n, width], rotated.

        Args:
            x: the results.
            grid: (frames, the number of the part, from 1, 1).
        """
        angles = _angles(self._times, len(x), grid[1] - 1, x.device)
        cos, sin = angles.cos().double(), angles.sin().double()
        rest = x[:, 2 * angles.shape[1] :]
        first, second = x[:, : 2 * angles.shape[1]].double().unflatten(1, (-1, 2)).unbind(-1)
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], -1)
        return torch.cat([turned.flatten(1).to(x.dtype), rest], 1)


def _angles(spec: MusicFlamingoTower, count: int, part: int, device: torch.device) -> Tensor:
    """Returns the angles of pairs of numbers, float32 [count, rotary_dim]: a half is of the part,
    the other one of places, each multiplied by the time."""
    of_part = spec.num_positions // 2  # positions
    exponents = torch.arange(0, spec.rotary_dim, 2, device=device) / spec.rotary_dim
    rates = 1.0 / spec.theta**exponents
    places = torch.arange(count, device=device, dtype=torch.float32)
    begin = torch.tensor(part * of_part) * spec.seconds  # on a GPU the host would wait
    number = torch.round(begin / (spec.seconds * of_part)) / spec.theta
    times = begin.item() + places * spec.seconds
    by_part = (number.item() * rates).expand(count, -1)
    by_place = (places / spec.theta * (2 * math.pi))[:, None] * rates
    return torch.cat([by_part, by_place], 1) * (-times * 2 * math.pi)[:, None]
