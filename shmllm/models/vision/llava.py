"""The towers of LLaVA, ViP-LLaVA, LLaVA-NeXT and LLaVA-OneVision: CLIP or SigLIP and two
projections."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.formats.joined_tiles import JoinedTiles
from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS, Tower
from shmllm.models.vision.encoder import Encoder
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.llava_specs import (
    LlavaNextTower,
    LlavaNextVideoTower,
    LlavaTower,
    VipLlavaTower,
)
from shmllm.models.vision.tiles import Pixels, tiles_of

ENCODER, PROJECTOR = "vision_tower.", "multi_modal_projector."


class Llava(Tower):
    """See `specs.LlavaTower`."""

    def __init__(self, spec: LlavaTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        self._encoder = Encoder(spec.encoder, ENCODER, self)
        self.make_projections(spec, hidden_size)
        self.unused = (
            f"{ENCODER}post_layernorm.",
            f"{ENCODER}head.",
            *(
                f"{ENCODER}encoder.layers.{layer}."
                for layer in range(spec.encoder.num_layers, spec.num_stored)
            ),
        )

    def make_projections(self, spec: LlavaTower, hidden_size: int) -> None:
        """Allocates what is behind the encoder."""
        width, bias = self._width(spec), spec.bias
        self._first = self.make_dense(f"{PROJECTOR}linear_1", hidden_size, width, bias=bias)
        self._second = self.make_dense(f"{PROJECTOR}linear_2", hidden_size, hidden_size, bias=bias)

    @staticmethod
    def _width(spec: LlavaTower) -> int:
        """Returns the width of what the projections read."""
        return spec.encoder.hidden_size

    def __call__(self, pixels: Pixels, grid: Grid) -> Tensor:
        return torch.cat([self._embed(tile) for tile in tiles_of(pixels, grid)])

    def _embed(self, tile: Tensor) -> Tensor:
        return self._project(self._encode(tile))

    def _encode(self, tile: Tensor) -> Tensor:
        x = self._encoder(tile)
        return x[1:] if self._spec.drops_first else x

    def _project(self, x: Tensor) -> Tensor:
        return self._second(ACTIVATIONS[self._spec.activation](self._first(x)))


class VipLlava(Llava):
    """See `llava_specs.VipLlavaTower`."""

    def __init__(self, spec: VipLlavaTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(spec, hidden_size, storage)
        self._places = [layer - 1 for layer in spec.layers]
        self._norm = self.make_layer_norm(
            f"{PROJECTOR}projector_layernorm", self._width(spec), spec.eps
        )

    @staticmethod
    def _width(spec: LlavaTower) -> int:
        assert isinstance(spec, VipLlavaTower), "the tower is for this spec"
        return len(spec.layers) * spec.encoder.hidden_size

    def _encode(self, tile: Tensor) -> Tensor:
        _, inner = self._encoder.with_inner(tile, self._places)
        found = dict(zip(sorted(set(self._places)), inner, strict=True))
        return self._norm(torch.cat([found[place][1:] for place in self._places], -1))


class LlavaNext(Llava):
    """See `specs.LlavaNextTower`."""

    def __init__(self, spec: LlavaNextTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(spec, hidden_size, storage)
        self._layout = spec.joined
        self._side = spec.side
        self._newline = self.tensor("image_newline", hidden_size)

    def __call__(self, pixels: Pixels, grid: Grid) -> Tensor:
        layout = self._layout(grid)
        if layout is None:
            raise ValueError(f"there is no image of the grid {list(grid)}")
        tiles = iter(tiles_of(pixels, grid))
        whole = self._embed(next(tiles))
        found = whole.new_empty(len(whole) + layout.num_embeddings, whole.shape[1])
        found[: len(whole)] = whole
        rows, columns = layout.shape
        picture = found[len(whole) :].view(rows, columns + 1, whole.shape[1])
        picture[:, -1] = self.ends_of_rows()
        if layout.shrunk is None:
            self._join(tiles, layout, picture)
        else:
            large = whole.new_empty(layout.num_rows, layout.num_columns, whole.shape[1])
            self._join(tiles, layout, large)
            planes = large.permute(2, 0, 1)[None]
            shrunk = F.interpolate(planes, layout.shrunk, mode="bilinear")
            picture[:, :-1] = shrunk[0].permute(1, 2, 0)
        return found

    def ends_of_rows(self) -> Tensor:
        """Returns the embedding that ends each row, [width]."""
        return self._newline

    def _join(self, tiles: Iterator[Tensor], layout: JoinedTiles, picture: Tensor) -> None:
        """Computes the embeddings of tiles and writes them where they are in the picture, [rows,
        columns or more, width]."""
        side = self._side
        for number, tile in enumerate(tiles):
            row, column = divmod(number, layout.columns)
            top, left = row * side - layout.above, column * side - layout.left
            rows = _within(top, side, layout.num_rows)
            columns = _within(left, side, layout.num_columns)
            patches = self._embed(tile).view(side, side, -1)
            picture[rows, columns] = patches[_moved(rows, -top), _moved(columns, -left)]


class LlavaOnevision(LlavaNext):
    """See `specs.LlavaOnevisionTower`."""

    def __call__(self, pixels: Pixels, grid: Grid) -> Tensor:
        if grid[0] != 1:
            return super().__call__(pixels, grid)
        return torch.cat([self._embed(tiles_of(pixels, grid)[0]), self._newline[None]])

    def embed_frame(self, frame: Pixels, grid: Grid) -> Tensor:
        half = -(-self._side // 2)
        patches = self._embed(tiles_of(frame, grid)[0]).unflatten(0, (self._side, self._side))
        shrunk = F.interpolate(patches.permute(2, 0, 1)[None], (half, half), mode="bilinear")
        return shrunk[0].flatten(1).t()

    @property
    def behind_video(self) -> Tensor:
        return self._newline[None]


class LlavaNextVideo(LlavaNext):
    """See `specs.LlavaNextVideoTower`."""

    def __init__(self, spec: LlavaNextVideoTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(spec, hidden_size, storage)
        self._stride = spec.stride
        self._pool = F.max_pool2d if spec.takes_largest else F.avg_pool2d

    def embed_frame(self, frame: Pixels, grid: Grid) -> Tensor:
        patches = self._encode(tiles_of(frame, grid)[0]).unflatten(0, (self._side, self._side))
        pooled = self._pool(patches.permute(2, 0, 1)[None], self._stride)
        return self._project(pooled[0].flatten(1).t())


def _within(begin: int, length: int, end: int) -> slice:
    """Returns the part of an interval between 0 and ``end``."""
    first = min(max(begin, 0), end)
    return slice(first, max(min(begin + length, end), first))


def _moved(interval: slice, distance: int) -> slice:
    """Returns an interval, so many places later; an empty one if it is empty."""
    if interval.start == interval.stop:
        return slice(0, 0)
    return slice(interval.start + distance, interval.stop + distance)
