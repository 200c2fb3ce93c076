"""Tensors beside pages that nobody may touch: an access out of range ends the process."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from collections.abc import Callable

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
NOBODY, EVERYBODY = 0, mmap.PROT_READ | mmap.PROT_WRITE
LIMIT_S = 60

_libc = ctypes.CDLL(None, use_errno=True)


class GuardedMemory:
    """Memory of tensors, each of which ends where a page begins that nobody may touch, or begins
    where one ends."""

    def __init__(self) -> None:
        self._maps: list[tuple[mmap.mmap, int]] = []

    def guard(self, tensor: Tensor, is_before: bool = False) -> Tensor:
        """Return a copy.

        Args:
            tensor: contiguous, of at least one element.
            is_before: whether what lies before it may not be touched, or what lies behind it.
        """
        size = tensor.numel() * tensor.element_size()
        length = -(-size // PAGE) * PAGE
        memory = mmap.mmap(-1, length + 2 * PAGE)
        begin = PAGE if is_before else PAGE + length - size
        copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=begin)
        address = copy.data_ptr() - begin
        self._maps.append((memory, address))
        for page in (address, address + PAGE + length):
            _protect(page, PAGE, NOBODY)
        return copy.view(tensor.shape).copy_(tensor)

    def free(self) -> None:
        """Let everybody touch all pages again, which end with their tensors."""
        for memory, address in self._maps:
            _protect(address, len(memory), EVERYBODY)
        self._maps.clear()


def check_in_a_child(run: Callable[[], None]) -> None:
    """Check that a function returns in a forked process, which it may end."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        try:
            run()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"it ended with {status}"


def _protect(address: int, size: int, rights: int) -> None:
    if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), rights):
        raise OSError(ctypes.get_errno(), "mprotect")
