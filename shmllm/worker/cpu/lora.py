"""Low-rank adapters on a CPU: their matrices in the layout of the kernels, and the step's rows.

This module owns the kernels behind each product and the tables that they read. The ranks of a group
share these tables, which rank 0 fills: that of the entries has a part for each rank, with addresses
in its memory. This module must not know requests, nor which adapters are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shmllm.models.experts import ExpertLinear
from shmllm.models.fields import Fields
from shmllm.models.layers import Linear
from shmllm.models.lora import LoraProduct, LoraWeights, make_lora
from shmllm.models.lora_targets import LoraTargets
from shmllm.worker.adapters import next_number
from shmllm.worker.arrays import LongArray
from shmllm.worker.group import Alone, Group
from shmllm_kernels.cpu import KernelProgram
from shmllm_kernels.cpu.expert_lora import SHRINK_PAIRS, ExpertAdapters
from shmllm_kernels.cpu.lora import (
    EXPAND,
    SHRINK,
    UNIT_ROWS,
    UNIT_WORDS,
    Segment,
    entry_words,
)
from shmllm_kernels.cpu.product_tiles import IN_ORDER, LISTED
from shmllm_kernels.cpu.products import ROWS_AT_ONCE


class CpuAdapter:
    """An adapter in the layout of the kernels.

    Args:
        weights: the adapter.
        num_products: the number of products of the model.

    Attributes:
        number, digest, num_bytes: see `worker.adapters.Adapter`.
        entries: (ranks, products) int64, the addresses of its entries in the memory of each rank;
            0: it changes nothing there.
    """

    def __init__(self, weights: LoraWeights, num_products: int) -> None:
        self.number = next_number()
        self.digest, self.num_bytes = weights.digest, weights.num_bytes
        self.entries: LongArray = np.zeros((1, num_products), np.int64)
        self._kept: list[object] = []  # the memory at these addresses
        for index, product in weights.products.items():
            self.entries[0, index] = self._lay_out(product)

    def _lay_out(self, product: LoraProduct) -> int:
        a, first, segments = product.a.contiguous(), 0, []
        self._kept.append(a)
        for part in product.parts:
            for b, column in part.outputs:
                rows = b.t().contiguous()
                self._kept.append(rows)
                size = part.rank, column, rows.shape[1]
                segments.append(Segment(rows.data_ptr(), first, *size, part.scale))
            first += part.rank
        entry = np.array(entry_words(a.data_ptr(), len(a), segments), np.int64)
        self._kept.append(entry)
        return int(entry.ctypes.data)


class CpuLora:
    """The adapters of a step, at the addresses that the recorded kernels read.

    Args:
        targets: the products that adapters can add to.
        max_loras: the largest number of adapters in a step.
        max_rank: the largest rank.
        max_tokens: the largest number of tokens in a step.
        dtype: the dtype of the adapters' matrices.
        group: the group of which this process is a rank; None: it is alone.

    Attributes:
        targets: as given.
        max_rank, dtype: as given.
        kind: the dtype's name, by which kernels are chosen.
        order: (max_tokens,) int64, the tokens of the step, those of one adapter together.
    """

    def __init__(
        self,
        targets: LoraTargets,
        max_loras: int,
        max_rank: int,
        max_tokens: int,
        dtype: torch.dtype,
        group: Group | None = None,
    ) -> None:
        self.targets, self.max_rank, self.dtype = targets, max_rank, dtype
        self.kind = str(dtype).removeprefix("torch.")
        group = group or Alone()
        shard = group.shard
        num_units = max_loras + max_tokens // UNIT_ROWS
        self._num_units: LongArray = group.array("lora units in a step", 1)
        self._units: LongArray = group.array("lora units", num_units, UNIT_WORDS)
        size = shard.size, max_loras, len(targets.products)
        self._tables: LongArray = group.array("lora entries", *size)
        self._table: LongArray = self._tables[shard.rank]
        self.order: LongArray = group.array("lora order", max_tokens)
        self._natural_order = np.arange(max_tokens)
        self._places: LongArray = group.array("lora places", max_tokens)
        if shard.rank == 0:
            self.order[:] = self._natural_order
            self._places[:] = -1
        most = max((each.num_parts for each in targets.products), default=0)
        self._shrunk = torch.empty(max_tokens, most * max_rank)
        self._numbers = np.arange(ROWS_AT_ONCE)
        self._of_pairs: dict[tuple[int, int], Tensor] = {}
        self._adapters: list[CpuAdapter] = []  # keeps those of the step alive

    def adapter_of(self, config: Fields, tensors: Fields) -> CpuAdapter:
        """See `worker.adapters.AdapterMaker`."""
        weights = make_lora(config, tensors, self.targets, self.max_rank, self.dtype)
        return CpuAdapter(weights, len(self.targets.products))

    def record(self, program: KernelProgram, x: Tensor, linear: Linear, out: Tensor) -> None:
        """Record what the adapters add to a product.

        Args:
            program: the program to record in.
            x: [rows, in] float32, the product's input.
            linear: the product.
            out: [rows, out] float32, its output.
        """
        index = self.targets.index_of(linear)
        if index is None:
            return
        product = self.targets.products[index]
        arrays = self._num_units, self._units, self._table
        common = [array.ctypes.data for array in arrays]
        common += [index, len(self.targets.products), self.order.ctypes.data]
        shrunk = [self._shrunk.data_ptr(), 4 * self._shrunk.shape[1]]
        most_ranks = product.num_parts * self.max_rank
        reading = [x.data_ptr(), 4 * x.shape[1], product.in_features]
        operands = [*common, *reading, *shrunk, most_ranks]
        program.record(SHRINK[self.kind], operands, label="lora shrink")
        writing = [out.data_ptr(), 4 * out.shape[1], product.out_features]
        operands = [*common, *shrunk, *writing]
        program.record(EXPAND[self.kind], operands, label="lora expand")

    def record_pairs(
        self,
        program: KernelProgram,
        linear: ExpertLinear,
        x: Tensor,
        tokens: Tensor,
        blocks: Sequence[int],
        is_listed: bool,
    ) -> int:
        """Record the products of sorted pairs of a token and an expert with the adapters' A.

        Args:
            program: the program to record in.
            linear: the projections of the experts.
            x: [rows, in] float32, their input.
            tokens: [pairs] int64, the token of each sorted pair.
            blocks: the addresses of the number of blocks and of the blocks.
            is_listed: whether a pair reads the row of its token, and not a row of its own.

        Returns:
            The address of the `ExpertAdapters` that the product itself reads.
        """
        first = self.targets.index_of(linear)
        assert first is not None, "a step computes the products of all experts"
        product = self.targets.products[first]
        most_ranks = product.num_parts * self.max_rank
        words = ExpertAdapters(
            num_units=self._num_units.ctypes.data,
            table=self._table.ctypes.data,
            num_products=self._table.shape[1],
            first_product=first,
            places=self._places.ctypes.data,
            tokens=tokens.data_ptr(),
            t=self._shrunk_pairs(len(tokens), most_ranks).data_ptr(),
            t_stride=4 * most_ranks,
            rows=self._numbers.ctypes.data,
        )
        adapters = np.array(words, np.int64)
        address = int(adapters.ctypes.data)
        operands = [address, *blocks, x.data_ptr(), 4 * x.stride(0), product.in_features]
        kernel = SHRINK_PAIRS[self.kind, LISTED if is_listed else IN_ORDER]
        program.record(kernel, [*operands, most_ranks], keep=[adapters], label="lora shrink pairs")
        return address

    def _shrunk_pairs(self, num_pairs: int, width: int) -> Tensor:
        """Return memory [num_pairs, width] float32, which all products of this size share."""
        size = num_pairs, width
        if size not in self._of_pairs:
            self._of_pairs[size] = torch.empty(size)
        return self._of_pairs[size]

    def fill(self, adapters: Sequence[CpuAdapter | None], counts: LongArray) -> None:
        """Set the adapters of a step, in all ranks of the group. Only rank 0 does that.

        Args:
            adapters: that of each request, or None.
            counts: (requests,) int64, the number of tokens of each request.
        """
        used, self._adapters = self._adapters, list(dict.fromkeys(filter(None, adapters)))
        if not self._adapters:
            num_tokens = int(counts.sum())
            self.order[:num_tokens] = self._natural_order[:num_tokens]
            self._num_units[0] = 0
            return
        places = {adapter: place for place, adapter in enumerate(self._adapters)}
        if used != self._adapters:
            self._tables[:, : len(places)] = np.stack([each.entries for each in places], axis=1)
        of_requests = np.array([-1 if each is None else places[each] for each in adapters])
        of_tokens = np.repeat(of_requests, counts)
        order = np.argsort(of_tokens, kind="stable")
        sizes = np.bincount(of_tokens + 1, minlength=len(places) + 1).tolist()
        num_without = sizes[0]
        self.order[: len(order)] = np.roll(order, -num_without)
        self._places[: len(order)] = of_tokens
        units, first = [], 0
        for place, size in enumerate(sizes[1:]):
            for begin in range(0, size, UNIT_ROWS):
                units.append((place, first + begin, min(UNIT_ROWS, size - begin)))
            first += size
        self._units[: len(units)] = units
        self._num_units[0] = len(units)
