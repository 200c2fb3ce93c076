"""What all towers have in common: their weights by name, and the operations on them.

An operation is a plain function of torch, so towers run on each kind of device. This module must
not know families.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.layers import NamedWeights, Storage
from shmllm.models.matrices import joined
from shmllm.models.vision.encoder_spec import VisionActivation
from shmllm.models.vision.grids import Grid
from shmllm.models.weight_names import BOUND_SUFFIXES, renamed, tower_name

Projection = Callable[[Tensor], Tensor]
Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[VisionActivation, Callable[[Tensor], Tensor]] = {
    "quick_gelu": _quick_gelu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": F.silu,
    "relu": F.relu,
}


@dataclass(slots=True)
class Products:
    """How a tower multiplies. Its projections refer to it and not to the tower, which refers to
    them: a cycle would keep the weights of a closed engine until Python collects cycles.

    Attributes:
        multiply: computes ``x @ weight.T + bias`` of [rows, in], [out, in] and [out] or None.
        keeps_rows_apart: whether the bits of a row of a product do not depend on the others.
    """

    multiply: Multiply = F.linear
    keeps_rows_apart: bool = False


@dataclass(frozen=True, slots=True)
class Dense:
    """A projection.

    Attributes:
        weight: [out, in], or a checkpoint's shape [out, ...] of as many elements.
        bias: [out] or None.
        products: those of the tower that it belongs to.
    """

    weight: Tensor
    bias: Tensor | None
    products: Products

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [rows, out] of ``x`` [rows, in]."""
        return self.products.multiply(x, self.weight.flatten(1), self.bias)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """A norm (Ba et al., 2016).

    Attributes:
        weight: [width].
        bias: [width]; None: none.
        eps: added to the variance.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Returns ``x`` [rows, width], normalised."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class FixedNorm:
    """A norm by means and variances that training has found (Ioffe and Szegedy, 2015).

    Attributes:
        weight, bias, mean, variance: [width].
        eps: added to the variance.
    """

    weight: Tensor
    bias: Tensor
    mean: Tensor
    variance: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Returns ``x`` [rows, width], normalised."""
        factors = torch.rsqrt(self.variance.float() + self.eps) * self.weight.float()
        normed: Tensor = (x.float() - self.mean.float()) * factors + self.bias.float()
        return normed.to(x.dtype)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """A norm (Zhang and Sennrich, 2019), computed in float32.

    Attributes:
        weight: [width]; None: none.
        eps: added to the mean square.
        offset: added to the weights.
    """

    weight: Tensor | None
    eps: float
    offset: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        """Returns ``x`` [rows, width], normalised."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            normed = normed * (self.offset + self.weight.float())
        return normed.to(x.dtype)


@dataclass(frozen=True, slots=True)
class ClippedDense:
    """A projection with bounds of its inputs and outputs.

    Attributes:
        dense: the projection.
        of_inputs, of_outputs: the least and the largest of them.
    """

    dense: Dense
    of_inputs: list[Tensor]
    of_outputs: list[Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [rows, out] of ``x`` [rows, in]."""
        return self.dense(x.clamp(*self.of_inputs)).clamp(*self.of_outputs)


class Tower(ABC):
    """A tower. A subclass allocates its weights with `tensor` and the methods that begin with
    "make"; a weight is known under the name that it is allocated with.

    Args:
        storage: allocates the weights, none of which is quantized or divided between ranks.

    Attributes:
        dtype: the dtype of the weights and of the results.
        input_dtype: the dtype in which it needs its inputs.
        products: how it multiplies.
        named_weights: the destinations of all weights by their names in checkpoints, with the
            prefixes in `weight_names.TOWER_PREFIXES`.
        module_weights: the destinations of what transformers' modules have in another order than
            checkpoints, by their names there.
        neutral_weights: the weights of norms, with the value that changes nothing.
        unused: the prefixes of names of weights that a checkpoint has and the tower does not need.
        prefixes: further prefixes of names in checkpoints, and what they stand for.
    """

    unused: tuple[str, ...] = ()
    prefixes: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.dtype = self.input_dtype = storage.dtype
        self.products = Products()
        self.named_weights: NamedWeights = {}
        self.module_weights: NamedWeights = {}
        self.neutral_weights: list[tuple[Tensor, float]] = []

    @abstractmethod
    def __call__(self, inputs: Tensor, grid: Grid) -> Tensor:
        """Computes the embeddings of one item. Its bits depend on this item alone.

        Args:
            inputs: on the weights' device, of any floating dtype: of an image its pixels, [tiles,
                3, height, width], normalised, or of several tiles a sequence of them; of a sound
                its features, [frames, features].
            grid: the shape of the item, see `params.items.Item`.

        Returns:
            [embeddings, (1 + num_levels) * hidden], in the weights' dtype.

        Raises:
            ValueError: the inputs do not have the size that the tower is for, or differ from the
                grid.
        """

    def embed_frame(self, frame: Tensor, grid: Grid) -> Tensor:
        """Computes the embeddings of a frame of a video, or of several that become one. Arguments,
        result and errors are those of `__call__`."""
        return self(frame, grid)

    @property
    def behind_video(self) -> Tensor | None:
        """The embeddings behind the last frame of a video, [embeddings, hidden]; None: there are
        none."""
        return None

    def owns(self, name: str) -> bool:
        """Whether a weight of a checkpoint is one of the tower's, or should be: it has the prefix
        of one, and is not among those that the tower does not need."""
        known = (*self.named_weights, *self.module_weights)
        prefixes = {each.partition(".")[0] for each in known}
        return name.partition(".")[0] in prefixes and not name.startswith(self.unused)

    def name_as_modules(self, parts: Mapping[str, str]) -> None:
        """Gives all weights the names that transformers' modules have, too.

        Args:
            parts: what these have in place of parts of names in checkpoints.
        """
        self.module_weights |= {
            renamed(name, parts): views for name, views in self.named_weights.items()
        }

    def name_in_files(self, parts: Mapping[str, str]) -> None:
        """Gives all weights the names of checkpoints; those that they have are the names of
        transformers' modules.

        Args:
            parts: what checkpoints have in place of parts of names.
        """
        self.module_weights = self.named_weights
        self.named_weights = {
            renamed(name, parts): views for name, views in self.module_weights.items()
        }

    def name_joined(self, parts: Mapping[str, str], whole: str) -> None:
        """Names the tensors that checkpoints have for queries, keys and values which are one
        projection, behind `name_in_files`. Each of the three keeps its name of transformers'
        modules, as the name of all may stand for several.

        Args:
            parts: those of `name_in_files`.
            whole: what checkpoints have in place of "q_proj".
        """
        for name in [each for each in self.module_weights if ".q_proj." in each]:
            rows = []
            for each in "qkv":
                own = name.replace(".q_proj.", f".{each}_proj.")
                del self.named_weights[renamed(own, parts)]
                self.named_weights[own] = self.module_weights.pop(own)
                rows += [view for view in self.named_weights[own] if isinstance(view, Tensor)]
            in_files = renamed(name, parts).replace(".q_proj.", f".{whole}.")
            self.module_weights[in_files] = (joined(rows),)

    def known_name(self, name: str) -> str | None:
        """Returns the name under which the tower knows a checkpoint's tensor; None: it is none of
        its weights."""
        own = tower_name(name, self.prefixes)
        return own if own is not None and self.owns(own) else None

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Allocates a weight."""
        weight = self._storage.tensor(*shape)
        self.named_weights[name] = (weight,)
        return weight

    def make_dense(self, name: str, outputs: int, *inputs: int, bias: bool = True) -> Dense:
        """Allocates a projection; ``inputs`` are the other dimensions that its weight has in
        checkpoints."""
        weight = self.tensor(f"{name}.weight", outputs, *inputs)
        return Dense(weight, self.tensor(f"{name}.bias", outputs) if bias else None, self.products)

    def make_joined(self, names: Sequence[str], outputs: int, inputs: int) -> Dense:
        """Allocates one projection of several with these names in checkpoints; each has `outputs`
        of its results."""
        whole = len(names) * outputs
        weight, bias = self._storage.tensor(whole, inputs), self._storage.tensor(whole)
        dense = Dense(weight, bias, self.products)
        for kind, tensor in (("weight", weight), ("bias", bias)):
            for name, rows in zip(names, tensor.split(outputs), strict=True):
                self.named_weights[f"{name}.{kind}"] = (rows,)
        return dense

    def make_clipped(self, name: str, outputs: int, inputs: int, clips: bool) -> Projection:
        """Allocates a projection without a bias that has bounds, as transformers' clippable ones;
        without `clips` there are none."""
        dense = self.make_dense(f"{name}.linear", outputs, inputs, bias=False)
        if not clips:
            return dense
        bounds = [self.tensor(f"{name}{suffix}") for suffix in BOUND_SUFFIXES]
        largest = torch.finfo(self.dtype).max
        self.neutral_weights += zip(bounds, (-largest, largest) * 2, strict=True)
        return ClippedDense(dense, bounds[:2], bounds[2:])

    def make_layer_norm(self, name: str, width: int, eps: float, bias: bool = True) -> LayerNorm:
        """Allocates a LayerNorm."""
        weight = self.tensor(f"{name}.weight", width)
        self.neutral_weights.append((weight, 1.0))
        return LayerNorm(weight, self.tensor(f"{name}.bias", width) if bias else None, eps)

    def make_fixed_norm(self, name: str, width: int, eps: float) -> FixedNorm:
        """Allocates a FixedNorm, which is BatchNorm1d in transformers' modules."""
        weight, bias, mean, variance = (
            self.tensor(f"{name}.{each}", width)
            for each in ("weight", "bias", "running_mean", "running_var")
        )
        self.neutral_weights += [(weight, 1.0), (variance, 1.0)]
        return FixedNorm(weight, bias, mean, variance, eps)

    def make_rms_norm(self, name: str, width: int, eps: float, offset: float = 0.0) -> RMSNorm:
        """Allocates an RMSNorm."""
        weight = self.tensor(f"{name}.weight", width)
        self.neutral_weights.append((weight, 1.0 - offset))
        return RMSNorm(weight, eps, offset)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, bias: Tensor | None = None
) -> Tensor:
    """Returns what places of a sequence, such as patches, read from one another: each attends to
    all of them.

    Args:
        q: [sequences, places, heads, head_dim].
        k: the same; it may have other places.
        v: as `k`.
        scale: the factor of the scores; None: head_dim**-0.5.
        bias: [sequences, heads, places, places of k], added to the scores; None: nothing is.

    Returns:
        As `q`.
    """
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, bias, scale=scale).transpose(1, 2)
