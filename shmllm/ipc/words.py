"""Loads and stores of shared words, and the memory fence.

Every load and store of a live shared word (one that another process may use at the same time) goes
through this module, so that the other process sees whole words in the right order. This module
must not know the meaning of a word. `memoryview.cast("Q")[i]` moves eight bytes at once.
`struct.pack_into` must never write to a live word: it first fills its target with zeros, and the
other process can read the zero.

x86-64 keeps loads in order and stores in order, so plain loads and stores are enough to publish
and to consume. Other machines (aarch64) reorder both; there, a fence precedes every store and
follows every load. The section "Memory order" of docs/ipc.md says, for each word, which fences its
protocol needs and what they rest on.
"""

from __future__ import annotations

import ctypes
import io
import platform
from collections.abc import Callable, Iterable

from shmllm.errors import SegmentError
from shmllm.ipc.layout import WORD_BYTES

IS_STORE_ORDERED = platform.machine() in ("x86_64", "AMD64")
_SEQUENTIALLY_CONSISTENT = 5


class PlainWord:
    """One shared u64, for a machine that keeps stores in order.

    Args:
        view: the bytes of a segment, one byte per item.
        offset: the byte offset of the word, a multiple of 8.
    """

    __slots__ = ("_view",)

    def __init__(self, view: memoryview, offset: int) -> None:
        self._view = view[offset : offset + WORD_BYTES].cast("Q")

    def load(self) -> int:
        """The current value."""
        return self._view[0]

    def store(self, value: int) -> None:
        """Replace the value at once. Other processes see all earlier stores of this process
        before they see this one."""
        self._view[0] = value

    def close(self) -> None:
        """Release the view of the segment; any later use raises ValueError."""
        self._view.release()


class FencedWord(PlainWord):
    """One shared u64, for a machine that reorders: store-release and load-acquire."""

    __slots__ = ()

    def load(self) -> int:
        value = self._view[0]
        fence()
        return value

    def store(self, value: int) -> None:
        fence()
        self._view[0] = value


class TwiceFencedWord(FencedWord):
    """One shared u64 for a machine that reorders, with a fence on both sides of each access."""

    __slots__ = ()

    def load(self) -> int:
        fence()
        return super().load()

    def store(self, value: int) -> None:
        super().store(value)
        fence()


Word: type[PlainWord] = PlainWord if IS_STORE_ORDERED else FencedWord

CountWord: type[PlainWord] = PlainWord if IS_STORE_ORDERED else TwiceFencedWord
"""A word that counts records which its writer overwrites without asking the reader.

The reader copies records and then loads the count again to learn which of them were overwritten
meanwhile. So the copy must end before that load, and the writer's store of the count must be
visible before its stores to the next record.
"""


def _make_fence() -> Callable[[], object]:
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


# Each `peek` of a BufferedReader takes and frees the reader's lock, and reads nothing if its buffer
# is full. On x86-64 both execute a locked instruction, which drains the store buffer. The lock is
# never held between two instructions of Python: an exception of a signal handler cannot leave it
# locked, the handler may itself fence, and a forked child finds it free.
_fence_by_lock = io.BufferedReader(io.BytesIO(b"x")).peek
_fence_by_lock()


fence: Callable[[], object] = _make_fence()
"""A full memory barrier: all stores before it become visible before any load after it.

Both sides of a doorbell need the barrier. A reader stores `parked` and then loads the ring's
cursor; a writer stores the cursor and then loads `parked`. Even x86-64 may execute the load before
the store becomes visible. Without the barrier, both processes could load the old value, and the
reader would sleep although the ring has a record.
"""


class WordTable:
    """Adjacent shared words, of which each may have another writing process.

    Args:
        view: the bytes of a segment, one byte per item.
        offset: the byte offset of the first word, a multiple of 8.
        count: the number of words.
    """

    __slots__ = ("_view", "_words")

    def __init__(self, view: memoryview, offset: int, count: int) -> None:
        self._view = view[offset : offset + count * WORD_BYTES].cast("Q")
        self._words = [Word(view, offset + index * WORD_BYTES) for index in range(count)]

    def load_all(self) -> list[int]:
        """The values of all words. Each word is read whole, but not all at the same time."""
        values = self._view.tolist()
        if not IS_STORE_ORDERED:
            fence()
        return values

    def load(self, index: int) -> int:
        return self._words[index].load()

    def store(self, index: int, value: int) -> None:
        self._words[index].store(value)

    def close(self) -> None:
        """Release the views of the segment; any later use raises ValueError."""
        self._view.release()
        for word in self._words:
            word.close()


class Numbers:
    """Adjacent shared words that one process writes and any process reads.

    Each word is read and written whole, but the order of stores is not kept on every machine, which
    makes a store cheaper. Therefore these words must not publish other data.

    Args:
        view: the bytes of a segment, one byte per item.
        offset: the byte offset of the first word, a multiple of 8.
        count: the number of words.
    """

    __slots__ = ("_view",)

    def __init__(self, view: memoryview, offset: int, count: int) -> None:
        self._view = view[offset : offset + count * WORD_BYTES].cast("Q")

    def store(self, index: int, value: int) -> None:
        self._view[index] = value

    def store_all(self, values: Iterable[int]) -> None:
        """Store the first words, one after the other."""
        view = self._view
        for index, value in enumerate(values):
            view[index] = value

    def add(self, index: int, amount: int) -> None:
        """Add to a word. Only the writing process may call this."""
        self._view[index] += amount

    def load(self, index: int) -> int:
        return self._view[index]

    def load_all(self) -> list[int]:
        """The values of all words. Each word is read whole, but not all at the same time."""
        return self._view.tolist()

    def close(self) -> None:
        """Release the view of the segment; any later use raises ValueError."""
        self._view.release()
