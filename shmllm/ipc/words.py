"""The only loads and stores of live shared words, and the fence.

Owns how a word is read and written so that the other process sees it whole and in order;
must not know what any word means. `memoryview.cast("Q")[i]` moves eight bytes at once.
`struct.pack_into` must never touch a live word: it zeroes its target first, and the peer
can read the zero.

x86-64 keeps loads in order and stores in order, so a plain word is enough to publish and
to consume. Other machines (aarch64) reorder both: there every store is preceded and every
load followed by a fence. Tested on x86-64; aarch64 is written from its manual, untested.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Callable

from shmllm.errors import SegmentError
from shmllm.ipc.layout import WORD_BYTES

IS_STORE_ORDERED = platform.machine() in ("x86_64", "AMD64")
_SEQUENTIALLY_CONSISTENT = 5


class PlainWord:
    """One shared u64 on a machine that keeps stores in order.

    Args:
        view: the buffer of a segment, one byte per item.
        offset: where the word lies, a multiple of 8.
    """

    __slots__ = ("_view",)

    def __init__(self, view: memoryview, offset: int) -> None:
        self._view = view[offset : offset + WORD_BYTES].cast("Q")

    def load(self) -> int:
        """What the word holds now."""
        return self._view[0]

    def store(self, value: int) -> None:
        """Replace the word in one piece; everything stored before is visible first."""
        self._view[0] = value

    def close(self) -> None:
        """Let go of the segment; any later use raises ValueError."""
        self._view.release()


class FencedWord(PlainWord):
    """One shared u64 on a machine that reorders: store-release and load-acquire."""

    __slots__ = ()

    def load(self) -> int:
        value = self._view[0]
        fence()
        return value

    def store(self, value: int) -> None:
        fence()
        self._view[0] = value


Word: type[PlainWord] = PlainWord if IS_STORE_ORDERED else FencedWord


def _make_fence() -> Callable[[], None]:
    if IS_STORE_ORDERED:
        return _fence_by_lock
    try:
        thread_fence = ctypes.PyDLL("libatomic.so.1").atomic_thread_fence
    except (OSError, AttributeError) as error:
        raise SegmentError(
            f"shared memory on {platform.machine()} needs libatomic.so.1, which could not be "
            f"loaded ({error}); install it (Debian and Ubuntu: libatomic1, Fedora: libatomic)"
        ) from error
    thread_fence.argtypes = [ctypes.c_int]
    thread_fence.restype = None
    return lambda: thread_fence(_SEQUENTIALLY_CONSISTENT)


_lock = threading.RLock()
_acquire = _lock.acquire
_release = _lock.release


def _fence_by_lock() -> None:
    """Taking a free lock is a locked instruction, which drains the store buffer.

    Re-entrant, because a signal handler may fence between the two calls.
    """
    _acquire()
    _release()


fence: Callable[[], None] = _make_fence()
"""Full barrier: no load after it happens before a store in front of it is visible.

Parking needs it on both sides. A reader stores `parked`, then loads the ring; a writer
stores the ring's cursor, then loads `parked`. Even x86-64 lets such a load overtake the
store: both would read the old value, and the reader would sleep on a full ring.
"""


class WordTable:
    """Several words side by side, each with a writer of its own, read all at once.

    Args:
        view: the buffer of a segment, one byte per item.
        offset: where the first word lies, a multiple of 8.
        count: how many there are.
    """

    __slots__ = ("_view", "_words")

    def __init__(self, view: memoryview, offset: int, count: int) -> None:
        self._view = view[offset : offset + count * WORD_BYTES].cast("Q")
        self._words = [Word(view, offset + index * WORD_BYTES) for index in range(count)]

    def load_all(self) -> list[int]:
        """Every word, each read whole; not one moment of all of them."""
        values = self._view.tolist()
        if not IS_STORE_ORDERED:
            fence()
        return values

    def load(self, index: int) -> int:
        return self._words[index].load()

    def store(self, index: int, value: int) -> None:
        self._words[index].store(value)

    def close(self) -> None:
        """Let go of the segment; any later use raises ValueError."""
        self._view.release()
        for word in self._words:
            word.close()


class Numbers:
    """Words side by side that one process writes and any process reads. Each is read whole;
    nothing is published by them, so no order is kept between them, and a store is cheaper.

    Args:
        view: the buffer of a segment, one byte per item.
        offset: where the first one lies, a multiple of 8.
        count: how many there are.
    """

    __slots__ = ("_view",)

    def __init__(self, view: memoryview, offset: int, count: int) -> None:
        self._view = view[offset : offset + count * WORD_BYTES].cast("Q")

    def store(self, index: int, value: int) -> None:
        self._view[index] = value

    def add(self, index: int, amount: int) -> None:
        """Only for the one process that writes."""
        self._view[index] += amount

    def load(self, index: int) -> int:
        return self._view[index]

    def load_all(self) -> list[int]:
        """Every number, each read whole; not one moment of all of them."""
        return self._view.tolist()

    def close(self) -> None:
        """Let go of the segment; any later use raises ValueError."""
        self._view.release()
