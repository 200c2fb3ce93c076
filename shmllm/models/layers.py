"""The layers of a decoder as owners of weights. `ops.Ops` computes with them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.matrices import (
    HEAD_QUANTIZATION,
    QUANTIZATIONS,
    Destination,
    Elsewhere,
    Matrix,
    MixedMatrix,
    WholeMatrix,
)
from shmllm.models.sinusoids import sinusoids
from shmllm.models.specs import NormSpec
from shmllm.models.stored_matrix import Part, make_matrix
from shmllm.models.weight_names import LM_HEAD, TABLE

Allocator = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Returns a tensor of the given shape and dtype, whose contents are undefined."""

Dimension = int | tuple[int, ...]
"""A dimension of a weight: its size, or the sizes of the parts that lie side by side in it. The
ranks of a group divide each part by itself."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """A weight that was allocated.

    Attributes:
        weight: the weight.
        dimensions: its dimensions.
        is_matrix: whether it is the matrix of a matrix product.
    """

    weight: Matrix
    dimensions: tuple[Dimension, ...]
    is_matrix: bool


NamedWeights = dict[str, tuple[Destination, ...]]
"""A mapping from a weight's name in the checkpoint to the views that hold it. Each view has the
checkpoint's shape, and `shape`, `dtype`, `device`, `numel`, `copy_` and `clone`."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Allocates a model's weights.

    Attributes:
        allocate: returns the memory of one tensor.
        dtype: the dtype of the weights.
        quantization: what the matrices of matrix products are rounded to, one of `QUANTIZATIONS`;
            None: they are not.
        stored: how the checkpoint stores each matrix, in the order in which these are allocated;
            None: as floating numbers.
        made: receives the weights in that order; None: nobody asks.
        has_all: whether this process keeps what other stages of a pipeline have, too.
        constants: what `shared_constant` has returned.
    """

    allocate: Allocator
    dtype: torch.dtype
    quantization: str | None = None
    stored: Iterator[Sequence[Part]] | None = None
    made: list[Allocation] | None = None
    has_all: bool = False
    constants: dict[Hashable, Tensor] = field(default_factory=dict)

    def tensor(self, *dimensions: Dimension) -> Tensor:
        """Allocates a weight that is never quantized."""
        weight = self.allocate(sizes_of(dimensions), self.dtype)
        self._record(weight, dimensions)
        return weight

    def float32(self, *dimensions: Dimension) -> Tensor:
        """Allocates a weight that is float32 in a model of any dtype."""
        return replace(self, dtype=torch.float32).tensor(*dimensions)

    def ones(self, width: int) -> Tensor:
        """Returns [width] ones beside the weights: a constant, which nobody loads or updates."""
        return self.allocate((0,), self.dtype).new_ones(width)

    def factors(self, factors: Sequence[float], widths: Sequence[int]) -> Tensor:
        """Returns [sum(widths)] float32 beside the weights, likewise: each factor as often as its
        width says."""
        every = self.allocate((0,), torch.float32).new_ones(sum(widths))
        for part, factor in zip(every.split_with_sizes(list(widths)), factors, strict=True):
            part.fill_(factor)
        return every

    def constant(self, values: Tensor) -> Tensor:
        """Returns the values beside the weights, likewise."""
        return self.allocate((0,), values.dtype).new_empty(values.shape).copy_(values)

    def shared_constant(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Returns values beside the weights, likewise. All who ask for the same key share them."""
        place = key, self.allocate  # a stage of a pipeline has no memory for the layers of others
        if place not in self.constants:
            self.constants[place] = self.constant(make())
        return self.constants[place]

    def zeros(self, width: int) -> Tensor:
        """Returns [width] zeros beside the weights, likewise."""
        return self.allocate((0,), self.dtype).new_zeros(width)

    def zero(self) -> Tensor:
        """Returns [1] float32, a zero beside the weights, likewise."""
        return self.allocate((0,), torch.float32).new_zeros(1)

    def for_head(self) -> Storage:
        """Returns the storage of the LM head."""
        if self.quantization is None:
            return self
        return replace(self, quantization=HEAD_QUANTIZATION)

    def table(self, *dimensions: Dimension) -> WholeMatrix:
        """Allocates a matrix whose rows are looked up. Only a checkpoint quantizes it."""
        return self.exact().whole(*dimensions)

    def kept_if(self, is_own: bool) -> Storage:
        """Returns the storage of what this stage of a pipeline has; if it is another's, it takes no
        memory."""
        return self if is_own or self.has_all else replace(self, allocate=_no_memory)

    def exact(self) -> Storage:
        """Returns the storage of what is only quantized if the checkpoint is."""
        return replace(self, quantization=None)

    def whole(self, *dimensions: Dimension) -> WholeMatrix:
        """Allocates a matrix, or several, of one format."""
        weight = self.matrix(*dimensions)
        assert not isinstance(weight, MixedMatrix), "a checkpoint has it in one tensor"
        return weight

    def matrix(self, *dimensions: Dimension) -> Matrix:
        """Allocates the [out, in] matrix of a matrix product, or [..., out, in] several."""
        weight = self._matrix(sizes_of(dimensions))
        self._record(weight, dimensions, is_matrix=True)
        return weight

    def _matrix(self, shape: tuple[int, ...]) -> Matrix:
        if self.stored is not None:
            return make_matrix(shape, next(self.stored), self.dtype, self.allocate)
        if self.quantization is not None:
            return QUANTIZATIONS[self.quantization].make(shape, self.dtype, self.allocate)
        return self.allocate(shape, self.dtype)

    def _record(
        self, weight: Matrix, dimensions: tuple[Dimension, ...], is_matrix: bool = False
    ) -> None:
        if self.made is not None:
            self.made.append(Allocation(weight, dimensions, is_matrix))


def _no_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def sizes_of(dimensions: Sequence[Dimension]) -> tuple[int, ...]:
    """Returns the shape of a weight of these dimensions."""
    return tuple(each if isinstance(each, int) else sum(each) for each in dimensions)


class Linear:
    """One or several projections of the same input, fused into one product.

    Args:
        in_features: the width of the input.
        out_features: the width of each projection; their outputs lie side by side.
        bias: whether the projections have a bias.
        storage: allocates the weights.
        weight: the matrix, if it exists already.
        parts: the parts of the outputs that ranks divide; None: those of `out_features`.

    Attributes:
        weight: [out, in], as checkpoints store it, one projection after the other.
        bias: [out] or None.
        adapters: for each projection two others, one behind the other, whose result
            `ops.Ops.linear` adds to its output; empty: there are none.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        bias: bool,
        storage: Storage,
        weight: Matrix | None = None,
        parts: tuple[int, ...] | None = None,
    ) -> None:
        self.out_features = tuple(out_features)
        outputs = self.out_features if parts is None else parts
        self.weight = storage.matrix(outputs, in_features) if weight is None else weight
        self.bias = storage.tensor(outputs) if bias else None
        self.adapters: tuple[tuple[Linear, Linear], ...] = ()

    def named_weights(self, *names: str) -> NamedWeights:
        """Returns views of each projection's [out, in] weight and [out] bias, by its name."""
        weights: NamedWeights = {}
        parts: Sequence[Matrix] = self.weight.split_with_sizes(self.out_features)
        for name, part in zip(names, parts, strict=True):
            weights[f"{name}.weight"] = (part,)
        if self.bias is not None:
            biases = self.bias.split_with_sizes(self.out_features)
            for name, bias in zip(names, biases, strict=True):
                weights[f"{name}.bias"] = (bias,)
        return weights

    def adapted(self, out: Tensor) -> Iterator[tuple[Linear, Linear, Tensor]]:
        """Yields its adapters, each with the columns of the output [rows, out] that it adds to."""
        if self.adapters:
            columns = out.split_with_sizes(list(self.out_features), 1)
            for (down, up), part in zip(self.adapters, columns, strict=True):
                yield down, up, part


class Norm:
    """A norm of rows.

    Attributes:
        weight: [width], or [count, width], if so many heads have weights of their own; what
            changes nothing, which no checkpoint has, if the norm has no weight.
        bias: [width] or None.
        spec: what it computes.
    """

    def __init__(
        self, width: int, spec: NormSpec, storage: Storage, count: int | None = None
    ) -> None:
        self.spec = spec
        sizes = (width,) if count is None else (count, width)
        self.weight = (
            storage.tensor(*sizes) if spec.weight else storage.ones(width).sub_(spec.offset)
        )
        self.bias = storage.tensor(width) if spec.bias else None

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """The weights of each head, or of all that the norm reads."""
        return (self.weight,) if self.weight.dim() == 1 else (*self.weight,)

    def named_weights(self, name: str) -> NamedWeights:
        """Returns the destinations of a norm's weight and bias, by the norm's name."""
        weights: NamedWeights = {f"{name}.weight": (self.weight,)} if self.spec.weight else {}
        return weights if self.bias is None else weights | {f"{name}.bias": (self.bias,)}


class HeadNorm(Norm):
    """A norm of heads, whose bias lies behind its weight, if it has one.

    Attributes:
        parameters: the weight, or [2, width], weight and bias.
    """

    def __init__(
        self, width: int, spec: NormSpec, storage: Storage, count: int | None = None
    ) -> None:
        if spec.bias:
            self.spec, self.parameters = spec, storage.tensor(2, width)
            self.weight, self.bias = self.parameters.unbind()
        else:
            super().__init__(width, spec, storage, count)
            self.parameters = self.weight


class TokenEmbedding:
    """The embedding table and the LM head, which shares the table in tied models.

    Attributes:
        table: [vocab, hidden], or the rows of a shard's tokens.
        first_token: the token of the table's first row.
        head: the projection of hidden states to logits.
        positions: the table of position embeddings, [positions, hidden], or None.
        first_position: the row of that table for a request's first token.
        token_types: the table of token types' embeddings, [types, hidden], or None.
        added: [hidden], what is added to the embeddings of all tokens, or None.
        projection: the projection of normalised embeddings to hidden states, or None. All other
            widths are those of embeddings then.
        norm: the norm of the embeddings, or None.
        scale: the factor of the tokens' embeddings, a number of the weights' dtype.
        embeds_scale: the factor of embeddings that a prompt gives itself, likewise.
    """

    def __init__(self, config: ModelConfig, storage: Storage) -> None:
        hidden_size, stage, drafting = config.embedding_width, config.stage, config.drafting
        self.first_token, num_tokens = config.own_tokens.start, len(config.own_tokens)
        self.tied = config.tie_word_embeddings
        is_shared = self.tied and storage.quantization is None
        is_own = stage.is_first or (is_shared and stage.is_last)
        has_table = drafting is None or drafting.has_table
        has_head = drafting is None or drafting.has_head
        of_table = storage.kept_if(has_table and is_own)
        of_head = storage.kept_if(has_head and stage.is_last).for_head()
        if config.lm_head_float32:
            of_head = replace(of_head, dtype=torch.float32)
        self.table = of_table.table(num_tokens, hidden_size)
        shared = self.table if is_shared else None
        self.head: Linear | None = None
        if config.lm_head:
            width = config.hidden_size
            num_rows = num_tokens if drafting is None else config.num_logits
            self.head = Linear(width, [num_rows], config.lm_head_bias, of_head, shared)
        of_first = storage.kept_if(stage.is_first)
        learned = config.num_learned_positions if config.sinusoids is None else 0
        lengths = learned, config.num_token_types, config.num_task_types
        self.positions, self.token_types, self._task_types = (
            of_first.tensor(length, hidden_size) if length else None for length in lengths
        )
        self._learns_positions, self._num_outputs = config.sinusoids is None, config.num_outputs
        if config.sinusoids is not None:
            count, first = config.num_learned_positions, -config.num_encoded
            table = sinusoids(count, hidden_size, first=first, kind=config.sinusoids)
            self.positions = of_first.constant(table.to(storage.dtype))
        self.added = None if self._task_types is None else self._task_types[0]
        self.first_position = config.first_position
        self.norm = Norm(hidden_size, config.norm, of_first) if config.embedding_norm else None
        self.projection: Linear | None = None
        if config.embedding_size is not None:
            self.projection = Linear(hidden_size, [config.hidden_size], True, of_first)
        self.scale = rounded(config.embedding_scale, storage.dtype)
        self.embeds_scale = rounded(config.embeds_scale, storage.dtype)

    @property
    def copied_head(self) -> Matrix | None:
        """The rounded copy of the table that the LM head of a tied model has, if it does."""
        head = self.head.weight if self.head is not None and self.tied else None
        return None if head is self.table else head

    def _outputs(self, rows: Matrix, num_outputs: int) -> Destination:
        """Returns the destination of the first rows of the LM head, those that a checkpoint has."""
        own = min(max(num_outputs - self.first_token, 0), rows.shape[0])
        if own == 0:  # another rank's
            return Elsewhere(torch.empty((num_outputs, rows.shape[1]), device="meta"))
        return rows.split_with_sizes([own, rows.shape[0] - own])[0]

    def named_weights(self) -> NamedWeights:
        """Returns the destinations of the matrices, each [rows, hidden], and of the LM head's bias.

        A tied model has one name for table and head. In a quantized tied model that name has two
        destinations: the table, and the rounded copy that the LM head multiplies with.
        """
        weights: NamedWeights = {TABLE: (self.table,)}
        if self.head is not None:
            weights |= self.head.named_weights("lm_head")
            if self._num_outputs is not None:
                weights[LM_HEAD] = (self._outputs(self.head.weight, self._num_outputs),)
            if self.tied:
                del weights[LM_HEAD]
        if self.copied_head is not None:
            weights[TABLE] = (self.table, self.copied_head)
        if self.positions is not None and self._learns_positions:
            weights["model.embed_positions.weight"] = (self.positions,)
        if self.token_types is not None:
            weights["model.embed_token_types.weight"] = (self.token_types,)
        if self._task_types is not None:
            weights["model.embed_task_types.weight"] = (self._task_types,)
        if self.norm is not None:
            weights |= self.norm.named_weights("model.embed_norm")
        if self.projection is not None:
            weights |= self.projection.named_weights("model.embed_projection")
        return weights


def rounded(number: float, dtype: torch.dtype) -> float:
    """Returns the number of a dtype that is nearest."""
    return float(torch.tensor(number, dtype=dtype))
