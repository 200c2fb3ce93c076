"""Weights and the few layers that own them. Plain classes: a call costs one Python frame.

A matrix is stored as [in, out]: for a single row of float32 ``x @ w`` is faster with that
layout than ``F.linear`` on a CPU, and equal on a GPU. More rows meet what `products` derives.
See `as_checkpoints_do` for those that no row meets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.models.products import MakeProduct, PlainProduct, Product, only_packed

Allocator = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Returns storage for one weight of a shape and dtype, contents undefined."""


def as_checkpoints_do(allocate: Allocator) -> Allocator:
    """Stores matrices of which only a pack is read as [out, in]. A pack is made from that in
    half the time, and new weights are copied there without being transposed."""

    def take(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if len(shape) == 2 and only_packed(math.prod(shape), dtype):
            return allocate(shape[::-1], dtype).t()
        return allocate(shape, dtype)

    return take


NamedWeights = dict[str, tuple[Tensor, ...]]
"""Checkpoint name to the views, each of the checkpoint's shape, that hold the weight."""


class Linear:
    """One or several projections of the same input, fused into one product.

    Args:
        in_features: width of the input.
        out_features: width of each projection; their outputs lie side by side.
        bias: whether they have a bias.
        dtype: of weights, input and output.
        allocate: gives the storage.

    Attributes:
        product: multiplies with the weight.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        bias: bool,
        dtype: torch.dtype,
        allocate: Allocator,
    ) -> None:
        self.out_features = tuple(out_features)
        width = sum(self.out_features)
        self.weight = allocate((in_features, width), dtype)
        self.bias = allocate((width,), dtype) if bias else None
        self.product: Product = PlainProduct(self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, sum(out_features)]."""
        out = self.product(x)
        return out if self.bias is None else out.add_(self.bias)

    def use(self, make: MakeProduct) -> Product:
        """Multiply in another way from now on; returns it, nothing derived yet."""
        self.product = make(self.weight)
        return self.product

    def named_weights(self, *names: str) -> NamedWeights:
        """Views of each projection's [out, in] weight and [out] bias, under these names."""
        weights: NamedWeights = {}
        parts = self.weight.split_with_sizes(self.out_features, 1)
        for name, part in zip(names, parts, strict=True):
            weights[f"{name}.weight"] = (part.t(),)
        if self.bias is not None:
            for name, bias in zip(
                names, self.bias.split_with_sizes(self.out_features), strict=True
            ):
                weights[f"{name}.bias"] = (bias,)
        return weights


class TokenEmbedding:
    """The embedding table and the product that scores every token of the vocabulary, which
    shares the table in tied models."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        tied: bool,
        dtype: torch.dtype,
        allocate: Allocator,
    ) -> None:
        self.tied = tied
        self.table = allocate((vocab_size, hidden_size), dtype)
        self.head = self.table if tied else allocate((vocab_size, hidden_size), dtype)
        self.product: Product = PlainProduct(self.head.t())

    def embed(self, token_ids: Tensor) -> Tensor:
        """[tokens] int64 -> [tokens, hidden]."""
        return F.embedding(token_ids, self.table)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab] float32."""
        return self.product(hidden).float()

    def use(self, make: MakeProduct) -> Product:
        """Score in another way from now on; returns it, nothing derived yet."""
        self.product = make(self.head.t())
        return self.product

    def named_weights(self) -> NamedWeights:
        """Both matrices as [vocab, hidden]; a tied model has one."""
        table: NamedWeights = {"model.embed_tokens.weight": (self.table,)}
        return table if self.tied else table | {"lm_head.weight": (self.head,)}
