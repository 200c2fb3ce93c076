"""The tower of Granite 4 Vision: an encoder, several of whose layers give embeddings and levels of
these by Q-Formers that read windows of patches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.audio.qformer import QFormerLayer
from shmllm.models.tower import Tower
from shmllm.models.vision.granite4_vision_specs import Granite4VisionTower
from shmllm.models.vision.llava import LlavaNext
from shmllm.models.vision.llava_specs import LlavaTower

_EPS = 1e-6


class Granite4Vision(LlavaNext):
    """See `granite4_vision_specs.Granite4VisionTower`."""

    _granite: Granite4VisionTower

    def make_projections(self, spec: LlavaTower, hidden_size: int) -> None:
        assert isinstance(spec, Granite4VisionTower), "the tower is for this spec"
        self._granite = spec
        self._of_means, self._of_corners = (
            [_Windows(spec, f"{name}.{index}.", hidden_size, self) for index in range(count)]
            for name, count in (
                ("layerwise_projectors", len(spec.means)),
                ("spatial_projectors", spec.corners),
            )
        )

    def _embed(self, tile: Tensor) -> Tensor:
        spec = self._granite
        wanted = {*spec.means, *([spec.corners_of] if spec.corners else [])}
        _, inner = self._encoder.with_inner(tile, [layer - 1 for layer in wanted])
        features = dict(zip(sorted(wanted), inner, strict=True))
        if spec.drops_first:
            features = {layer: each[1:] for layer, each in features.items()}
        found = [
            windows(features[layer], None)
            for windows, layer in zip(self._of_means, spec.means, strict=True)
        ]
        found += [
            windows(features[spec.corners_of], divmod(corner, 2))
            for corner, windows in enumerate(self._of_corners)
        ]
        return self._in_order(found)

    def ends_of_rows(self) -> Tensor:
        count = len(self._of_means) + len(self._of_corners)
        return self._in_order([self._newline] * count)

    def _in_order(self, found: list[Tensor]) -> Tensor:
        """Returns what projections compute as an embedding and its levels."""
        first, *others = self._granite.order
        embedding = torch.zeros_like(found[0]) if first < 0 else found[first] * self._granite.scale
        return torch.cat([embedding, *(found[number] for number in others)], -1)


class _Windows:
    """A Q-Former that reads the features of the windows of a tile."""

    def __init__(
        self, spec: Granite4VisionTower, prefix: str, hidden_size: int, tower: Tower
    ) -> None:
        windows, width = spec.windows, spec.windows.hidden_size
        self._spec, self._side = windows, spec.encoder.side
        self._norm = tower.make_layer_norm(f"{prefix}norm", width, _EPS)
        self._query = tower.tensor(f"{prefix}query", 1, windows.queries**2, width)
        self._places = tower.tensor(f"{prefix}image_positions", 1, windows.side**2, width)
        self._first_norm = tower.make_layer_norm(f"{prefix}qformer.layernorm", width, windows.eps)
        self._layers = [
            QFormerLayer(
                windows,
                f"{prefix}qformer.encoder.layer.{layer}",
                width,
                tower,
                reads=not layer % windows.reads_every,
            )
            for layer in range(windows.num_layers)
        ]
        self._project = tower.make_dense(f"{prefix}out_linear", hidden_size, width)

    def __call__(self, features: Tensor, corner: tuple[int, int] | None) -> Tensor:
        """Returns the embeddings of a tile, [patches, width] -> [embeddings, hidden], row by row.

        Args:
            features: those of its patches.
            corner: the row and the column in each square of four features of the one that becomes a
                query; None: means do.
        """
        spec, side = self._spec, self._side
        picture = self._norm(features).view(side, side, -1)
        count = side // spec.side
        if corner is None:
            size = (count * spec.queries,) * 2
            planes = F.adaptive_avg_pool2d(picture.permute(2, 0, 1), size)
            few = planes.permute(1, 2, 0)
        else:
            few = picture[corner[0] :: 2, corner[1] :: 2]
        x = self._first_norm(self._query + _in_windows(few, spec.queries))
        read = _in_windows(picture, spec.side) + self._places
        for layer in self._layers:
            x = layer(x, read)
        squares = x.view(count, count, spec.queries, spec.queries, -1)
        return self._project(squares.transpose(1, 2).flatten(0, 3))


def _in_windows(picture: Tensor, side: int) -> Tensor:
    """Returns [rows, columns, width] as windows, [windows, side * side, width]."""
    split: Tensor = picture.unflatten(1, (-1, side)).unflatten(0, (-1, side))
    return split.transpose(1, 2).flatten(2, 3).flatten(0, 1)
