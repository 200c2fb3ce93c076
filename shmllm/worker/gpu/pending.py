"""What a step of few tokens has not launched yet, because its neighbour may compute it, too.

`FusedOps` makes these values, passes them to the decoder as results of operations, and launches
them. This module owns what is known of each until then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shmllm.models.experts import MoE
from shmllm.models.layers import Linear, Norm
from shmllm.models.routing import Routing
from shmllm_kernels.gpu.shared_expert import SharedExpert


@dataclass(frozen=True, slots=True)
class Pair:
    """The second part of a sum of two norms.

    Attributes:
        x: the rows of the second norm.
        norm: the second norm.
        first_norm: the norm of the rows of the first part.
    """

    x: Tensor
    norm: Norm
    first_norm: Norm


@dataclass(slots=True, eq=False)
class Addend:
    """What is to be added to the residual stream: a norm of rows.

    Attributes:
        x: the rows, or those of the first part of a sum of two norms, whose norm is added.
        norm: the norm that is added.
        scale: its factor in the sum.
        pair: the second part of that sum, or None.
        factor: [1], the factor of the stream behind the sum, or None.
    """

    x: Tensor
    norm: Norm
    scale: float
    pair: Pair | None = None
    factor: Tensor | None = None

    @property
    def places(self) -> set[int]:
        """The addresses of the rows, which nothing may overwrite until they are added."""
        rows = [self.x] if self.pair is None else [self.x, self.pair.x]
        return {each.data_ptr() for each in rows}


@dataclass(slots=True, eq=False)
class Stream:
    """The residual stream.

    Attributes:
        given: the tensor by which the decoder knows it.
        now: where it is.
        spare: where a product may write it with what is added to it.
        added: the norm of a product that has not been added; or None.
        deferred: what has not been added since a norm of the stream is still to be read, with the
            factors; behind `added`.
    """

    given: Tensor
    now: Tensor
    spare: Tensor
    added: Addend | None = None
    deferred: list[tuple[Any, float]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Normed:
    """A norm of the residual stream, times a factor, that has not been launched, or has been: then
    it has a value. Until then nothing is added to the stream but what is deferred."""

    stream: Stream
    norm: Norm
    factor: float = 1.0
    value: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a product can compute it."""
        return self.value is None and self.factor == 1


@dataclass(slots=True, eq=False)
class Product:
    """A product that has not been launched."""

    x: Any
    linear: Linear


Shared = Tensor | SharedExpert | None
"""A shared expert: its output, [tokens, hidden], or its weights, if it is computed with the others;
None: there is none."""


@dataclass(slots=True, eq=False)
class Experts:
    """The sum of each token's experts, which has not been launched.

    Attributes:
        x, routing, moe: see `models.ops.Ops.experts`.
        shared: the shared one.
    """

    x: Tensor
    routing: Routing
    moe: MoE
    shared: Shared


@dataclass(slots=True, eq=False)
class NormedProduct:
    """An RMSNorm of a product, of a sum of experts, or of a sum of norms of these, neither of which
    has been launched, unless there is a value; or of rows.

    Attributes:
        wider: rows whose first columns are those of the norm, which stay as they are; None: the
            norm may take the place of what it reads.
    """

    product: Product | Experts | SumOfNorms | Tensor
    norm: Norm
    value: Tensor | None = None
    wider: Tensor | None = None

    @property
    def read(self) -> Product | Experts | SumOfNorms | Tensor:
        """What the norm reads when it is launched by itself."""
        return self.product if self.wider is None else self.wider


@dataclass(slots=True, eq=False)
class SumOfNorms:
    """The sum of two norms of products, which have not been launched."""

    first: NormedProduct
    second: NormedProduct


@dataclass(slots=True, eq=False)
class Route:
    """A choice of experts that has not been launched, because the norm that the experts read is
    another one than the router's."""

    x: Normed
    moe: MoE


@dataclass(frozen=True, slots=True)
class Read:
    """What a product reads.

    Attributes:
        x: rows.
        norm: the norm of the rows, or None.
        stream: the stream if the rows are its, with what is added to it; else None.
    """

    x: Tensor
    norm: Norm | None = None
    stream: Stream | None = None


def reads_norm(x: Any) -> bool:
    """Return whether a result that has not been launched reads a norm of the stream."""
    if isinstance(x, NormedProduct):
        return x.value is None and reads_norm(x.product)
    if isinstance(x, SumOfNorms):
        return reads_norm(x.first) or reads_norm(x.second)
    return isinstance(x, Product) and isinstance(x.x, Normed)
