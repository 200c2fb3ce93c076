"""Programs of kernels: each replay runs every piece once and the kernels in order."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

from shmllm_kernels.cpu import Kernel, KernelProgram
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import put_word, word


@compiled
def _num_pieces(operands, piece, thread, num_threads):
    return word(operands, 1)


@compiled
def _count(operands, piece, thread, num_threads):
    """counts[piece] += 1"""
    put_word(word(operands, 0), piece, word(word(operands, 0), piece) + 1)


@compiled
def _shift(operands, piece, thread, num_threads):
    """to[piece] = from[n - 1 - piece] + 1, which is wrong if `from` is incomplete."""
    last = word(operands, 1) - 1
    put_word(word(operands, 2), piece, word(word(operands, 0), last - piece) + 1)


@compiled
def _note_thread(operands, piece, thread, num_threads):
    put_word(word(operands, 0), piece, 10 * num_threads + thread)


COUNT = Kernel(_num_pieces, _count)
SHIFT = Kernel(_num_pieces, _shift)
NOTE_THREAD = Kernel(_num_pieces, _note_thread)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("num_pieces", [0, 1, 2, 1000])
def test_each_replay_does_every_piece_once(num_pieces: int, num_threads: int) -> None:
    counts = np.zeros(1000, np.int64)
    program = KernelProgram(num_threads)
    program.record(COUNT, [counts.ctypes.data, num_pieces])
    for num_replays in range(1, 20):
        program.replay()
        assert (counts[:num_pieces] == num_replays).all()
        assert not counts[num_pieces:].any()


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_a_kernel_sees_the_complete_result_of_the_previous_one(num_threads: int) -> None:
    size, length = 257, 100
    buffers = np.zeros((length + 1, size), np.int64)
    program = KernelProgram(num_threads)
    for source, target in itertools.pairwise(buffers):
        program.record(SHIFT, [source.ctypes.data, size, target.ctypes.data])
    for begin in range(50):
        buffers[0] = begin
        program.replay()
        assert (buffers == begin + np.arange(length + 1)[:, None]).all()


def test_a_kernel_can_be_recorded_after_a_replay() -> None:
    counts = np.zeros(3, np.int64)
    program = KernelProgram(2)
    for _ in range(3):
        program.record(COUNT, [counts.ctypes.data, 3])
        program.replay()
    assert len(program) == 3
    assert counts.tolist() == [6, 6, 6]


def test_threads_are_numbered_from_zero() -> None:
    seen = np.zeros(500, np.int64)
    program = KernelProgram(3)
    program.record(NOTE_THREAD, [seen.ctypes.data, 500])
    program.replay()
    assert set(seen.tolist()) <= {30, 31, 32}
    program.num_threads = 1
    program.replay()
    assert set(seen.tolist()) == {10}


def test_two_python_threads_can_replay_two_programs_at_once() -> None:
    counts = np.zeros((2, 64), np.int64)

    def run(row: np.ndarray) -> None:
        program = KernelProgram(2)
        program.record(COUNT, [row.ctypes.data, 64])
        for _ in range(500):
            program.replay()

    threads = [threading.Thread(target=run, args=(row,)) for row in counts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (counts == 500).all()
