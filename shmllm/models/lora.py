"""Low-rank adapters: reads one from its directory, and checks it against a model.

This module owns the names of an adapter's tensors and their shapes. It must not know requests, nor
how a device computes with an adapter.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shmllm.models.fields import Fields, read_json_object
from shmllm.models.lora_targets import Columns, LoraTargets, Target
from shmllm.models.peft_config import CONFIG_FILE, PeftConfig
from shmllm.models.safetensors_file import SafetensorsFile
from shmllm.models.shares import Share

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")
_A, _B = "A", "B"
_NESTED = ".base_layer"


@dataclass(frozen=True, slots=True)
class LoraPart:
    """What an adapter adds to one module of a product.

    Attributes:
        part: the index of the module among those of the product.
        rank: its rank.
        scale: the factor of what is added.
        outputs: its B [columns, rank] for each stretch of columns that lies together in the
            product, with the first of these columns.
    """

    part: int
    rank: int
    scale: float
    outputs: list[tuple[Tensor, int]]


@dataclass(slots=True)
class LoraProduct:
    """What an adapter adds to one product.

    Attributes:
        a: [ranks, in], the A of all parts, one after the other.
        parts: the parts, in that order.
    """

    a: Tensor
    parts: list[LoraPart]


@dataclass(slots=True)
class LoraWeights:
    """An adapter in the memory of the host.

    Attributes:
        products: what it adds, by the index of the product. In a rank of a group the matrices have
            the rank's share of the product: of A its columns, of B its rows.
        digest: identifies the contents of the whole adapter: matrices and factors.
        num_bytes: the size of the matrices here.
    """

    products: dict[int, LoraProduct]
    digest: str
    num_bytes: int


def read_files(directory: Path) -> tuple[Fields, Fields]:
    """Reads adapter_config.json and adapter_model.safetensors, as PEFT writes them.

    Returns:
        The fields of the first, and the tensors of the second by their names.

    Raises:
        EngineStartError: a file is missing or damaged.
    """
    config, weights = directory / CONFIG_FILE, directory / WEIGHTS_FILE
    fields, tensors = Fields(read_json_object(config), str(config)), {}
    with SafetensorsFile(weights) as file:
        for name in file.shapes():
            with file.tensor(name) as tensor:
                tensors[name] = tensor.clone()
    return fields, Fields(tensors, str(weights))


def make_lora(
    config: Fields, tensors: Fields, targets: LoraTargets, max_rank: int, dtype: torch.dtype
) -> LoraWeights:
    """Makes an adapter of its tensors, which it copies.

    Args:
        config: the fields of adapter_config.json.
        tensors: the tensors by the names of adapter_model.safetensors.
        targets: the modules of the model.
        max_rank: the largest rank that is allowed.
        dtype: the dtype of the adapter's matrices in memory.

    Raises:
        EngineStartError: the adapter does not suit the model.
    """
    own = PeftConfig.from_fields(config)
    by_product: dict[int, list[_Change]] = {}
    left_out = []
    for module, matrices in by_module(tensors).items():
        name, places = _places_of(module, own, targets)
        if targets.leaves_out(name):
            left_out.append(module)
            continue
        if not places:
            raise tensors.error(_refusal(module, targets))
        rank, scale = own.of_module(name)
        if rank > max_rank:
            raise config.error(f"{module!r} has rank {rank}; max_lora_rank is {max_rank}: raise it")
        are_exchanged = _are_exchanged(matrices, rank, places)
        _check_shapes(tensors, module, matrices, rank, places, are_exchanged)
        a, b = (matrices[matrix].to(dtype) for matrix in (_A, _B))
        of_experts = zip(places, a.split(rank), _split_b(b, len(places)), strict=True)
        for target, one_a, one_b in of_experts:
            if are_exchanged:
                one_a, one_b = one_b.T.contiguous(), one_a.T.contiguous()
            change = _Change(module, target, scale, one_a, one_b)
            by_product.setdefault(target.product, []).append(change)
    if left_out:
        logger.warning(
            "%s: lora_target_modules leaves %d of %d modules out, such as %s",
            *(tensors.where, len(left_out), len(by_module(tensors)), left_out[0]),
        )
    products = {}
    for product, changes in sorted(by_product.items()):
        _check_overlaps(tensors, changes)
        changes.sort(key=lambda change: change.target.part)
        parts = [
            LoraPart(
                each.target.part,
                len(each.a),
                each.scale,
                _rows_in_order(each.b, each.target.columns),
            )
            for each in changes
        ]
        products[product] = LoraProduct(torch.cat([change.a for change in changes]), parts)
    shares = {
        index: _share_of(product, targets.products[index].share)
        for index, product in products.items()
    }
    num_bytes = sum(tensor.nbytes for product in shares.values() for tensor in _all(product))
    return LoraWeights(shares, _digest(products), num_bytes)


def _share_of(product: LoraProduct, share: Share | None) -> LoraProduct:
    """Returns what an adapter adds to a rank's share of a product.

    Args:
        product: what it adds to the whole product.
        share: which rows and columns of the product's matrix [out, in] the rank has; None: all.
    """
    if share is None:
        return product
    parts = []
    for part in product.parts:
        outputs = [each for b, column in part.outputs for each in _rows_of(b, column, share.rows)]
        parts.append(replace(part, outputs=outputs))
    return LoraProduct(product.a[:, share.columns].contiguous(), parts)


def _rows_of(b: Tensor, column: int, rows: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yields the rows of a B whose columns of the product a rank has, and the first of the rank's
    columns, for each stretch of these.

    Args:
        b: [columns, rank].
        column: the first of its columns in the whole product.
        rows: the column in the whole product of each of the rank's columns, (n,) int64.
    """
    own = ((rows >= column) & (rows < column + len(b))).nonzero().flatten()
    ends = (own.diff() != 1).nonzero().flatten() + 1
    for stretch in own.tensor_split(ends):
        if len(stretch):
            yield b[rows[stretch] - column], int(stretch[0])


def _rows_in_order(values: Tensor, columns: Sequence[Columns]) -> list[tuple[Tensor, int]]:
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


class _Change(NamedTuple):
    """A [rank, in] and B [out, rank] of a module, or of one expert's share of a parameter."""

    module: str
    target: Target
    scale: float
    a: Tensor
    b: Tensor


def _places_of(module: str, own: PeftConfig, targets: LoraTargets) -> tuple[str, Sequence[Target]]:
    """Returns what patterns match, and the targets: several for a parameter of all experts.

    PEFT wraps a module once for each of its parameters that it adapts, the first one innermost: its
    matrices have the name of the module and a "base_layer" for every later parameter.
    """
    wrapped = module.split(_NESTED)[0]
    depth = module.count(_NESTED)
    adapted = [name for name in targets.parameters_of(wrapped) if own.is_parameter(name)]
    if adapted:
        name = adapted[-1 - depth] if depth < len(adapted) else module
        return name, targets.targets_of(name)
    target = targets.target_of(module)
    return module, () if target is None else (target,)


def _refusal(module: str, targets: LoraTargets) -> str:
    parameters = targets.parameters_of(module.split(_NESTED)[0])
    names = [name for name in parameters if len(targets.targets_of(name)) > 1]
    if names:
        return f"'target_parameters' does not name what {module!r} changes, such as {names[0]!r}"
    return f"an adapter cannot change {module!r} of this model"


def _split_b(b: Tensor, num_experts: int) -> Sequence[Tensor]:
    """Returns the B [out, rank] of each expert, whose columns take turns in ``b``."""
    every: Tensor = b.unflatten(1, (-1, num_experts))
    return every.unbind(2)


def _check_overlaps(tensors: Fields, changes: Sequence[_Change]) -> None:
    """Raises EngineStartError if two changes add to the same columns."""
    spans = sorted(
        (each.column, each.column + each.size, index)
        for index, change in enumerate(changes)
        for each in change.target.columns
    )
    for (_, end, _), (column, _, index) in pairwise(spans):
        if column < end:
            raise tensors.error(f"{changes[index].module!r} changes what another module changes")


def by_module(tensors: Fields) -> dict[str, dict[str, Tensor]]:
    """Returns A [rank, in] and B [out, rank] of each module, by its name and "A" or "B".

    Raises:
        EngineStartError: there are no tensors, or other ones, or A or B is missing.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.values.items():
        match = _NAME.fullmatch(name.removeprefix(_PREFIX))
        if not name.startswith(_PREFIX) or match is None:
            raise tensors.error(f"{name!r} is not supported: only lora_A and lora_B are")
        found.setdefault(match["module"], {})[match["matrix"]] = tensor
    if not found:
        raise tensors.error("the adapter has no tensors")
    for module, matrices in found.items():
        for matrix in (_A, _B):
            if matrix not in matrices:
                raise tensors.error(f"{module!r} has no lora_{matrix}")
    return found


def _are_exchanged(matrices: Mapping[str, Tensor], rank: int, places: Sequence[Target]) -> bool:
    """Returns whether A and B have changed their places. PEFT takes a parameter of experts for
    [experts, out, in], unless its module has ``is_transposed``: of a module that has [experts, in,
    out] and not that (Llama 4) it adapts the transposed matrices."""
    target, ranks = places[0], rank * len(places)
    shapes = (ranks, target.out_features), (target.in_features, ranks)
    are_equal = target.in_features == target.out_features
    found = tuple(tuple(matrices[matrix].shape) for matrix in (_A, _B))
    return len(places) > 1 and not are_equal and found == shapes


def _check_shapes(
    tensors: Fields,
    module: str,
    matrices: Mapping[str, Tensor],
    rank: int,
    places: Sequence[Target],
    are_exchanged: bool,
) -> None:
    target, ranks = places[0], rank * len(places)
    ins, outs = target.in_features, target.out_features
    if are_exchanged:
        ins, outs = outs, ins
    shapes = {_A: (ranks, ins), _B: (outs, ranks)}
    for matrix, shape in shapes.items():
        name, found = f"{module}.lora_{matrix}", matrices[matrix]
        if tuple(found.shape) != shape:
            raise tensors.error(f"{name} has shape {list(found.shape)}, not {list(shape)}")
        if not found.isfinite().all():
            raise tensors.error(f"{name} has values that are not finite")


def _all(product: LoraProduct) -> Iterator[Tensor]:
    yield product.a
    for part in product.parts:
        yield from (b for b, _ in part.outputs)


def _digest(products: Mapping[int, LoraProduct]) -> str:
    digest = hashlib.sha256()
    for index, product in products.items():
        sizes = [(part.part, part.rank, part.scale) for part in product.parts]
        digest.update(f"{index} {sizes} {product.a.dtype}".encode())
        for tensor in _all(product):
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
