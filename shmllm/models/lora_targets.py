"""The modules of a model that low-rank adapters can change: those that `Ops.linear`, `Ops.mlp`,
`Ops.route` and `Ops.experts` compute.

This module owns the way from a parameter's name in transformers to columns of a fused product, or
of a product for each expert. It must not know the files of adapters, nor devices.

Names, and columns of products, are those of the whole model, also in a rank of a group: its
products say which share of them it has.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import NamedTuple

from torch import Tensor

from shmllm.models.attention import Attention
from shmllm.models.build import without_memory
from shmllm.models.computed_linears import Computed, computed_linears
from shmllm.models.decoder import DecoderModel
from shmllm.models.experts import ExpertLinear
from shmllm.models.layers import Linear
from shmllm.models.lora_chosen import WEIGHT, chosen_names
from shmllm.models.matrices import (
    Destination,
    Matrix,
    WholeMatrix,
    addresses,
    len_of,
    parts_of,
)
from shmllm.models.shares import Share


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
    """Where a module, or one expert's part of a parameter, is computed.

    Attributes:
        product: the index of the product.
        part: the index of the module among those of the product; 0 for all of its modules together.
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
        share: which rows and columns of the whole matrix [out, in] a rank has; None: all.
    """

    in_features: int
    out_features: int
    num_parts: int
    share: Share | None = None


class LoraTargets:
    """
    Args:
        model: the model, or a rank's part of it.
        chosen: the modules that adapters may change, see `chosen_names`; None: all.

    Attributes:
        products: the products, in the order in which a step computes them. Those of the experts of
            one `ExpertLinear` follow one another.

    Raises:
        EngineStartError: no module is chosen.
    """

    def __init__(self, model: DecoderModel, chosen: Sequence[str] | None = None) -> None:
        whole = model if model.config.whole is None else without_memory(model.config.whole)[0]
        linears = computed_linears(whole)
        matrices = [_matrices_of(linear) for linear in linears]
        firsts = [0, *accumulate(map(len, matrices))]
        products = list(chain.from_iterable(matrices))
        self._model = whole
        fixed = _fixed_columns(whole, linears, firsts)
        self._targets = {
            name: targets
            for name, targets in _targets_of(whole, products).items()
            if not any(_is_fixed(target, fixed) for target in targets)
        } | _targets_of_all(whole, linears, firsts)
        self._left_out: frozenset[str] = frozenset()
        if chosen is not None:
            every = frozenset(self._targets)
            self._targets = _chosen_of(self._targets, chosen)
            self._left_out = every - self._targets.keys()
        num_parts = [0] * len(products)
        for target in chain.from_iterable(self._targets.values()):
            num_parts[target.product] = max(num_parts[target.product], target.part + 1)
        own = computed_linears(model)
        self._index = {
            id(linear): first
            for linear, first in zip(own, firsts, strict=False)
            if num_parts[first] or isinstance(linear, ExpertLinear)
        }
        self.products = [
            Product(matrix.shape[1], matrix.shape[0], parts, share)
            for (matrix, share), parts in zip(_shares_of(model, own), num_parts, strict=True)
        ]
        self._parameters: dict[str, list[str]] = {}
        for name in whole.destinations():
            module, _, parameter = name.rpartition(".")
            self._parameters.setdefault(module, []).append(parameter)

    def index_of(self, linear: Computed) -> int | None:
        """Returns the index of a product, or that of the first expert; None: adapters cannot add
        to it."""
        return self._index.get(id(linear))

    def target_of(self, module: str) -> Target | None:
        """Returns the target of a module, by its name in transformers' model. None: the model has
        no such module, or computes it otherwise."""
        targets = self.targets_of(module + WEIGHT)
        return targets[0] if len(targets) == 1 else None

    def targets_of(self, parameter: str) -> Sequence[Target]:
        """Returns the targets of a parameter, by its name in transformers' model: one, or one for
        each expert of a parameter [experts, ...]. None at all: as for `target_of`."""
        known = self._model.known_name(parameter)
        return () if known is None else self._targets.get(known, ())

    def leaves_out(self, name: str) -> bool:
        """Whether a module or a parameter of the model is not among those that were chosen."""
        known = {self._model.known_name(each) for each in (name, name + WEIGHT)}
        return not self._left_out.isdisjoint(known)

    def parameters_of(self, module: str) -> Sequence[str]:
        """Returns the names of a module's own parameters, without those of modules within it, in
        transformers' order."""
        known = self._model.known_name(module + WEIGHT)
        own = [] if known is None else self._parameters.get(known.removesuffix(WEIGHT), [])
        return [f"{module}.{parameter}" for parameter in own]

    @property
    def names(self) -> Sequence[str]:
        """The names of all modules, each with one of its names; of those that files have in one
        tensor, and transformers' modules apart, the latter."""
        found: dict[Target, str] = {}
        for name, targets in self._targets.items():
            if name.endswith(WEIGHT) and len(targets) == 1:
                found.setdefault(targets[0], name.removesuffix(WEIGHT))
        ends = {(each.product, *_span_of(each)) for each in found}
        spans: dict[int, list[tuple[int, int]]] = {}
        for product, begin, end in ends:
            spans.setdefault(product, []).append((begin, end))
        return [
            name
            for target, name in found.items()
            if not _contains_another(_span_of(target), spans[target.product])
        ]


def _chosen_of(
    targets: Mapping[str, tuple[Target, ...]], chosen: Sequence[str]
) -> dict[str, tuple[Target, ...]]:
    """Returns the targets of chosen modules, whose parts of a product follow one another.

    Raises:
        EngineStartError: there are none.
    """
    names = chosen_names(targets, chosen)
    kept = {name: some for name, some in targets.items() if name in names}
    numbers: dict[int, dict[int, int]] = {}
    for target in chain.from_iterable(kept.values()):
        of_product = numbers.setdefault(target.product, {})
        of_product.setdefault(target.part, len(of_product))
    return {
        name: tuple(replace(each, part=numbers[each.product][each.part]) for each in some)
        for name, some in kept.items()
    }


def _span_of(target: Target) -> tuple[int, int]:
    """Returns the first column of a product that a target has, and the one behind its last."""
    ends = [(each.column, each.column + each.size) for each in target.columns]
    return min(begin for begin, _ in ends), max(end for _, end in ends)


def _contains_another(own: tuple[int, int], spans: Sequence[tuple[int, int]]) -> bool:
    return any(own != other and own[0] <= other[0] and other[1] <= own[1] for other in spans)


def _matrices_of(linear: Computed) -> Sequence[Matrix]:
    """Returns the matrix [out, in] of each product."""
    if isinstance(linear, Linear):
        return [linear.weight]
    num_experts, rows, width = linear.weight.shape
    every: WholeMatrix = linear.weight.view(-1, width)
    matrices: Sequence[Matrix] = every.split_with_sizes([rows] * num_experts)
    return matrices


def _shares_of(
    model: DecoderModel, linears: Sequence[Computed]
) -> Iterator[tuple[Matrix, Share | None]]:
    """Yields the matrix of each product, and which share of the whole one it is."""
    for linear in linears:
        share = model.share_of(linear.weight)
        if share is not None and isinstance(linear, ExpertLinear):
            share = share.of_each()
        for matrix in _matrices_of(linear):
            yield matrix, share


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


def _spans_of(products: Sequence[Matrix]) -> list[_Span]:
    spans = []
    for product, matrix in enumerate(products):
        column = 0
        for part in parts_of(matrix):
            memory, rows = addresses(part), len_of(part)
            row_bytes = _memory(part).nbytes // rows
            spans.append(
                _Span(memory.start, memory.stop, product, column, row_bytes, part.shape[1])
            )
            column += rows
    return sorted(spans)


def _targets_of(model: DecoderModel, products: Sequence[Matrix]) -> dict[str, tuple[Target, ...]]:
    """Returns the targets of the weights that lie within one product."""
    spans, num_parts = _spans_of(products), [0] * len(products)
    found: dict[str, tuple[Target, ...]] = {}
    known: dict[tuple[int, tuple[Columns, ...]], Target] = {}
    for name, views in model.destinations().items():
        is_matrix = name.endswith(WEIGHT) and len(views[0].shape) == 2
        placed = _place(views, spans) if is_matrix else None
        if placed is None:
            continue
        span, out_features, columns = placed
        key = span.product, columns  # a module may have two names
        if key not in known:
            part = num_parts[span.product]
            known[key] = Target(span.product, part, span.in_features, out_features, columns)
            num_parts[span.product] += 1
        found[name] = (known[key],)
    return found


def _fixed_columns(
    model: DecoderModel, linears: Sequence[Computed], firsts: Sequence[int]
) -> dict[int, int]:
    """Returns, for each product that projects embeddings of distances, too, which no adapter
    changes, the end of the columns of these projections."""
    indices = {id(linear): first for linear, first in zip(linears, firsts, strict=False)}
    mixers = (layer.mixer for layer in model.layers)
    related = (each for each in mixers if isinstance(each, Attention) and each.relations)
    return {
        indices[id(each.qkv_proj)]: each.spec.query_width + each.spec.key_width
        for each in related
        if each.relations is not None and each.relations.spec.shared
    }


def _is_fixed(target: Target, fixed: dict[int, int]) -> bool:
    end = fixed.get(target.product, 0)
    return any(part.column < end for part in target.columns)


def _targets_of_all(
    model: DecoderModel, linears: Sequence[Computed], firsts: Sequence[int]
) -> dict[str, tuple[Target, ...]]:
    """Returns the targets of the parameters that have the weights of all experts."""
    every = {
        addresses(linear.weight): (linear.weight.shape, first)
        for linear, first in zip(linears, firsts, strict=False)
        if isinstance(linear, ExpertLinear)
    }
    found: dict[str, tuple[Target, ...]] = {}
    for name, views in model.destinations().items():
        placed = every.get(addresses(views[0]))
        if placed is not None and len(views[0].shape) == 3:
            (num_experts, rows, width), first = placed
            columns = (Columns(0, rows, 0),)
            found[name] = tuple(
                Target(first + expert, 0, width, rows, columns) for expert in range(num_experts)
            )
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
            begin = addresses(part).start
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
