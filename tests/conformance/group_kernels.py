"""The tests of the kernels in which ranks meet: each waits for the others, and all get one sum.

One device plays all ranks, so each rank's launch that tells the others comes before the launches
that wait for it.
"""

from __future__ import annotations

import threading

import pytest
import torch
from support.kernel_helpers import poisoned
from support.waiting import join_all

from shmllm_kernels.gpu.group import (
    BLOCK,
    MOST_PROGRAMS,
    WORD_BYTES,
    Peers,
    make_counts,
    meet,
    num_words,
    sum_parts,
)
from shmllm_kernels.reference import group as plain


class Group:
    """The memory of some ranks on one device, with room for two parts each.

    Attributes:
        parts: for each of the two buffers, the part of each rank, [rows, width].
        offsets: where they begin in a rank's memory, in bytes.
    """

    def __init__(
        self, size: int, rows: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        begin = WORD_BYTES * num_words(size)
        part_bytes = -(-rows * width * dtype.itemsize // 16) * 16
        self.memories = [
            torch.zeros(begin + 2 * part_bytes, dtype=torch.uint8, device=device)
            for _ in range(size)
        ]
        bases = torch.tensor([memory.data_ptr() for memory in self.memories]).to(device)
        self.ended = torch.zeros(1, dtype=torch.int64, device=device)
        self.peers = [
            Peers(rank, size, bases, make_counts(device), self.ended) for rank in range(size)
        ]
        self.offsets = [begin, begin + part_bytes]
        used = rows * width * dtype.itemsize
        self.parts = [
            [memory[at : at + used].view(dtype).view(rows, width) for memory in self.memories]
            for at in self.offsets
        ]
        self.outs = [poisoned(rows, width, dtype=dtype, device=device) for _ in range(size)]

    def sum(self, buffer: int, last: int = 0) -> None:
        """Let all ranks meet; the last one to come does it in one launch."""
        others = [peers for peers in self.peers if peers.rank != last]
        for peers in others:
            sum_parts(self.outs[peers.rank], self.offsets[buffer], peers, sums=False)
        sum_parts(self.outs[last], self.offsets[buffer], self.peers[last])
        for peers in others:
            sum_parts(self.outs[peers.rank], self.offsets[buffer], peers, arrives=False)

    def words_of(self, rank: int) -> torch.Tensor:
        """The words of a rank, [ranks, programs]."""
        words = self.memories[rank].view(torch.uint8)[: self.offsets[0]].view(torch.int64)
        return words.view(-1, MOST_PROGRAMS)


def fill(draw, parts: list[torch.Tensor]) -> torch.Tensor:
    for part in parts:
        dtype = part.dtype
        if dtype.is_floating_point:
            part.copy_(draw.normal(*part.shape, dtype=dtype))
        else:
            part.copy_(draw.integers(-(2**40), 2**40, *part.shape, dtype=dtype))
    return plain.sum_parts(torch.stack(parts))


class GroupConformance:
    @pytest.mark.parametrize(
        ("size", "rows", "width"),
        [(2, 1, 16), (3, 3, 80), (5, 2, 4096), (2, 1, MOST_PROGRAMS * BLOCK + 48)],
    )
    def test_all_ranks_get_the_sum_in_their_order(self, draw, device, dtype, size, rows, width):
        group = Group(size, rows, width, dtype, device)
        for step in range(3):
            want = fill(draw, group.parts[step % 2])
            group.sum(step % 2, last=step % size)
            for out in group.outs:
                assert torch.equal(out, want)

    @pytest.mark.parametrize("scale", [1.0, 0.25])
    def test_the_sum_is_added_to_what_was_there(self, draw, device, dtype, scale):
        """The sum is rounded before, as if a launch of its own added it."""
        group = Group(2, 3, 48, dtype, device)
        added = fill(draw, group.parts[0])
        before = draw.normal(3, 48, dtype=dtype)
        for out in group.outs:
            out.copy_(before)
        first, last = group.outs
        options = {"adds": True, "scale": scale}
        sum_parts(last, group.offsets[0], group.peers[1], sums=False, **options)
        sum_parts(first, group.offsets[0], group.peers[0], **options)
        sum_parts(last, group.offsets[0], group.peers[1], arrives=False, **options)
        want = (before.float() + scale * added.float()).to(dtype)
        assert torch.equal(first, want)
        assert torch.equal(last, want)

    def test_whole_numbers_are_added_exactly(self, draw, device):
        group = Group(2, 1, 300, torch.int64, device)
        want = fill(draw, group.parts[0])
        group.sum(0)
        assert torch.equal(group.outs[0], want)
        assert torch.equal(group.outs[1], want)

    def test_each_rank_may_add_a_part_of_the_rows_in_place(self, draw, device, dtype):
        group = Group(2, 4, 32, dtype, device)
        want = fill(draw, group.parts[0])
        row_bytes = 32 * dtype.itemsize
        own = [group.parts[0][rank][2 * rank : 2 * rank + 2] for rank in range(2)]
        offsets = [group.offsets[0] + 2 * rank * row_bytes for rank in range(2)]
        sum_parts(own[1], offsets[1], group.peers[1], sums=False)
        sum_parts(own[0], offsets[0], group.peers[0])
        sum_parts(own[1], offsets[1], group.peers[1], arrives=False)
        assert torch.equal(torch.cat(own), want)

    def test_ranks_may_add_parts_of_other_sizes(self, draw, device, dtype):
        """A rank whose part has fewer blocks has programs that add nothing."""
        group = Group(3, 5, BLOCK, dtype, device)
        want = fill(draw, group.parts[0])
        begins = (0, 1, 3, 5)
        own = [group.parts[0][rank][begins[rank] : begins[rank + 1]] for rank in range(3)]
        offsets = [group.offsets[0] + begin * BLOCK * dtype.itemsize for begin in begins[:3]]
        each = list(zip(own, offsets, group.peers, strict=True))
        for out, offset, peers in each:
            sum_parts(out, offset, peers, most_elements=2 * BLOCK, sums=False)
        assert all(peers.counts[:3].tolist() == [1, 1, 0] for peers in group.peers)
        for out, offset, peers in each:
            sum_parts(out, offset, peers, most_elements=2 * BLOCK, arrives=False)
        assert torch.equal(torch.cat(own), want)

    def test_meetings_of_other_sizes_do_not_disturb_each_other(self, draw, device, dtype):
        """Programs that a small meeting does not have keep their numbers."""
        group = Group(2, 2, 2 * BLOCK, dtype, device)
        for rows in (2, 1, 1, 2):
            want = fill(draw, group.parts[0])[:rows]
            outs = [out[:rows] for out in group.outs]
            sum_parts(outs[1], group.offsets[0], group.peers[1], sums=False)
            sum_parts(outs[0], group.offsets[0], group.peers[0])
            sum_parts(outs[1], group.offsets[0], group.peers[1], arrives=False)
            assert torch.equal(outs[0], want)
            assert torch.equal(outs[1], want)
        assert group.peers[0].counts[:5].tolist() == [4, 4, 2, 2, 0]

    def test_a_meeting_of_one_program_counts_with_the_others(self, draw, device, dtype):
        group = Group(3, 2, 32, dtype, device)
        for _ in range(2):
            for rank in (1, 2):
                meet(group.peers[rank], waits=False)
            meet(group.peers[0], waits=True)
            want = fill(draw, group.parts[1])
            group.sum(1, last=2)
            assert torch.equal(group.outs[2], want)

    def test_the_end_of_the_group_ends_the_waiting(self, device, dtype):
        group = Group(2, 1, 16, dtype, device)
        group.ended.fill_(1)
        sum_parts(group.outs[0], group.offsets[0], group.peers[0])
        meet(group.peers[0], waits=True)
        assert group.words_of(1)[0, 0] == 2, "it has told the other rank"
        assert group.words_of(0)[1, 0] == 0, "which has not come"


class WaitingConformance:
    """The tests that see a launch wait. The device must have memory that the host can write."""

    def test_a_rank_waits_for_each_of_the_others(self, device):
        group = Group(3, 1, 16, torch.float32, device)
        want = plain.sum_parts(torch.stack(group.parts[0]))
        group.sum(0)
        words = group.words_of(1)
        launch = threading.Thread(
            target=sum_parts, args=(group.outs[1], group.offsets[0], group.peers[1])
        )
        launch.start()
        for rank in (2, 0):
            launch.join(0.1)
            assert launch.is_alive(), "the words of the meeting before do not count"
            words[rank, 0] = 2
        join_all([launch])
        assert torch.equal(group.outs[1], want)

    def test_the_word_of_the_host_is_read_while_it_waits(self, device):
        group = Group(2, 1, 16, torch.float32, device)
        launch = threading.Thread(target=meet, args=(group.peers[0], True))
        launch.start()
        launch.join(0.1)
        assert launch.is_alive()
        group.ended[0] = 1
        join_all([launch])
