"""The layers that the towers of Qwen VL and dots.ocr share."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.tower import ACTIVATIONS, Tower
from shmllm.models.vision.squares import Rotation, attend_within
from shmllm.models.vision.squares_specs import RotatedTower

EPS = 1e-6
"""Of all norms of Qwen's towers."""


class PlainLayer:
    """Attention to the whole image and an MLP of two projections, each behind a LayerNorm.

    Args:
        spec: what the tower computes.
        prefix: of the weights' names, such as "visual.blocks.0".
        projections: the ends of the names of the MLP's projections.
        tower: owns the weights.
        eps: of the norms.
    """

    def __init__(
        self,
        spec: RotatedTower,
        prefix: str,
        projections: tuple[str, str],
        tower: Tower,
        eps: float = EPS,
    ) -> None:
        width = spec.hidden_size
        up, down = projections
        self._heads, self._activation = spec.num_heads, ACTIVATIONS[spec.activation]
        self._norms = [
            tower.make_layer_norm(f"{prefix}.norm{number}", width, eps) for number in (1, 2)
        ]
        self._qkv = tower.make_dense(f"{prefix}.attn.qkv", 3 * width, width)
        self._out = tower.make_dense(f"{prefix}.attn.proj", width, width)
        self._up = tower.make_dense(f"{prefix}.mlp.{up}", spec.inner, width)
        self._down = tower.make_dense(f"{prefix}.mlp.{down}", width, spec.inner)

    def __call__(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Runs the layer: [patches, width] -> [patches, width]."""
        qkv = self._qkv(self._norms[0](x))
        x = x + self._out(attend_within(qkv, self._heads, rotation, []))
        return x + self._down(self._activation(self._up(self._norms[1](x))))


class GatedLayer:
    """Attention to windows or the whole image and a gated MLP, each behind an RMSNorm.

    Args:
        spec: what the tower computes.
        prefix: of the weights' names, such as "visual.blocks.0".
        tower: owns the weights.
        projections: the ends of the names of the MLP's projections: of the one whose results pass
            the activation, of the other one that reads the stream, and of the last one.
        eps: of the norms.
        bias: whether the projections have biases.
        num_kv_heads: the number of key heads, and of value heads; 0: that of heads.
        has_apart: whether checkpoints have the projections to queries, keys and values apart.
    """

    def __init__(
        self,
        spec: RotatedTower,
        prefix: str,
        tower: Tower,
        *,
        projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        eps: float = EPS,
        bias: bool = True,
        num_kv_heads: int = 0,
        has_apart: bool = False,
    ) -> None:
        width, inner = spec.hidden_size, spec.inner
        gate, up, down = (f"{prefix}.mlp.{name}" for name in projections)
        self._heads, self._kv_heads = spec.num_heads, num_kv_heads
        self._activation = ACTIVATIONS[spec.activation]
        self._norms = [
            tower.make_rms_norm(f"{prefix}.norm{number}", width, eps) for number in (1, 2)
        ]
        if has_apart:
            names = [f"{prefix}.attn.{name}" for name in "qkv"]
            self._qkv = tower.make_joined(names, width, width)
        else:
            num_heads = spec.num_heads + 2 * (num_kv_heads or spec.num_heads)
            of_heads = width // spec.num_heads * num_heads
            self._qkv = tower.make_dense(f"{prefix}.attn.qkv", of_heads, width, bias=bias)
        self._out = tower.make_dense(f"{prefix}.attn.proj", width, width, bias=bias)
        self._gate = tower.make_dense(gate, inner, width, bias=bias)
        self._up = tower.make_dense(up, inner, width, bias=bias)
        self._down = tower.make_dense(down, width, inner, bias=bias)

    def __call__(self, x: Tensor, rotation: Rotation, windows: list[Tensor]) -> Tensor:
        """Runs the layer: [patches, width] -> [patches, width]. Of windows see `attend_within`."""
        qkv = self._qkv(self._norms[0](x))
        read = attend_within(qkv, self._heads, rotation, windows, self._kv_heads)
        x = x + self._out(read)
        normed = self._norms[1](x)
        return x + self._down(self._activation(self._gate(normed)) * self._up(normed))
