"""The tower of InternVL: an encoder whose layers scale what they add, a norm and two projections of
squares of patches."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shmllm.models.layers import Storage
from shmllm.models.tower import ACTIVATIONS, Tower, attend
from shmllm.models.vision.grids import Grid
from shmllm.models.vision.projected_specs import InternVLTower
from shmllm.models.vision.tiles import Pixels, patches_of_tile, tiles_of
from shmllm.models.weight_names import renamed

_QK_EPS, _PROJECTOR_EPS = 1e-6, 1e-5


class _Names(NamedTuple):
    """The names of weights.

    encoder, layers: prefixes.
    class_token, positions, patches, mask_token: behind that of the encoder's embeddings.
    qkv: the projections to queries, keys and values, behind `attention`; one: all in one tensor.
    attention, out, norms, scales: behind the prefix of a layer, the second behind `attention`.
    projector: its norm and its two projections.
    """

    encoder: str
    layers: str
    class_token: str
    positions: str
    patches: str
    mask_token: str
    qkv: tuple[str, ...]
    attention: str
    out: str
    norms: tuple[str, str]
    scales: tuple[str, str]
    projector: tuple[str, str, str]


_OF_TRANSFORMERS = _Names(
    encoder="vision_tower.",
    layers="vision_tower.encoder.layer.",
    class_token="cls_token",
    positions="position_embeddings",
    patches="patch_embeddings.projection",
    mask_token="mask_token",
    qkv=("q_proj", "k_proj", "v_proj"),
    attention="attention.",
    out="projection_layer",
    norms=("layernorm_before", "layernorm_after"),
    scales=("lambda_1", "lambda_2"),
    projector=(
        "multi_modal_projector.layer_norm",
        "multi_modal_projector.linear_1",
        "multi_modal_projector.linear_2",
    ),
)
_PUBLISHED = _Names(
    encoder="vision_model.",
    layers="vision_model.encoder.layers.",
    class_token="class_embedding",
    positions="position_embedding",
    patches="patch_embedding",
    mask_token="mask_token",
    qkv=("qkv",),
    attention="attn.",
    out="proj",
    norms=("norm1", "norm2"),
    scales=("ls1", "ls2"),
    projector=("mlp1.0", "mlp1.1", "mlp1.3"),
)

_IN_MODULES = {
    "vision_model.encoder.": "vision_tower.",
    "vision_model.": "vision_tower.",
    ".class_embedding": ".cls_token",
    ".position_embedding": ".position_embeddings",
    ".patch_embedding.": ".patch_embeddings.projection.",
    ".attn.proj.": ".attention.projection_layer.",
    ".attn.": ".attention.",
    ".norm1.": ".layernorm_before.",
    ".norm2.": ".layernorm_after.",
    ".ls1": ".lambda_1",
    ".ls2": ".lambda_2",
    "mlp1.0.": "multi_modal_projector.layer_norm.",
    "mlp1.1.": "multi_modal_projector.linear_1.",
    "mlp1.3.": "multi_modal_projector.linear_2.",
}
"""What transformers' modules have in place of parts of the published names, if it has modules."""

Normalise = Callable[[Tensor], Tensor]


class InternVL(Tower):
    """See `specs.InternVLTower`."""

    def __init__(self, spec: InternVLTower, hidden_size: int, storage: Storage) -> None:
        super().__init__(storage)
        self._spec = spec
        encoder, names = spec.encoder, _PUBLISHED if spec.is_published else _OF_TRANSFORMERS
        width, size, at = encoder.hidden_size, encoder.patch_size, f"{names.encoder}embeddings."
        self._class = self.tensor(f"{at}{names.class_token}", 1, 1, width)
        self._positions = self.tensor(f"{at}{names.positions}", 1, encoder.side**2 + 1, width)
        self._patches = self.make_dense(f"{at}{names.patches}", width, 3, size, size)
        self._layers = [_Layer(spec, layer, names, self) for layer in range(encoder.num_layers)]
        self._final_norm: Normalise | None = None
        if encoder.final_norm:
            final = f"{names.encoder}layernorm"
            self._final_norm = self.make_layer_norm(final, width, encoder.eps)
        merged, (norm, up, down) = width * spec.factor**2, names.projector
        self._norm = self.make_layer_norm(norm, merged, _PROJECTOR_EPS)
        self._up = self.make_dense(up, hidden_size, merged)
        self._down = self.make_dense(down, hidden_size, hidden_size)
        unneeded = range(encoder.num_layers, spec.num_stored)
        self.unused = (
            f"{at}{names.mask_token}",
            *(f"{names.layers}{layer}." for layer in unneeded),
            *(() if encoder.final_norm else (f"{names.encoder}layernorm.",)),
        )
        if spec.has_modules:
            self.name_as_modules(_IN_MODULES)
            self._name_apart()

    def _name_apart(self) -> None:
        """Names the projections to queries, keys and values as transformers' modules have them. The
        name of all three stands for these, as a tensor of a checkpoint may for several."""
        for name in [each for each in self.named_weights if ".qkv." in each]:
            self.module_weights[name] = self.named_weights.pop(name)
            whole, other = self.module_weights[name][0], renamed(name, _IN_MODULES)
            assert isinstance(whole, Tensor), "towers are not quantized"
            del self.module_weights[other]
            for each, rows in zip("qkv", whole.chunk(3), strict=True):
                self.named_weights[other.replace(".qkv.", f".{each}_proj.")] = (rows,)

    def __call__(self, pixels: Pixels, grid: Grid) -> Tensor:
        return torch.cat([self._embed(tile) for tile in tiles_of(pixels, grid)])

    def _embed(self, tile: Tensor) -> Tensor:
        size, side = self._spec.encoder.image_size, self._spec.encoder.side
        patches = patches_of_tile(tile, size, self._spec.encoder.patch_size)
        x = self._patches(patches.to(self.dtype))
        x = torch.cat([self._class[0], x]) + self._positions[0]
        for layer in self._layers:
            x = layer(x)
        x = (x if self._final_norm is None else self._final_norm(x))[1:]
        factor = self._spec.factor
        squares = x.view(side // factor, factor, side // factor, factor, -1).transpose(1, 2)
        merged = self._norm(squares.reshape((side // factor) ** 2, -1))
        return self._down(ACTIVATIONS[self._spec.activation](self._up(merged)))


class _Layer:
    """One layer: attention and an MLP, each behind a norm; what it adds has a factor for each
    element."""

    def __init__(self, spec: InternVLTower, layer: int, names: _Names, tower: Tower) -> None:
        encoder, prefix = spec.encoder, f"{names.layers}{layer}."
        width, attention = encoder.hidden_size, f"{prefix}{names.attention}"
        self._heads, self._activation = encoder.num_heads, ACTIVATIONS[encoder.activation]
        make_norm = tower.make_rms_norm if spec.rms_norms else tower.make_layer_norm
        self._norms: list[Normalise] = [
            make_norm(f"{prefix}{name}", width, encoder.eps) for name in names.norms
        ]
        each = 3 * width // len(names.qkv)
        self._qkv = [
            tower.make_dense(f"{attention}{name}", each, width, bias=spec.attention_bias)
            for name in names.qkv
        ]
        self._qk_norms = [
            tower.make_rms_norm(f"{attention}{name}_norm", width, _QK_EPS)
            for name in ("qk" if spec.qk_norm else "")
        ]
        self._out = tower.make_dense(f"{attention}{names.out}", width, width)
        self._up = tower.make_dense(f"{prefix}mlp.fc1", encoder.inner, width)
        self._down = tower.make_dense(f"{prefix}mlp.fc2", width, encoder.inner)
        self._scales = [tower.tensor(f"{prefix}{name}", width) for name in names.scales]

    def __call__(self, x: Tensor) -> Tensor:
        """Runs the layer: [patches, width] -> [patches, width]."""
        normed = self._norms[0](x)
        width = x.shape[1]
        qkv = [part for dense in self._qkv for part in dense(normed).split(width, -1)]
        for index, norm in enumerate(self._qk_norms):
            qkv[index] = norm(qkv[index])
        q, k, v = (each.view(1, len(x), self._heads, -1) for each in qkv)
        x = x + self._scales[0] * self._out(attend(q, k, v).reshape(x.shape))
        inner = self._activation(self._up(self._norms[1](x)))
        return x + self._scales[1] * self._down(inner)
