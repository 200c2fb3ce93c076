"""MoonViT, the tower of Kimi-VL and Kimi K2.5: an encoder for images of any size, whose table of
positions is interpolated bicubically, and two projections of squares of patches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.arranged import PairedRows
from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS, Dense, LayerNorm, Tower
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.squares import Rotation, attend_within, embed_patches, interpolated
from shmllm.models.vision.squares_specs import KimiTower

_ENCODER, _EPS = "vision_tower.", 1e-5
_PROJECTORS = {
    True: ("mm_projector.", ("pre_norm", "proj.0", "proj.2"), ("pre_norm", "in_proj", "out_proj")),
    False: ("multi_modal_projector.", ("pre_norm", "linear_1", "linear_2"), ()),
}
"""For each value of `KimiTower.is_k25` the prefix of the weights of the projections, their names in
checkpoints and those in transformers' module, if it has one."""


class Kimi(Tower):
    """See `squares_specs.KimiTower`."""

    def __init__(self, spec: KimiTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        width, size, side = spec.hidden_size, spec.patch_size, spec.table_side
        self._patches = self.make_dense(f"{_ENCODER}patch_embed.proj", width, 3, size, size)
        table = f"{_ENCODER}patch_embed.pos_emb"
        self._table = self.tensor(f"{table}.weight", side, side, width)
        if spec.is_k25:
            self.module_weights[f"{table}.position_embeddings"] = (self._table,)
        self._layers = [_Layer(spec, layer, self) for layer in range(spec.num_layers)]
        self._norm = self.make_layer_norm(f"{_ENCODER}encoder.final_layernorm", width, _EPS)
        self.add_names(f"{_ENCODER}final_layernorm", self._norm)
        prefix, names, others = _PROJECTORS[spec.is_k25]
        norm, up, down = (f"{prefix}{name}" for name in names)
        merged = width * spec.merge_size**2
        self._projector_norm = self.make_layer_norm(norm, width, spec.projector_eps)
        self._up = self.make_dense(up, merged, merged)
        self._down = self.make_dense(down, hidden_size, merged)
        parts: tuple[Dense | LayerNorm, ...] = self._projector_norm, self._up, self._down
        for other, part in zip(others, parts if others else (), strict=True):
            self.add_names(f"{prefix}{other}", part)

    def add_names(self, name: str, part: Dense | LayerNorm) -> None:
        """Gives the weights of a part further names, of transformers' module."""
        if not self._spec.is_k25:
            return
        assert part.bias is not None, "all parts have one"
        self.module_weights |= {f"{name}.weight": (part.weight,), f"{name}.bias": (part.bias,)}

    def __call__(self, pixels: Tensor, grid: Grid) -> Tensor:
        spec = self._spec
        x = embed_patches(pixels, grid, spec, self._patches)
        x = x + interpolated(self._table, grid, spec.merge_size)
        rotation = _PairRotation(grid, spec, x.device)
        for layer in self._layers:
            x = layer(x, rotation)
        squares = self._projector_norm(self._norm(x)).view(-1, self._up.weight.shape[1])
        return self._down(F.gelu(self._up(squares)))


class _PairRotation(Rotation):
    """Rotates neighbours: the first pair of a head by the column of its patch, the second one by
    the row, and so on."""

    def __init__(self, grid: Grid, spec: KimiTower, device: torch.device) -> None:
        super().__init__(grid, spec, device)
        self._cos, self._sin = (
            each.unflatten(-1, (2, -1)).flip(-2).transpose(-1, -2).flatten(-2)
            for each in (self._cos, self._sin)
        )

    def __call__(self, x: Tensor) -> Tensor:
        first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        turned = first * self._cos - second * self._sin, second * self._cos + first * self._sin
        return torch.stack(turned, -1).flatten(-2).to(x.dtype)


class _Layer:
    """One layer: attention to the whole image and an MLP, each behind a norm."""

    def __init__(self, spec: KimiTower, layer: int, tower: Kimi) -> None:
        width = spec.hidden_size
        own, other = f"{_ENCODER}encoder.blocks.{layer}", f"{_ENCODER}layers.{layer}"
        self._heads, self._activation = spec.num_heads, ACTIVATIONS[spec.activation]
        self._norms = [
            tower.make_layer_norm(f"{own}.norm{number}", width, _EPS) for number in (0, 1)
        ]
        self._qkv = tower.make_dense(f"{own}.wqkv", 3 * width, width)
        self._out = tower.make_dense(f"{own}.wo", width, width)
        self._up = tower.make_dense(f"{own}.mlp.fc0", spec.inner, width)
        self._down = tower.make_dense(f"{own}.mlp.fc1", width, spec.inner)
        for number, norm in enumerate(self._norms, 1):
            tower.add_names(f"{other}.norm{number}", norm)
        tower.add_names(f"{other}.attn.proj", self._out)
        tower.add_names(f"{other}.mlp.fc1", self._up)
        tower.add_names(f"{other}.mlp.fc2", self._down)
        if spec.is_k25:
            self._name_apart(f"{own}.wqkv", f"{other}.attn", tower)

    def _name_apart(self, joined: str, prefix: str, tower: Kimi) -> None:
        """Names the projections to queries, keys and values as transformers' module has them. The
        name of all three stands for these, as a tensor of a checkpoint may for several."""
        for kind in ("weight", "bias"):
            name = f"{joined}.{kind}"
            (whole,) = tower.module_weights[name] = tower.named_weights.pop(name)
            assert isinstance(whole, Tensor), "towers are not quantized"
            q, k, v = whole.chunk(3)
            for each, part in (("q", q), ("k", k)):
                paired = PairedRows(part, self._heads)
                tower.named_weights[f"{prefix}.{each}_proj.{kind}"] = (paired,)
            tower.named_weights[f"{prefix}.v_proj.{kind}"] = (v,)

    def __call__(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Runs the layer: [patches, width] -> [patches, width]."""
        qkv = self._qkv(self._norms[0](x))
        x = x + self._out(attend_within(qkv, self._heads, rotation, []))
        return x + self._down(self._activation(self._up(self._norms[1](x))))
