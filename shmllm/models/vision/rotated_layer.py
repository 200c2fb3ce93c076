"""A layer that several towers share: attention with rotated queries and keys, and an MLP, each
behind a LayerNorm."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from shmllm.models.tower import ACTIVATIONS, Tower
from shmllm.models.vision.squares import Rotation, attend_within
from shmllm.models.vision.squares_specs import RotatedTower


class LayerNames(NamedTuple):
    """The names of a layer's weights in checkpoints. Those of the MLP are "mlp.fc1" and "mlp.fc2".

    Attributes:
        norm: that of a norm without its number, 1 or 2.
        attention: what those of the projections of the attention begin with.
        out: the rest of that of the last one.
    """

    norm: str
    attention: str
    out: str


SIGLIP = LayerNames("layer_norm", "self_attn.", "out_proj")


class RotatedLayer:
    """
    Args:
        spec: what the tower computes.
        prefix: what the names of the layer's weights begin with.
        eps: of the norms.
        tower: allocates the weights.
        names: the rest of these names.
    """

    def __init__(
        self,
        spec: RotatedTower,
        prefix: str,
        eps: float,
        tower: Tower,
        names: LayerNames = SIGLIP,
    ) -> None:
        width, attention = spec.hidden_size, f"{prefix}.{names.attention}"
        self._heads, self._activation = spec.num_heads, ACTIVATIONS[spec.activation]
        self._norms = [
            tower.make_layer_norm(f"{prefix}.{names.norm}{number}", width, eps) for number in (1, 2)
        ]
        self._qkv = tower.make_joined([f"{attention}{name}_proj" for name in "qkv"], width, width)
        self._out = tower.make_dense(f"{attention}{names.out}", width, width)
        self._up = tower.make_dense(f"{prefix}.mlp.fc1", spec.inner, width)
        self._down = tower.make_dense(f"{prefix}.mlp.fc2", width, spec.inner)

    def __call__(self, x: Tensor, rotation: Rotation, windows: list[Tensor]) -> Tensor:
        """Runs the layer: [patches, width] -> [patches, width]. Of windows see `attend_within`."""
        qkv = self._qkv(self._norms[0](x))
        x = x + self._out(attend_within(qkv, self._heads, rotation, windows))
        return x + self._down(self._activation(self._up(self._norms[1](x))))
