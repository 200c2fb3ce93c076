"""The tower of Muse Glimmer: an encoder for images of any size, most of whose layers attend within
windows, and three projections of squares of patches behind it."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS, RMSNorm, Tower
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.qwen2_5_vl import windows_of
from shmllm.models.vision.rotated_layer import LayerNames, RotatedLayer
from shmllm.models.vision.squares import (
    Rotation,
    in_squares,
    interpolated,
    patches_in_squares,
    places_in_squares,
)
from shmllm.models.vision.squares_specs import MuseGlimmerTower

_ENCODER, _EPS = "vision_tower.", 1e-5
_NAMES = LayerNames("norm", "attn.", "proj")


class MuseGlimmer(Tower):
    """See `squares_specs.MuseGlimmerTower`."""

    def __init__(self, spec: MuseGlimmerTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width, at = spec.hidden_size, f"{_ENCODER}patch_embedder."
        of_patch = 3 * spec.num_frames * spec.patch_size**2
        self._patches = self.make_dense(f"{at}patch_embedding", width, of_patch, bias=False)
        self._table = self.tensor(f"{at}position_embedding_table.weight", spec.table_side**2, width)
        self._first_norm = self.make_layer_norm(f"{_ENCODER}ln_pre", width, spec.eps)
        self._layers = [
            RotatedLayer(spec, f"{_ENCODER}layers.{layer}", _EPS, self, _NAMES)
            for layer in range(spec.num_layers)
        ]
        self._last_norm = self.make_layer_norm(f"{_ENCODER}ln_post", width, spec.eps)
        sizes = width * spec.merge_size**2, spec.adapted, spec.adapted
        self._adapter = [
            self.make_dense(f"vision_adapter.fc{number}", spec.adapted, inputs, bias=False)
            for number, inputs in enumerate(sizes[:2], 1)
        ]
        self._projection = self.make_dense(
            "multi_modal_projector", hidden_size, spec.adapted, bias=False
        )
        self._norm = RMSNorm(None, spec.last_eps)

    def __call__(self, pixels: Tensor, grid: Grid) -> Tensor:
        spec, merge = self._spec, self._spec.merge_size
        x = self._first_norm(self._embed(pixels, grid) + self._positions(grid))
        places = places_in_squares(grid, merge, x.device).flip(-1) + 1
        rotation = Rotation(grid, spec, x.device, places=places)
        windows = windows_of(grid, merge, spec.table_side // merge, x.device)
        for index, layer in enumerate(self._layers):
            x = layer(x, rotation, [] if index in spec.full_layers else windows)
        squares = self._last_norm(x).unflatten(0, (-1, merge**2)).transpose(1, 2).flatten(1)
        activation = ACTIVATIONS[spec.adapter_activation]
        for dense in self._adapter:
            squares = activation(dense(squares))
        return self._norm(self._projection(squares))

    def _embed(self, pixels: Tensor, grid: Grid) -> Tensor:
        """Returns the embeddings of an image's patches, [patches, width], square by square."""
        patches = patches_in_squares(pixels, grid, self._spec)
        repeated = patches.expand(-1, -1, self._spec.num_frames, -1, -1).transpose(1, 2)
        return self._patches(repeated.flatten(1).to(self.dtype))

    def _positions(self, grid: Grid) -> Tensor:
        """Returns the position embeddings [patches, width] of an image, square by square. They are
        those of an image with as many rows as this one has columns, and take the places of this
        one's patches in the order of rows."""
        _, rows, columns = grid
        side = self._spec.table_side
        table = self._table.view(side, side, -1)
        turned = interpolated(table, (1, columns, rows), 1, "bilinear", "zeros")
        return in_squares(turned.view(rows, columns, -1), self._spec.merge_size)
