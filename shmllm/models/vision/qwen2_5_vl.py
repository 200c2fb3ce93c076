"""The tower of Qwen 2.5 VL, EXAONE 4.5 and HyperCLOVA X: most layers attend within windows of an
image."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import Tower
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.qwen_layers import EPS, GatedLayer
from shmllm.models.vision.squares import Rotation, embed_patches
from shmllm.models.vision.squares_specs import (
    Qwen2_5Tower,
)


class Qwen2_5(Tower):
    """See `specs.Qwen2_5Tower`."""

    def __init__(self, spec: Qwen2_5Tower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width, size, behind = spec.hidden_size, spec.patch_size, spec.merged_width
        at = "vision_model." if behind else "visual."
        self._patches = self.make_dense(
            f"{at}patch_embed.proj", width, 3, spec.num_frames, size, size, bias=False
        )
        self._layers = [
            GatedLayer(
                spec,
                f"{at}blocks.{layer}",
                self,
                num_kv_heads=spec.num_kv_heads,
                has_apart=spec.has_apart,
            )
            for layer in range(spec.num_layers)
        ]
        merged = width * spec.merge_size**2
        self._norm = self.make_rms_norm(f"{at}merger.ln_q", width, EPS)
        self._up = self.make_dense(f"{at}merger.mlp.0", merged, merged)
        self._down = self.make_dense(f"{at}merger.mlp.2", behind or hidden_size, merged)
        self._last = self.make_dense("projector", hidden_size, behind) if behind else None

    def __call__(self, pixels: Tensor, grid: Grid) -> Tensor:
        spec = self._spec
        x = embed_patches(pixels, grid, spec, self._patches)
        rotation = Rotation(grid, spec, x.device)
        windows = windows_of(grid, spec.merge_size, spec.window, x.device)
        for index, layer in enumerate(self._layers):
            x = layer(x, rotation, [] if index in spec.full_layers else windows)
        merged = self._norm(x).view(-1, self._up.weight.shape[1])
        found = self._down(F.gelu(self._up(merged)))
        return found if self._last is None else self._last(found)


def windows_of(grid: Grid, merge_size: int, window: int, device: torch.device) -> list[Tensor]:
    """Returns the windows of an image, for each of up to four sizes: whole ones, and those that are
    cut at the right, at the bottom, and at both.

    Args:
        grid: the shape of the image.
        merge_size: the side of a square, in patches.
        window: the side of a window, in squares.
        device: of the result.

    Returns:
        For each size [windows, patches], the numbers of the patches, which follow one another
        square by square.
    """
    rows, columns = (count // merge_size for count in grid[1:])
    numbers = torch.arange(rows * columns * merge_size**2, device=device)
    squares = numbers.view(rows, columns, -1)
    found = []
    for of_rows, height in _stretches(rows, window):
        for of_columns, width in _stretches(columns, window):
            part = squares[of_rows, of_columns].unflatten(1, (-1, width)).unflatten(0, (-1, height))
            found.append(part.transpose(1, 2).flatten(2).flatten(0, 1))
    return found


def _stretches(count: int, size: int) -> list[tuple[slice, int]]:
    """Returns the part of `count` items that whole windows cover, and the rest, with the sizes of
    the windows in each."""
    whole = count // size * size
    parts = [(slice(0, whole), size), (slice(whole, count), count - whole)]
    return [(part, length) for part, length in parts if part.stop > part.start]
