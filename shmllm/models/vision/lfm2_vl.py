"""The tower of LFM2-VL: SigLIP 2 for images of any size, and two projections of squares of
patches."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS, Tower
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.siglip2 import Siglip2Encoder
from shmllm.models.vision.siglip2_specs import Lfm2VlTower

_ENCODER, _PROJECTOR = "vision_tower.", "multi_modal_projector."
_PROJECTOR_EPS = 1e-5


class Lfm2Vl(Tower):
    """See `siglip2_specs.Lfm2VlTower`."""

    unused = (f"{_ENCODER}head.",)

    def __init__(self, spec: Lfm2VlTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        self._encoder = Siglip2Encoder(spec, _ENCODER, self)
        merged = spec.hidden_size * spec.merge_size**2
        inner, bias = spec.projector_inner, spec.projector_bias
        self._square_norm = (
            self.make_layer_norm(f"{_PROJECTOR}layer_norm", merged, _PROJECTOR_EPS)
            if spec.projector_norm
            else None
        )
        self._up = self.make_dense(f"{_PROJECTOR}linear_1", inner, merged, bias=bias)
        self._down = self.make_dense(f"{_PROJECTOR}linear_2", hidden_size, inner, bias=bias)

    def __call__(self, pixels: Tensor, grid: Grid) -> Tensor:
        features = self._encoder(pixels, grid)
        squares = features.unflatten(0, (-1, self._spec.merge_size**2)).flatten(1)
        if self._square_norm is not None:
            squares = self._square_norm(squares)
        return self._down(ACTIVATIONS[self._spec.projector_activation](self._up(squares)))
