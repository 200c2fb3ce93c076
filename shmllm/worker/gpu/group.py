"""What the ranks of a tensor parallel group share on GPUs, and the launches in which they meet.

This module owns what lies in the memory that the GPUs share, and which launches use it. It must not
know processes: `parallel.gpu_memory` shares the memory between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from shmllm.models.decoder import DecoderModel
from shmllm.models.matrices import Matrix, addresses
from shmllm.models.shard import Shard
from shmllm.worker.gpu.device import Device
from shmllm.worker.group import Group
from shmllm_kernels.gpu.configs import ROWS_OF_PRODUCTS
from shmllm_kernels.gpu.group import (
    PART_ALIGNMENT_BYTES,
    WORD_BYTES,
    Peers,
    make_counts,
    meet,
    num_words,
    sum_parts,
)

ALIGNMENT_BYTES = 256
LARGE_BYTES = 2 * 2**20
"""The size from which more than two ranks divide the addition of parts. Otherwise each rank reads
all parts: that is ``ranks - 1`` of them over the link, instead of ``2 * (ranks - 1) / ranks``, but
one meeting instead of two, and no copies. docs/gpu.md has the arithmetic."""


class DeviceGroup(Group, Protocol):
    """The memory of a group whose ranks have a GPU each."""

    def share(self, num_bytes: int, device: Device) -> Sequence[Tensor]:
        """Allocate memory on this rank's GPU, and map that of the other ranks. All ranks call it
        with the same size; it waits for them.

        Returns:
            By rank, [num_bytes] uint8, at first 0.

        Raises:
            EngineStartError: the GPUs cannot share memory, or the group has ended.
        """

    def ended_word(self, device: Device) -> Tensor:
        """Return `Group.ended` as this rank's GPU reads it, [1] int64."""


class _Layout:
    """The places of tensors in the memory of a rank, the same in all ranks."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def add(self, num_bytes: int) -> int:
        begin = self.num_bytes
        self.num_bytes += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return begin


class NoMeetings:
    """The meetings of a process that computes a whole model: there are none.

    Attributes:
        are_needed: whether there are other ranks.
        has_rest: whether this rank adds what the ranks do not divide, and has the whole logits.
    """

    are_needed = False
    has_rest = True

    @property
    def embeds(self) -> Tensor | None:
        """Where embeddings that a prompt gives are written, [max_tokens, hidden], after `begin`;
        None: where the residual stream is."""
        return None

    def begin(self, last_tokens: Tensor) -> None:
        """Launch the beginning of a step, or of a scoring, on each rank.

        Args:
            last_tokens: (rows,) int64, the token that was sampled last for each row: the others get
                those of rank 0.
        """

    def restart(self) -> None:
        """Begin the sums of a forward pass."""

    def is_partial(self, weight: Matrix) -> bool:
        """Return whether the products of a matrix are parts of sums."""
        return False

    def part(self, num_tokens: int, width: int) -> Tensor:
        """Return where this rank writes its part of the next sum, [num_tokens, width], at most as
        wide as the hidden state."""
        raise AssertionError("a process that is alone meets nobody")

    def sum_parts(self, out: Tensor) -> Tensor:
        """Launch ``out = sum over the ranks of what they wrote to part()``; return ``out``,
        [num_tokens, width]."""
        raise AssertionError("a process that is alone meets nobody")

    def add_parts(self, out: Tensor, scale: float) -> None:
        """Launch ``out += scale *`` that sum, in which each rank reads the parts of all."""
        raise AssertionError("a process that is alone meets nobody")

    def logits(self, logits: Tensor) -> Tensor:
        """Return where this rank writes the logits of its tokens, [rows, own tokens].

        Args:
            logits: [rows, vocab], the logits of all tokens, which only rank 0 has.
        """
        return logits

    def gather(self, logits: Tensor) -> None:
        """Launch the copy of the other ranks' logits to rank 0, [rows, vocab]."""


class GpuMeetings(NoMeetings):
    """Launches the meetings of the ranks of a group.

    A rank writes its part of a sum into memory of its own that the others have mapped. There is
    memory for two sums, used in turn (`shmllm_kernels.gpu.group` says why that is enough). Each
    step begins with `begin`, in which all ranks meet, and with the first of the two: so the sums of
    a step are the same launches in a graph, whatever ran before.

    Args:
        group: the group.
        model: this rank's part of the model; the addresses of its weights must not change.
        max_tokens: the largest number of tokens in a step.
        max_rows: the number of rows of `last_tokens`.
        max_samples: the largest number of rows that get logits.
        device: the device.

    Raises:
        EngineStartError: see `DeviceGroup.share`.
    """

    are_needed = True

    def __init__(
        self,
        group: DeviceGroup,
        model: DecoderModel,
        max_tokens: int,
        max_rows: int,
        max_samples: int,
        device: Device,
    ) -> None:
        size, rank = group.shard.size, group.shard.rank
        config, dtype = model.config, model.dtype
        self.has_rest = rank == 0
        self._rank = rank
        self._partial = model.partial
        self._num_sums = 0
        self._shards = [Shard(each, size) for each in range(size)]
        self._tokens_of = [each.part_of(config.vocab_size) for each in self._shards]
        most_logits = max(max_samples, ROWS_OF_PRODUCTS[-1]), max(map(len, self._tokens_of))
        shape = max_tokens, config.hidden_size
        self._shape_of_embeds = max_tokens, config.embedding_width
        layout = _Layout()
        layout.add(WORD_BYTES * num_words(size))
        self._offset_of_tokens = layout.add(WORD_BYTES * max_rows)
        self._offsets = [layout.add(prod(shape) * dtype.itemsize) for _ in range(2)]
        logits_dtype = torch.float32 if config.lm_head_float32 else dtype
        of_logits = layout.add(prod(most_logits) * logits_dtype.itemsize)
        memories = group.share(layout.num_bytes, device)
        where, own = device.torch_device, memories[rank]
        bases = torch.tensor([each.data_ptr() for each in memories], dtype=torch.int64)
        self._peers = Peers(
            rank, size, bases.to(where), make_counts(where), group.ended_word(device)
        )
        self._last_tokens = _view(own, self._offset_of_tokens, (max_rows,), torch.int64)
        self._parts_of = [
            [_view(each, offset, shape, dtype) for each in memories] for offset in self._offsets
        ]
        self._parts = [parts[rank] for parts in self._parts_of]
        self._logits = [_view(each, of_logits, most_logits, logits_dtype) for each in memories]
        device.synchronize()

    @property
    def embeds(self) -> Tensor | None:
        return _rows(self._parts[0], *self._shape_of_embeds)

    def begin(self, last_tokens: Tensor) -> None:
        if self.has_rest:
            self._last_tokens.copy_(last_tokens)
        sum_parts(last_tokens, self._offset_of_tokens, self._peers)

    def restart(self) -> None:
        self._num_sums = 0

    def is_partial(self, weight: Matrix) -> bool:
        return addresses(weight).start in self._partial

    def part(self, num_tokens: int, width: int) -> Tensor:
        return _rows(self._parts[self._num_sums % 2], num_tokens, width)

    def sum_parts(self, out: Tensor) -> Tensor:
        buffer = self._next_buffer()
        size, row_bytes = self._peers.size, out.shape[1] * out.itemsize
        is_large = out.nbytes >= LARGE_BYTES and len(out) >= size
        if size > 2 and is_large and row_bytes % PART_ALIGNMENT_BYTES == 0:
            self._sum_slices(out, buffer)
        else:
            sum_parts(out, self._offsets[buffer], self._peers)
        return out

    def add_parts(self, out: Tensor, scale: float) -> None:
        sum_parts(out, self._offsets[self._next_buffer()], self._peers, adds=True, scale=scale)

    def _next_buffer(self) -> int:
        """Return the buffer of the next sum, which is launched now."""
        buffer = self._num_sums % 2
        self._num_sums += 1
        return buffer

    def _sum_slices(self, out: Tensor, buffer: int) -> None:
        """Launch a sum of which each rank adds some rows, in place, and copies those of others."""
        parts, width = [_rows(each, *out.shape) for each in self._parts_of[buffer]], out.shape[1]
        slices = [each.part_of(len(out)) for each in self._shards]
        own, most = slices[self._rank], max(map(len, slices)) * width
        offset = self._offsets[buffer] + own.start * width * out.itemsize
        added = parts[self._rank][own.start : own.stop]
        sum_parts(added, offset, self._peers, most_elements=most)
        meet(self._peers, waits=True)
        for part, rows in zip(parts, slices, strict=True):
            out[rows.start : rows.stop].copy_(part[rows.start : rows.stop])

    def logits(self, logits: Tensor) -> Tensor:
        width = len(self._tokens_of[self._rank])
        if self.has_rest:
            return logits[:, :width]
        return self._logits[self._rank][: len(logits), :width]

    def gather(self, logits: Tensor) -> None:
        meet(self._peers, waits=self.has_rest)
        if not self.has_rest:
            return
        for part, tokens in zip(self._logits[1:], self._tokens_of[1:], strict=True):
            logits[:, tokens.start : tokens.stop].copy_(part[: len(logits), : len(tokens)])


def _rows(part: Tensor, num_rows: int, width: int) -> Tensor:
    """Return the first [num_rows, width] of a part's memory."""
    return part.view(-1)[: num_rows * width].view(num_rows, width)


def _view(memory: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    num_bytes = prod(shape) * dtype.itemsize
    return memory[offset : offset + num_bytes].view(dtype).view(shape)
