"""Low-rank adapters on a GPU: their places in device memory, and the rows of a step.

This module owns which adapter lies at which place, and the layout of a place. It must not know
requests, nor which adapters are kept in the memory of the host. All tensors that graphs read have
fixed addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from shmllm.models.experts import ExpertLinear
from shmllm.models.fields import Fields
from shmllm.models.layers import Linear
from shmllm.models.lora import LoraWeights, make_lora
from shmllm.models.lora_targets import LoraTargets
from shmllm.worker.adapters import next_number
from shmllm.worker.arrays import IntArray, LongArray
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.transfers import Transfers
from shmllm_kernels.gpu.expert_lora import ExpertPlaces, PairAdapters
from shmllm_kernels.gpu.lora import UNIT_ROWS, LoraPlaces, StepUnits, add_adapters
from shmllm_kernels.gpu.row_adapters import RowAdapters

_ALIGNMENT = 128
"""Elements; a power of two of bytes for every dtype, to which Triton's kernels are specialised."""


class PlaceLayout:
    """Where the matrices of each product lie in a place.

    Args:
        targets: the products that adapters can add to.
        max_rank: the largest rank.

    Attributes:
        ranks: the rows of A of each product: `max_rank` for each of its projections.
        size: the elements of a place.
    """

    def __init__(self, targets: LoraTargets, max_rank: int) -> None:
        self._products, self._max_rank = targets.products, max_rank
        self.ranks = [each.num_parts * max_rank for each in targets.products]
        sizes = [
            _aligned(ranks * width)
            for ranks, each in zip(self.ranks, targets.products, strict=True)
            for width in (each.in_features, each.out_features)
        ]
        self._begins = [0, *accumulate(sizes)]
        self._first_ranks = [0, *accumulate(self.ranks)]
        self.size, self.num_ranks = self._begins[-1], self._first_ranks[-1]

    def matrices(self, places: Tensor, product: int) -> tuple[Tensor, Tensor]:
        """Return the views of a product's A [..., ranks, in] and B [..., out, ranks] in places
        [..., size]."""
        each, ranks = self._products[product], self.ranks[product]
        views = []
        for index, shape in enumerate(((ranks, each.in_features), (each.out_features, ranks))):
            begin = self._begins[2 * product + index]
            views.append(places[..., begin : begin + shape[0] * shape[1]].unflatten(-1, shape))
        return views[0], views[1]

    def matrices_of_experts(
        self, places: Tensor, first: int, num_experts: int
    ) -> tuple[Tensor, Tensor]:
        """Return the views of A [..., experts, ranks, in] and B [..., experts, out, ranks] of the
        products from the first expert's on, in places [..., size]."""
        begin, end = self._begins[2 * first], self._begins[2 * (first + num_experts)]
        every = places[..., begin:end].unflatten(-1, (num_experts, -1))
        views, each, ranks = [], self._products[first], self.ranks[first]
        for index, shape in enumerate(((ranks, each.in_features), (each.out_features, ranks))):
            own = self._begins[2 * first + index] - begin
            views.append(every[..., own : own + shape[0] * shape[1]].unflatten(-1, shape))
        return views[0], views[1]

    def scales(self, places: Tensor, product: int) -> Tensor:
        """Return the view of a product's factors [..., ranks] in places [..., num_ranks]."""
        first = self._first_ranks[product]
        return places[..., first : first + self.ranks[product]]

    def scales_of_experts(self, places: Tensor, first: int, num_experts: int) -> Tensor:
        """Return the view of the factors [..., experts, ranks] likewise."""
        begin, end = self._first_ranks[first], self._first_ranks[first + num_experts]
        scales: Tensor = places[..., begin:end].unflatten(-1, (num_experts, -1))
        return scales

    def fill(self, weights: LoraWeights, place: Tensor, scales: Tensor, is_used: Tensor) -> None:
        """Write an adapter to a place that holds zeros.

        Args:
            weights: the adapter.
            place: [size].
            scales: [num_ranks].
            is_used: [products].
        """
        for product, own in weights.products.items():
            a, b = self.matrices(place, product)
            factors, first = self.scales(scales, product), 0
            for part in own.parts:
                begin = part.part * self._max_rank
                some = slice(begin, begin + part.rank)
                a[some] = own.a[first : first + part.rank]
                factors[some] = part.scale
                for rows, column in part.outputs:
                    b[column : column + len(rows), some] = rows
                first += part.rank
            is_used[product] = 1


class GpuAdapter:
    """An adapter in the memory of the host, in the layout of a place.

    Args:
        weights: the adapter.
        layout: the layout.
        dtype: the dtype of the matrices.

    Attributes:
        number, digest: see `worker.adapters.Adapter`.
        entries: (ranks, 0) int64: kernels find the shares of all ranks by a step's places.
        place: [size].
        scales: [num_ranks] float32.
        is_used: [products] int32.
        num_bytes: the size of `place`.
    """

    def __init__(self, weights: LoraWeights, layout: PlaceLayout, dtype: torch.dtype) -> None:
        self.number, self.digest = next_number(), weights.digest
        self.entries: LongArray = np.zeros((1, 0), np.int64)
        self.place = torch.zeros(layout.size, dtype=dtype)
        self.scales = torch.zeros(layout.num_ranks)
        self.is_used = torch.zeros(len(layout.ranks), dtype=torch.int32)
        layout.fill(weights, self.place, self.scales, self.is_used)
        self.num_bytes = self.place.nbytes


class GpuLora:
    """The adapters of a step.

    Args:
        targets: the products that adapters can add to.
        max_loras: the number of places.
        max_rank: the largest rank.
        max_tokens: the largest number of tokens in a step.
        max_pairs: the largest number of pairs of a token and one of its experts.
        dtype: the dtype of weights and activations.
        device: the device.
    """

    def __init__(
        self,
        targets: LoraTargets,
        max_loras: int,
        max_rank: int,
        max_tokens: int,
        max_pairs: int,
        dtype: torch.dtype,
        device: Device,
    ) -> None:
        where = device.torch_device
        self._targets, self._max_rank, self._dtype = targets, max_rank, dtype
        self._layout = PlaceLayout(targets, max_rank)
        sizes = self._layout.size, self._layout.num_ranks, len(targets.products)
        self._places, self._scales, self._is_used = (
            torch.zeros(max_loras, size, dtype=kind, device=where)
            for size, kind in zip(sizes, (dtype, torch.float32, torch.int32), strict=True)
        )
        self._views = [self._view(product) for product in range(len(targets.products))]
        self._expert_views: dict[int, ExpertPlaces] = {}  # by the first expert's product
        self._step = StepUnits.allocate(max_loras, max_tokens, where)
        most = max(self._layout.ranks, default=1)
        self._counters = torch.zeros(2, dtype=torch.int32, device=where)
        self._shrunk, self._shrunk_pairs = (
            torch.zeros(rows, most, dtype=dtype, device=where) for rows in (max_tokens, max_pairs)
        )
        self._transfers = Transfers(device)
        self._held = [-1] * max_loras  # the numbers of the adapters at the places
        self._order = list(range(max_loras))  # the places, the least recently used first
        self._has_units = False
        device.synchronize()  # until work that used this memory before is done

    def _view(self, product: int) -> LoraPlaces:
        a, b = self._layout.matrices(self._places, product)
        scales = self._layout.scales(self._scales, product)
        return LoraPlaces(a, b, scales, self._is_used[:, product])

    def adapter_of(self, config: Fields, tensors: Fields) -> GpuAdapter:
        """See `worker.adapters.AdapterMaker`."""
        weights = make_lora(config, tensors, self._targets, self._max_rank, self._dtype)
        return GpuAdapter(weights, self._layout, self._dtype)

    def add(self, out: Tensor, x: Tensor, linear: Linear) -> None:
        """Launch what the adapters add to a product.

        Args:
            out: [rows, out], the product.
            x: [rows, in], what it read.
            linear: its weights.
        """
        product = self._targets.index_of(linear)
        if product is not None:
            shrunk = self._shrunk[:, : self._layout.ranks[product]]
            add_adapters(out, x, shrunk, self._views[product], self._step)

    def adapts(self, linear: Linear) -> bool:
        """Return whether an adapter can add to a product."""
        return self._targets.index_of(linear) is not None

    def of_rows(self, linear: Linear) -> RowAdapters | None:
        """Return what the adapters add to a product of few rows; None: no adapter can."""
        product = self._targets.index_of(linear)
        if product is None:
            return None
        return RowAdapters(self._shrunk, self._counters, self._views[product], self._step)

    def of_experts(self, linear: ExpertLinear, top_k: int) -> PairAdapters:
        """Return what the adapters add to a product of experts.

        Args:
            linear: the projections of the experts.
            top_k: the number of experts of each token.
        """
        first = self._targets.index_of(linear)
        assert first is not None, "a step computes the products of all experts"
        if first not in self._expert_views:
            self._expert_views[first] = self._view_experts(first, linear.weight.shape[0])
        shrunk = self._shrunk_pairs[:, : self._layout.ranks[first]]
        return PairAdapters(shrunk, self._expert_views[first], self._step, top_k)

    def _view_experts(self, first: int, num_experts: int) -> ExpertPlaces:
        a, b = self._layout.matrices_of_experts(self._places, first, num_experts)
        scales = self._layout.scales_of_experts(self._scales, first, num_experts)
        return ExpertPlaces(a, b, scales, self._is_used[:, first : first + num_experts])

    def send(self, adapters: Sequence[GpuAdapter | None], counts: LongArray) -> None:
        """Launch the copies of a step's adapters and of its rows, behind the steps before.

        Args:
            adapters: that of each request, or None.
            counts: (requests,) int64, the number of tokens of each request.
        """
        needed = list(dict.fromkeys(filter(None, adapters)))
        if not needed and not self._has_units:
            return
        self._has_units = bool(needed)
        places = self._place(needed)
        of_requests = np.array([-1 if each is None else places[each] for each in adapters])
        of_tokens = np.repeat(of_requests, counts)
        order = np.argsort(of_tokens, kind="stable").astype(np.int32)
        order = order[np.count_nonzero(of_tokens < 0) :]
        units = _units(of_tokens[order])
        count, step = np.array([len(units)], np.int32), self._step
        sent = self._transfers.send(count, units, order, of_tokens.astype(np.int32))
        targets = step.num_units, step.units, step.order, step.places
        for tensor, part in zip(targets, sent, strict=True):
            tensor[: len(part)].copy_(part)

    def _place(self, needed: Sequence[GpuAdapter]) -> dict[GpuAdapter, int]:
        """Bring adapters to places; return these."""
        found = {
            each: self._held.index(each.number) for each in needed if each.number in self._held
        }
        free = [place for place in self._order if place not in found.values()]
        for adapter in needed:
            if adapter not in found:
                place = found[adapter] = free.pop(0)
                self._held[place] = adapter.number
                self._places[place].copy_(adapter.place)
                self._scales[place].copy_(adapter.scales)
                self._is_used[place].copy_(adapter.is_used)
        used = set(found.values())
        self._order = [place for place in self._order if place not in used] + sorted(used)
        return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _units(places: LongArray) -> IntArray:
    """Return the units, (units, 3) int32, of rows that are sorted by place."""
    units, first = [], 0
    for place, size in zip(*np.unique(places, return_counts=True), strict=True):
        units += [
            (place, first + begin, min(UNIT_ROWS, size - begin))
            for begin in range(0, size, UNIT_ROWS)
        ]
        first += size
    return np.array(units, np.int32).reshape(-1, 3)
