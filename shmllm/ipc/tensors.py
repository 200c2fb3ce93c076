"""Tensors in slots: from an array or tensor on one side to a view of it on the other.

Owns how a tensor's bytes get into a slot, and the life of a view; must not know how a
`TensorRef` travels, nor what a tensor is for. torch is imported only by functions that have
to do with its tensors.

A slot goes back when the last array over it is garbage, so no array that anybody still holds
can change. An explicit `release` says that no more will be made: with none left it takes
effect at once, otherwise with the last one.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmllm.errors import IpcError, IpcTimeoutError, ProtocolMismatchError
from shmllm.ipc.slots import SlotReader, SlotRef, SlotWriter
from shmllm.ipc.tensor_ref import DTYPES, MAX_DIMENSIONS, TensorRef

__all__ = ["TensorReader", "TensorRef", "TensorView", "TensorWriter"]

# Saves the 2 us that numpy takes to spell a name.
_NAMES_IN_NUMPY = {each.numpy: name for name, each in DTYPES.items() if not each.is_pattern}
_SAME_SIZE_IN_TORCH = {1: "uint8", 2: "int16", 4: "int32"}
_FIRST_PAUSE_S = 0.000_1
_LONGEST_PAUSE_S = 0.002


class TensorWriter:
    """The sending end.

    Args:
        slots: to write into.
    """

    __slots__ = ("_slots",)

    def __init__(self, slots: SlotWriter) -> None:
        self._slots = slots

    def try_put(self, source: Any) -> TensorRef | None:
        """Copy a tensor into a slot and lend it to the reader; None while all are lent.

        One copy, whatever the source's strides are.

        Args:
            source: numpy array or scalar, or torch tensor on the CPU, of any shape with at
                most 8 dimensions and any dtype in `DTYPES`.

        Raises:
            TypeError: neither of these, or of another dtype.
            ValueError: too many dimensions, or a tensor in another device's memory.
            MessageTooLargeError: larger than the largest slot.
            NoSpaceError: shared memory is full; nothing is lent, the slots stay usable.
        """
        return self._try_put(*as_array(source))

    def put(self, source: Any, *, deadline: float | None, on_full: Callable[[], None]) -> TensorRef:
        """As `try_put`, waiting for a slot.

        Args:
            source: see there.
            deadline: on `time.monotonic()`; None leaves the end to `on_full`.
            on_full: called before each wait. It has to drain the ring in the other
                direction, or a peer that waits for room there and this end block each
                other, and to raise if the peer is dead.

        Raises:
            IpcTimeoutError: all slots that could hold it stayed lent until the deadline.
        """
        array, name = as_array(source)
        pause_s = _FIRST_PAUSE_S
        while (ref := self._try_put(array, name)) is None:
            on_full()
            if deadline is not None and time.monotonic() >= deadline:
                raise IpcTimeoutError(
                    f"no tensor slot for {array.nbytes} bytes in time: the reader holds all "
                    f"{self._slots.num_slots_for(array.nbytes)} that could take them; it has to "
                    "release its views, and to drop the arrays made from them"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return ref

    def _try_put(self, array: NDArray[Any], name: str) -> TensorRef | None:
        slot = self._slots.claim(array.nbytes)
        if slot is None:
            return None
        try:
            target: NDArray[Any] = np.ndarray(array.shape, DTYPES[name].numpy, slot.buffer)
            np.copyto(target, array, casting="equiv")
        except BaseException:
            slot.abort()
            raise
        return TensorRef(slot.publish(), name, array.shape)


def as_array(source: Any) -> tuple[NDArray[Any], str]:
    """(an array over the same memory with a dtype of numpy's own, name of the real dtype)."""
    if isinstance(source, (np.ndarray, np.generic)):
        array = np.asarray(source)
        name = _NAMES_IN_NUMPY.get(array.dtype) or array.dtype.name
    elif hasattr(source, "detach") and hasattr(source, "device"):
        array, name = _tensor_as_array(source)
    else:
        raise TypeError(
            f"{type(source).__name__} is neither a numpy array nor a torch tensor; convert it "
            "with numpy.asarray"
        )
    dtype = DTYPES.get(name)
    if dtype is None:
        raise TypeError(f"dtype {name} cannot be sent; these can: {', '.join(DTYPES)}")
    if array.ndim > MAX_DIMENSIONS:
        raise ValueError(f"{array.ndim} dimensions; at most {MAX_DIMENSIONS} can be sent")
    return array.view(dtype.numpy) if dtype.is_pattern else array, name


def _tensor_as_array(tensor: Any) -> tuple[NDArray[Any], str]:
    if tensor.device.type != "cpu" or str(tensor.layout) != "torch.strided":
        raise ValueError(
            f"a {tensor.layout} tensor on {tensor.device} cannot be sent; only dense ones in CPU "
            "memory (`.cpu()`, `.to_dense()`)"
        )
    name = str(tensor.dtype).removeprefix("torch.")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    dtype = DTYPES.get(name)
    if dtype is None:
        raise TypeError(f"dtype {name} cannot be sent; these can: {', '.join(DTYPES)}")
    if dtype.is_pattern:
        import torch  # Loaded already, or there would be no tensor.

        # Same item size, so that any strides will do.
        tensor = tensor.view(getattr(torch, _SAME_SIZE_IN_TORCH[dtype.numpy.itemsize]))
    array: NDArray[Any] = tensor.numpy()
    return array, name


class TensorView:
    """A tensor in place. Release it, use it in `with`, or let it and its arrays be collected.

    Attributes:
        ref: what it shows.
    """

    __slots__ = ("__weakref__", "_finalizer", "_root", "ref")

    def __init__(
        self, ref: TensorRef, memory: memoryview, give_back: Callable[[SlotRef], None]
    ) -> None:
        self.ref = ref
        # Every array and tensor made here holds the root; nothing but its end frees the slot.
        # `frombuffer` holds the buffer, so the segment cannot be unmapped under it either;
        # `ndarray(buffer=...)` would only hold the mapping's object.
        self._root: NDArray[np.uint8] | None = np.frombuffer(memory, np.uint8)
        self._finalizer = weakref.finalize(self._root, give_back, ref.slot)
        # At the end of the process arrays may still be in use, and the peer learns of it anyway.
        self._finalizer.atexit = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ref.shape

    @property
    def dtype(self) -> str:
        """A key of `DTYPES`."""
        return self.ref.dtype

    @property
    def nbytes(self) -> int:
        return self.ref.slot.nbytes

    def numpy(self) -> NDArray[Any]:
        """The tensor, read-only, without a copy.

        dtypes that numpy lacks come as unsigned integers with the same bits: bfloat16 as
        uint16, the float8 ones and float4_e2m1fn_x2 as uint8, complex32 as uint32.

        Raises:
            ValueError: it was released.
        """
        memory = self._get_root().data.toreadonly()
        return np.frombuffer(memory, DTYPES[self.ref.dtype].numpy).reshape(self.ref.shape)

    def torch(self) -> Any:
        """The tensor as a `torch.Tensor`, without a copy. Read-only by contract: torch has no such
        tensors, and what is written into it, others read.

        Raises:
            ValueError: it was released.
        """
        import torch

        flat = torch.from_numpy(self._get_root())
        return flat.view(getattr(torch, self.ref.dtype)).reshape(self.ref.shape)

    def release(self) -> bool:
        """Make no more arrays, and give the slot back as soon as those made are gone.

        Returns:
            Whether it went back now. If not, someone still holds an array or tensor made
            here; it stays valid, and the slot stays taken until then. Idempotent.
        """
        self._root = None
        return not self._finalizer.alive

    def __enter__(self) -> TensorView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def _get_root(self) -> NDArray[np.uint8]:
        if self._root is None:
            raise ValueError("this view of a tensor slot was released")
        return self._root


class TensorReader:
    """The receiving end.

    Args:
        slots: to read from.
    """

    __slots__ = ("_held", "_slots")

    def __init__(self, slots: SlotReader) -> None:
        self._slots = slots
        self._held: set[int] = set()

    @property
    def num_held(self) -> int:
        """Slots that views, or arrays made from them, keep from the writer."""
        return len(self._held)

    def view(self, ref: TensorRef) -> TensorView:
        """The tensor, in place. One view for each reference received.

        Raises:
            ProtocolMismatchError: the reference is wrong, its slot is not lent, or a view
                of it exists.
        """
        ref.check()
        if ref.slot.slot in self._held:
            raise ProtocolMismatchError(f"{ref} names a slot that a view holds already")
        view = TensorView(ref, self._slots.borrow(ref.slot), self._give_back)
        self._held.add(ref.slot.slot)
        return view

    def _give_back(self, slot: SlotRef) -> None:
        self._held.discard(slot.slot)
        # In a finalizer nobody could handle it: the slots were closed first, or this is a
        # forked child whose copy ends, or memory is damaged and the next user will say so.
        with contextlib.suppress(ValueError, IpcError):
            self._slots.release(slot)
