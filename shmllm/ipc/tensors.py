"""Sends tensors through slots: the writer copies a tensor, the reader gets a view of the copy.

This module owns the copy into a slot and the lifetime of a view. It must not know how a
`TensorRef` is sent, nor the purpose of a tensor. Only functions that handle torch tensors import
torch.

A view releases its slot when the last array over the slot is garbage-collected, so the contents of
an array that still exists cannot change. `TensorView.release` forbids new arrays. It releases the
slot at once if no array exists, and otherwise the end of the last array does.
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

# A dictionary, because `numpy.dtype.name` takes 2 us.
_NAMES_IN_NUMPY = {each.numpy: name for name, each in DTYPES.items() if not each.is_pattern}
_SAME_SIZE_IN_TORCH = {1: "uint8", 2: "int16", 4: "int32"}
_FIRST_PAUSE_S = 0.000_1
_LONGEST_PAUSE_S = 0.002


class TensorWriter:
    """Copies tensors into slots.

    Args:
        slots: the writer of the slots.
    """

    __slots__ = ("_slots",)

    def __init__(self, slots: SlotWriter) -> None:
        self._slots = slots

    def try_put(self, source: Any) -> TensorRef | None:
        """Copy a tensor into a slot and publish it. The tensor is copied once, with any strides.

        Args:
            source: a numpy array or scalar, or a torch tensor on the CPU, of any shape with at
                most 8 dimensions and any dtype in `DTYPES`.

        Returns:
            The reference for the reader; None if the reader holds all slots of a suitable size.

        Raises:
            TypeError: `source` is no array or tensor, or has another dtype.
            ValueError: `source` has too many dimensions, is sparse, or lies on another device.
            MessageTooLargeError: `source` is larger than the largest slot.
            NoSpaceError: shared memory is full; nothing is published, and the slots stay usable.
        """
        return self._try_put(*as_array(source))

    def put(self, source: Any, *, deadline: float | None, on_full: Callable[[], None]) -> TensorRef:
        """Copy a tensor into a slot and publish it; wait until a slot is free.

        Args:
            source: as for `try_put`.
            deadline: a time on `time.monotonic()`; None: only an error of `on_full` ends the
                wait.
            on_full: called before each wait. It must drain the ring of the other direction,
                because otherwise this end and a peer that waits for room in that ring block each
                other. It must raise an error if the peer is dead.

        Raises:
            IpcTimeoutError: the reader held all suitable slots until the deadline.
            TypeError, ValueError, MessageTooLargeError, NoSpaceError: as for `try_put`.
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
    """(an array over the memory of `source` with a native dtype of numpy, the name of the dtype of
    `source` in `DTYPES`)."""
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
        import torch  # already imported by the caller, who has a tensor

        # The new dtype has the same item size, so this works with any strides.
        tensor = tensor.view(getattr(torch, _SAME_SIZE_IN_TORCH[dtype.numpy.itemsize]))
    array: NDArray[Any] = tensor.numpy()
    return array, name


class TensorView:
    """A tensor in a slot, without a copy.

    The slot is released after `release`, after the end of a `with` block, or after the garbage
    collection of the view, but never while an array or tensor made from the view exists.

    Attributes:
        ref: the reference to the tensor.
    """

    __slots__ = ("__weakref__", "_finalizer", "_root", "ref")

    def __init__(
        self, ref: TensorRef, memory: memoryview, release_slot: Callable[[SlotRef], None]
    ) -> None:
        self.ref = ref
        # Every array and tensor made here references the root array, and only the end of the root
        # array releases the slot. `frombuffer` exports the buffer, which also keeps the segment
        # mapped; `ndarray(buffer=...)` would only reference the mapping object.
        self._root: NDArray[np.uint8] | None = np.frombuffer(memory, np.uint8)
        self._finalizer = weakref.finalize(self._root, release_slot, ref.slot)
        # At process exit arrays may still be in use, and the peer notices the exit anyway.
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
        """The tensor as a read-only array, without a copy.

        A dtype that numpy lacks appears as unsigned integers with the same bits: bfloat16 as
        uint16, the float8 dtypes and float4_e2m1fn_x2 as uint8, complex32 as uint32.

        Raises:
            ValueError: the view was released.
        """
        memory = self._get_root().data.toreadonly()
        return np.frombuffer(memory, DTYPES[self.ref.dtype].numpy).reshape(self.ref.shape)

    def torch(self) -> Any:
        """The tensor as a `torch.Tensor`, without a copy.

        torch has no read-only tensors, but the caller must not write to this one: other arrays
        and tensors over the slot share its memory.

        Raises:
            ValueError: the view was released.
        """
        import torch

        flat = torch.from_numpy(self._get_root())
        return flat.view(getattr(torch, self.ref.dtype)).reshape(self.ref.shape)

    def release(self) -> bool:
        """Forbid new arrays, and release the slot as soon as no array of this view exists.
        Idempotent.

        Returns:
            Whether the slot is released now. If not, an array or tensor made from this view still
            exists; it stays valid, and its end releases the slot.
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
    """Creates views of tensors in slots.

    Args:
        slots: the reader of the slots.
    """

    __slots__ = ("_held", "_slots")

    def __init__(self, slots: SlotReader) -> None:
        self._slots = slots
        self._held: set[int] = set()

    @property
    def num_held(self) -> int:
        """The number of slots that views, or arrays made from them, still hold; for tests."""
        return len(self._held)

    def view(self, ref: TensorRef) -> TensorView:
        """A view of the tensor. The caller creates one view for each reference that it receives.

        Raises:
            ProtocolMismatchError: the reference is invalid, its slot is not published, or a view
                of the slot exists.
        """
        ref.check()
        if ref.slot.slot in self._held:
            raise ProtocolMismatchError(f"{ref} names a slot that a view holds already")
        view = TensorView(ref, self._slots.writable_view(ref.slot), self._release_slot)
        self._held.add(ref.slot.slot)
        return view

    def _release_slot(self, slot: SlotRef) -> None:
        self._held.discard(slot.slot)
        # A finalizer cannot report an error to anybody. The error means that the slots were
        # closed first, that this is a forked child, or that memory is damaged, which the next
        # user of the slot will report.
        with contextlib.suppress(ValueError, IpcError):
            self._slots.release(slot)
