"""What the towers share that join squares of patches: the order of patches, and rotations.

Patches follow one another square by square, because those of a square become one embedding. Images
have any size that is a multiple of a square's, or, for towers that leave a rest, of a patch's:
patches that are in no square follow the others.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.tower import Dense, attend
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.squares_specs import RotatedTower, SquaresTower
from shmllm.models.vision.tiles import patches_of


def in_squares(x: Tensor, size: int) -> Tensor:
    """Returns what patches have, square by square.

    Args:
        x: [rows, columns, ...].
        size: the side of a square.

    Returns:
        [rows * columns, ...].
    """
    rows, columns = (count - count % size for count in x.shape[:2])
    whole = x[:rows, :columns]
    squares = whole.reshape(rows // size, size, columns // size, size, *x.shape[2:])
    ordered = squares.transpose(1, 2).flatten(0, 3)
    if whole.shape == x.shape:
        return ordered
    return torch.cat([ordered, x[:rows, columns:].flatten(0, 1), x[rows:].flatten(0, 1)])


def places_in_squares(grid: Grid, size: int, device: torch.device) -> Tensor:
    """Returns the row and the column of each patch, [patches, 2], square by square.

    Args:
        grid: the shape of the image.
        size: the side of a square.
        device: where the tensor is.
    """
    _, rows, columns = grid
    axes = torch.arange(rows, device=device), torch.arange(columns, device=device)
    return in_squares(torch.stack(torch.meshgrid(*axes, indexing="ij"), -1), size)


def patches_in_squares(pixels: Tensor, grid: Grid, spec: SquaresTower) -> Tensor:
    """Returns an image's patches, [patches, 3, frames, size, size], square by square.

    Args:
        pixels: [frames, 3, height, width]: an image, or as many frames of a video as become one.
        grid: the shape of the image.
        spec: what the tower computes.

    Raises:
        ValueError: the image has another shape, or is not made of squares.
    """
    frames, rows, columns = grid
    size, square = spec.patch_size, spec.merge_size
    shape = 3, rows * size, columns * size
    if frames != 1 or len(pixels) not in (1, spec.num_frames) or pixels.shape[1:] != shape:
        raise ValueError(
            f"a grid of {list(grid)} patches has images of [1, 3, {rows * size}, "
            f"{columns * size}] pixels, not {list(pixels.shape)}"
        )
    if not spec.leaves_rest and (rows % square or columns % square):
        raise ValueError(f"a grid of {rows} x {columns} patches has no squares of {square}")
    of_frames = torch.stack([patches_of(frame, size) for frame in pixels], 3)
    return in_squares(of_frames, square)


def embed_patches(pixels: Tensor, grid: Grid, spec: SquaresTower, projection: Dense) -> Tensor:
    """Returns the embeddings of an image's patches, [patches, width], square by square.

    Args:
        pixels, grid, spec: see `patches_in_squares`.
        projection: of the pixels of a patch, [width, 3, frames, size, size].
    """
    patches = patches_in_squares(pixels, grid, spec)
    repeated = patches.expand(-1, -1, spec.num_frames, -1, -1)
    return projection(repeated.flatten(1).to(projection.weight.dtype))


def interpolated(
    table: Tensor, grid: Grid, size: int, mode: str = "bicubic", padding: str = "border"
) -> Tensor:
    """Returns the position embeddings [patches, width] of an image, square by square: those of a
    table whose edges are those of the image, interpolated in float32.

    Args:
        table: [rows, columns, width].
        grid: the shape of the image.
        size: the side of a square.
        mode: "bilinear" or "bicubic".
        padding: what is outside of the table: "border", the nearest of its embeddings, or "zeros".
    """
    rows, columns = (
        (torch.arange(count, dtype=torch.float32, device=table.device) + 0.5) / count * 2 - 1
        for count in grid[1:]
    )
    places = torch.stack(torch.meshgrid(rows, columns, indexing="ij")[::-1], -1)
    found = F.grid_sample(
        table.float().permute(2, 0, 1)[None],
        in_squares(places, size)[None, :, None],
        mode=mode,
        padding_mode=padding,
        align_corners=False,
    )
    return found[0, :, :, 0].t().to(table.dtype)


class Rotation:
    """The rotation of heads by the rows and the columns of patches: the first half of the angles
    are those of the row (Su et al., 2021; Heo et al., 2024).

    Args:
        grid: the shape of the image.
        spec: what the tower computes.
        device: where it is computed.
        alternating: whether every other frequency is the rows' and the rest are the columns';
            otherwise both have the former.
        places: [patches, 2], what stands for row and column of a patch; None: these.
    """

    def __init__(
        self,
        grid: Grid,
        spec: RotatedTower,
        device: torch.device,
        *,
        alternating: bool = False,
        places: Tensor | None = None,
    ) -> None:
        half = spec.hidden_size // spec.num_heads // 2
        exponents = torch.arange(half, dtype=torch.float32, device=device) / half
        of_rows, of_columns = exponents[::2], exponents[int(alternating) :: 2]
        frequencies = 1.0 / spec.theta ** torch.stack([of_rows, of_columns])
        if places is None:
            places = places_in_squares(grid, spec.merge_size, device)
        angles = places[..., None].float() * frequencies
        angles = angles.flatten(1)[:, None]
        self._cos, self._sin = angles.cos(), angles.sin()

    def __call__(self, x: Tensor) -> Tensor:
        """Returns ``x`` [patches, heads, head_dim], rotated in float32."""
        first, second = x.float().chunk(2, -1)
        turned = first * self._cos - second * self._sin, second * self._cos + first * self._sin
        return torch.cat(turned, -1).to(x.dtype)


def attend_within(
    x: Tensor, num_heads: int, rotation: Rotation, windows: list[Tensor], num_kv_heads: int = 0
) -> Tensor:
    """Returns what patches read from those of their window.

    Args:
        x: [patches, (num_heads + 2 * num_kv_heads) * head_dim]: queries, keys and values.
        num_heads: the number of heads.
        rotation: of queries and keys.
        windows: for each size of windows, [windows, patches] the numbers of the patches of each;
            empty: there is one window.
        num_kv_heads: the number of key heads, and of value heads, each of which several query heads
            read; 0: as many as those.

    Returns:
        [patches, width].
    """
    num_kv_heads = num_kv_heads or num_heads
    heads = x.unflatten(1, (num_heads + 2 * num_kv_heads, -1))
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], 1)
    q, k = rotation(q), rotation(k)
    if num_kv_heads != num_heads:
        k, v = (each.repeat_interleave(num_heads // num_kv_heads, 1) for each in (k, v))
    if not windows:
        return attend(q[None], k[None], v[None])[0].flatten(1)
    out = torch.empty_like(q)
    for patches in windows:
        out[patches] = attend(q[patches], k[patches], v[patches])
    return out.flatten(1)
