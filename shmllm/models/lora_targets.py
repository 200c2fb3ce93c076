"""The modules of a model that low-rank adapters can change: those that `Ops.linear` computes.

This module owns the way from a module's name in transformers to columns of a fused product. It must
not know the files of adapters, nor devices.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from shmllm.models.decoder import DecoderModel
from shmllm.models.layers import Linear
from shmllm.models.matrices import Destination, WholeMatrix, addresses, len_of, parts_of
from shmllm.models.ops import Ops

_WEIGHT = ".weight"


class Columns(NamedTuple):
    """Consecutive outputs of a module.

    Attributes:
        first: the first of them, among the module's outputs.
        size: how many they are.
        column: where they begin in the outputs of the product.
    """

    first: int
    size: int
    column: int


@dataclass(frozen=True, slots=True)
class Target:
    """Where a module is computed.

    Attributes:
        product: the index of the product.
        part: the index of the module among those of the product.
        in_features: the width of its input.
        out_features: the width of its output.
        columns: its outputs among those of the product.
    """

    product: int
    part: int
    in_features: int
    out_features: int
    columns: tuple[Columns, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """A product that adapters can add to.

    Attributes:
        in_features: the width of its input.
        out_features: the width of its output.
        num_parts: the number of modules that it computes.
    """

    in_features: int
    out_features: int
    num_parts: int


class LoraTargets:
    """
    Args:
        model: the model.

    Attributes:
        products: the products, in the order in which a step computes them.
    """

    def __init__(self, model: DecoderModel) -> None:
        linears = computed_linears(model)
        self._model = model
        self._index = {id(linear): index for index, linear in enumerate(linears)}
        self._targets = _targets_of(model, linears)
        num_parts = [0] * len(linears)
        for target in self._targets.values():
            num_parts[target.product] += 1
        self.products = [
            Product(linear.weight.shape[1], linear.weight.shape[0], parts)
            for linear, parts in zip(linears, num_parts, strict=True)
        ]

    def index_of(self, linear: Linear) -> int | None:
        """Returns the index of a product; None: adapters cannot add to it."""
        return self._index.get(id(linear))

    def target_of(self, module: str) -> Target | None:
        """Returns the target of a module, by its name in transformers' model. None: the model has
        no such module, or computes it otherwise."""
        known = self._model.known_name(module + _WEIGHT)
        return None if known is None else self._targets.get(known.removesuffix(_WEIGHT))

    @property
    def names(self) -> Sequence[str]:
        """The names of all modules."""
        return list(self._targets)


class _Collector:
    """Stands in for `Ops`: it computes nothing, and keeps the arguments of `linear`."""

    def __init__(self) -> None:
        self.linears: dict[int, Linear] = {}

    def linear(self, x: object, linear: Linear) -> None:
        self.linears[id(linear)] = linear

    def __getattr__(self, operation: str) -> Callable[..., None]:
        return lambda *arguments, **options: None


def computed_linears(model: DecoderModel) -> list[Linear]:
    """Returns the projections that a step computes by `Ops.linear`, in their order."""
    collector = _Collector()
    model.forward(cast(Ops, collector))
    return list(collector.linears.values())


class _Span(NamedTuple):
    """Some rows of a product's weights in memory."""

    begin: int
    end: int
    product: int
    column: int
    row_bytes: int
    in_features: int


def _memory(part: WholeMatrix) -> Tensor:
    return part if isinstance(part, Tensor) else part.integers


def _spans_of(linears: Sequence[Linear]) -> list[_Span]:
    spans = []
    for product, linear in enumerate(linears):
        column = 0
        for part in parts_of(linear.weight):
            memory, rows = addresses(part), len_of(part)
            row_bytes = _memory(part).nbytes // rows
            spans.append(
                _Span(memory.start, memory.stop, product, column, row_bytes, part.shape[1])
            )
            column += rows
    return sorted(spans)


def _targets_of(model: DecoderModel, linears: Sequence[Linear]) -> dict[str, Target]:
    spans, num_parts = _spans_of(linears), [0] * len(linears)
    found: dict[str, Target] = {}
    known: dict[tuple[Columns, ...], dict[int, Target]] = {}
    for name, views in model.destinations().items():
        placed = _place(views, spans) if name.endswith(_WEIGHT) else None
        if placed is None:
            continue
        span, out_features, columns = placed
        same = known.setdefault(columns, {})  # a module may have two names
        if span.product not in same:
            part = num_parts[span.product]
            target = Target(span.product, part, span.in_features, out_features, columns)
            same[span.product] = target
            num_parts[span.product] += 1
        found[name.removesuffix(_WEIGHT)] = same[span.product]
    return found


def _place(
    views: Sequence[Destination], spans: Sequence[_Span]
) -> tuple[_Span, int, tuple[Columns, ...]] | None:
    """Returns the first span of a weight's destinations, the number of its rows, and its columns;
    None: it does not lie within the rows of one product."""
    columns: list[Columns] = []
    num_rows, first_span = 0, None
    for view in views:
        num_rows = 0
        for part in parts_of(view):
            begin = _memory(part).data_ptr()
            span = _span_at(begin, spans)
            first_span = first_span or span
            if span is None or first_span is None or span.product != first_span.product:
                return None
            count = part.numel() // span.in_features
            column = span.column + (begin - span.begin) // span.row_bytes
            columns.append(Columns(num_rows, count, column))
            num_rows += count
    if first_span is None:
        return None
    return first_span, num_rows, tuple(_merged(columns))


def _span_at(address: int, spans: Sequence[_Span]) -> _Span | None:
    index = bisect_right(spans, address, key=lambda span: span.begin) - 1
    return spans[index] if index >= 0 and address < spans[index].end else None


def _merged(columns: Sequence[Columns]) -> list[Columns]:
    """Joins neighbours."""
    merged: list[Columns] = []
    for each in columns:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.first + last.size == each.first
            and last.column + last.size == each.column
        ):
            merged[-1] = Columns(last.first, last.size + each.size, last.column)
        else:
            merged.append(each)
    return merged


def rows_in_order(values: Tensor, columns: Sequence[Columns]) -> list[tuple[Tensor, int]]:
    """Returns the rows [count, ...] of a module's matrix [out, ...] for each stretch of columns
    that lies together in the product, and the first column of it.

    Heads whose queries and gates a checkpoint has side by side lie apart here: their rows are
    gathered, so that few stretches are left.
    """
    stretches: list[list[Columns]] = []
    for each in sorted(columns, key=lambda each: each.column):
        last = stretches[-1][-1] if stretches else None
        if last is not None and last.column + last.size == each.column:
            stretches[-1].append(each)
        else:
            stretches.append([each])
    return [
        (torch.cat([values[each.first : each.first + each.size] for each in some]), some[0].column)
        for some in stretches
    ]
