"""Layers of a dense decoder for the kernel that computes all of them: random ones, or empty ones
for what only compiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shmllm_kernels.gpu.decoder import DecoderLayers, DecoderMemory, DecoderNumbers, LayerOperands
from shmllm_kernels.gpu.few_rows import MAX_ROWS
from shmllm_kernels.gpu.row_operands import Activation

Make = Callable[..., Tensor]
"""Takes sizes, and `scale`, and returns a tensor."""

GATED = Activation("silu", True)


@dataclass(frozen=True)
class DecoderShape:
    """The shape of all layers.

    Attributes:
        hidden, heads, kv_heads, dim, inner: the sizes.
        rotary_dim: how many elements of a head are rotated.
        has_biases: whether matrices have biases.
        has_norms: whether heads have norms.
        rotates: for each layer whether its heads are rotated.
        windows: for each layer its window.
        activation: the activation of the MLP.
        offset: what norms add to their weights.
        residual_scale: the factor of what is added to the residual stream.
        interleaved: whether neighbouring elements are rotated together.
        has_posts: whether there are norms behind both blocks.
        soft_cap: the cap of scores, or None.
    """

    hidden: int = 48
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    inner: int = 40
    rotary_dim: int = 16
    has_biases: bool = False
    has_norms: bool = False
    rotates: tuple[bool, ...] = (True, True)
    windows: tuple[int | None, ...] = (None, None)
    activation: Activation = GATED
    offset: float = 0.0
    residual_scale: float = 1.0
    interleaved: bool = False
    has_posts: bool = False
    soft_cap: float | None = None

    @property
    def width(self) -> int:
        """The width of all query, key and value heads."""
        return (self.heads + 2 * self.kv_heads) * self.dim

    @property
    def numbers(self) -> DecoderNumbers:
        scale = self.dim**-0.5
        return DecoderNumbers(
            1e-5, self.offset, 1e-6, self.offset, scale, self.residual_scale, self.activation,
            self.interleaved, self.soft_cap,
        )  # fmt: skip


class DecoderCase:
    """The layers, and a step of some requests.

    Args:
        shape: their shape.
        make: makes weights, angles, keys and values, all of one dtype.
        contexts: for each request its tokens with the new ones.
        new: for each request how many of them are new.
        block_size: the tokens of a block.
        kept: the dtype of keys and values.

    Attributes:
        layers: the operands of each layer.
        starts, contexts: what a step has of each request.
        tokens: the number of new tokens.
    """

    def __init__(
        self,
        shape: DecoderShape,
        make: Make,
        contexts: list[int],
        new: list[int],
        block_size: int = 4,
        kept: torch.dtype | None = None,
    ) -> None:
        self.shape, self.tokens = shape, sum(new)
        device, per_request = make(1).device, -(-max(contexts) // block_size)

        def integers(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        self.starts = integers([sum(new[:count]) for count in range(len(new) + 1)])
        self.contexts = integers(contexts)
        num_blocks = 1 + len(contexts) * per_request
        ids = list(range(num_blocks - 1, 0, -1))
        table = integers(ids).view(len(contexts), per_request)
        places = [
            (row, context - count + index)
            for row, (context, count) in enumerate(zip(contexts, new, strict=True))
            for index in range(count)
        ]
        slots = [
            ids[row * per_request + at // block_size] * block_size + at % block_size
            for row, at in places
        ]
        slots_of = integers(slots, torch.int64)
        cache = num_blocks, block_size, shape.kv_heads, shape.dim
        angles = [make(MAX_ROWS, shape.rotary_dim) for _ in range(2)]

        def stored() -> Tensor:
            return make(*cache) if kept is None else make(*cache).to(kept)

        def layer(rotates: bool, window: int | None) -> LayerOperands:
            hidden, inner, width = shape.hidden, shape.inner, shape.width
            up = (2 if shape.activation.is_gated else 1) * inner
            cos, sin = angles if rotates else (None, None)
            query_norm, key_norm = (make(shape.dim) if shape.has_norms else None for _ in range(2))

            def matrix(rows: int, columns: int) -> tuple[Tensor, Tensor | None]:
                bias = make(rows) if shape.has_biases else None
                return make(rows, columns, scale=columns**-0.5), bias

            return LayerOperands(
                make(hidden),
                *matrix(width, hidden),
                *matrix(hidden, shape.heads * shape.dim),
                make(hidden),
                *matrix(up, hidden),
                *matrix(hidden, inner),
                make(hidden) if shape.has_posts else None,
                make(hidden) if shape.has_posts else None,
                stored(),
                stored(),
                table,
                slots_of,
                cos,
                sin,
                query_norm,
                key_norm,
                window,
            )

        self.layers = [layer(*each) for each in zip(shape.rotates, shape.windows, strict=True)]

    def copied(self) -> list[LayerOperands]:
        """Return the layers with keys and values of their own."""
        return [
            replace(layer, keys=layer.keys.clone(), values=layer.values.clone())
            for layer in self.layers
        ]

    def decoder(self, layers: list[LayerOperands]) -> DecoderLayers:
        return DecoderLayers(layers, self.shape.numbers)

    def memory(self, like: Tensor, contents: float = 0.0) -> DecoderMemory:
        """Return the memory of a launch, of a tensor's dtype and device."""
        shape = self.shape
        heads, attended, activated = (
            like.new_full((MAX_ROWS, width), contents)
            for width in (shape.width, shape.heads * shape.dim, shape.inner)
        )
        counters = torch.zeros(2, dtype=torch.int32, device=like.device)
        spare = like.new_full((MAX_ROWS, shape.hidden), contents)
        products = like.new_zeros(2, MAX_ROWS, shape.hidden)
        products[1] = contents
        return DecoderMemory(heads, attended, activated, counters, spare, products)
