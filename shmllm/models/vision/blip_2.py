"""The tower of BLIP-2 (Li et al., 2023): an encoder, and a Q-Former that reads its results."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.audio.qformer import QFormerProjector
from shmllm.models.layers import NamedWeights, Storage
from shmllm.models.matrices import joined
from shmllm.models.tower import Tower
from shmllm.models.vision.blip_2_specs import Blip2Tower
from shmllm.models.vision.encoder import Encoder
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.tiles import Pixels, tiles_of
from shmllm.models.weight_names import renamed

_PARTS_IN_FILES = {
    ".position_embedding.weight": ".position_embedding",
    ".out_proj.": ".projection.",
    ".q_proj.": ".qkv.",
    "projector.query": "query_tokens",
    "projector.qformer.": "qformer.",
    "projector.linear.": "language_projection.",
}
_TABLES = ".class_embedding", ".position_embedding"


class Blip2(Tower):
    """See `blip_2_specs.Blip2Tower`."""

    def __init__(self, spec: Blip2Tower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        width = spec.encoder.hidden_size
        self._encoder = Encoder(spec.encoder, "vision_model.", self, is_joined=True)
        self._reader = QFormerProjector(spec.reader, width, hidden_size, self)
        self.named_weights = self._as_in_files()

    def _as_in_files(self) -> NamedWeights:
        """Returns the destinations of files: queries, keys and values are one tensor, and tables
        have further dimensions of 1."""
        found: NamedWeights = {}
        for name, (view,) in self.named_weights.items():
            own = renamed(name, _PARTS_IN_FILES)
            assert isinstance(view, Tensor), "a tower is not quantized"
            if ".q_proj." in name:
                names = [name.replace(".q_proj.", f".{each}_proj.") for each in "qkv"]
                rows = (self.named_weights[each][0] for each in names)
                found[own] = (joined([each for each in rows if isinstance(each, Tensor)]),)
            elif ".k_proj." not in name and ".v_proj." not in name:
                is_table = own.endswith(_TABLES)
                found[own] = (view.view(1, -1, view.shape[-1]) if is_table else view,)
        return found

    def __call__(self, pixels: Pixels, grid: Grid) -> Tensor:
        return torch.cat([self._reader(self._encoder(tile)) for tile in tiles_of(pixels, grid)])
