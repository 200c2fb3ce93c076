"""What Gemma 4 12B has in place of a tower for images: projections of the pixels of squares."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import Dense, RMSNorm, Tower
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.squares import patches_in_squares, places_in_squares
from shmllm.models.vision.squares_specs import PixelsTower

_OWN, _IN_MODULES, _EPS = "vision_embedder.", "embed_vision.", 1e-5


class Pixels(Tower):
    """See `squares_specs.PixelsTower`."""

    def __init__(self, spec: PixelsTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width, of_square = spec.hidden_size, 3 * spec.side**2
        self._first_norm = self.make_layer_norm(f"{_OWN}patch_ln1", of_square, _EPS)
        self._embed = self.make_dense(f"{_OWN}patch_dense", width, of_square)
        self._norm = self.make_layer_norm(f"{_OWN}patch_ln2", width, _EPS)
        self._positions = self.tensor(f"{_OWN}pos_embedding", spec.num_rows, 2, width)
        self._sum_norm = self.make_layer_norm(f"{_OWN}pos_norm", width, _EPS)
        for name in tuple(self.named_weights):
            self.module_weights[name.replace(_OWN, _IN_MODULES)] = self.named_weights[name]
        self._last_norm = RMSNorm(None, spec.eps)
        projection = f"{_IN_MODULES}embedding_projection"
        self._projection: Dense = self.make_dense(projection, hidden_size, width, bias=False)
        inside = f"{_IN_MODULES}multimodal_embedder.embedding_projection.weight"
        self.module_weights[inside] = (self._projection.weight,)

    def __call__(self, pixels: Tensor, grid: Grid) -> Tensor:
        spec = self._spec
        merge, size = spec.merge_size, spec.patch_size
        patches = patches_in_squares(pixels, grid, spec)[:, :, 0]
        squares = patches.unflatten(0, (-1, merge, merge)).permute(0, 1, 4, 2, 5, 3)
        x = self._first_norm(squares.reshape(-1, 3 * (merge * size) ** 2).to(self.dtype))
        x = self._norm(self._embed(x))
        of_squares = 1, grid[1] // merge, grid[2] // merge
        rows, columns = places_in_squares(of_squares, 1, x.device).unbind(1)
        x = x + (self._positions[columns, 0] + self._positions[rows, 1])
        return self._projection(self._last_norm(self._sum_norm(x)))
