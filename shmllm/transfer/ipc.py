"""The backend "ipc": the trainer's tensors lie on the engine's GPU, and the engine maps them by
CUDA IPC handles.

An engine maps tensors only within one call of `update_weights`, so the trainer must not change them
until that returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from shmllm.errors import RequestError
from shmllm.transfer.buckets import plan_buckets
from shmllm.transfer.fields import read
from shmllm.transfer.ipc_handle import handle_on
from shmllm.transfer.receiver import Place
from shmllm.transfer.sender import Sender as BaseSender
from shmllm.transfer.sender import update_info_of
from shmllm.transfer.source import ParamMeta
from shmllm.transfer.update_info import UpdateInfo


@dataclass
class IPCWeightTransferInitInfo:
    """
    Attributes:
        packed: an update has one handle of a buffer, in which its tensors lie one behind the other,
            instead of one for each tensor.
    """

    packed: bool = False


@dataclass
class IPCWeightTransferUpdateInfo(UpdateInfo):
    """
    Attributes:
        ipc_handles: a dict of GPU uuid -> arguments of rebuild_cuda_tensor for each tensor; one
            dict if they are packed.
        tensor_sizes: the sizes of packed tensors in bytes.
    """

    ipc_handles: Any = None
    tensor_sizes: list[int] | None = None

    def __post_init__(self) -> None:
        UpdateInfo.__post_init__(self)
        if self.ipc_handles is None:
            raise RequestError("update_info lacks ipc_handles")
        if not isinstance(self.ipc_handles, Mapping):
            self.check_lengths("ipc_handles")
        if self.tensor_sizes is not None:
            self.check_lengths("tensor_sizes")


class Sharing(Protocol):
    """Opens IPC handles."""

    def uuid(self, device: Any) -> str:
        """The UUID of a GPU; empty for another device."""

    def rebuild(self, arguments: tuple[Any, ...]) -> Any:
        """The tensor of a handle. Raises RequestError if the driver refuses it."""

    def synchronize(self, device: Any) -> None:
        """Wait for the copies of this thread's current stream."""


class CudaSharing:
    """Opens IPC handles with torch."""

    def uuid(self, device: Any) -> str:
        import torch

        if device.type != "cuda":
            return ""
        return str(torch.cuda.get_device_properties(device).uuid)

    def rebuild(self, arguments: tuple[Any, ...]) -> Any:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        try:
            return rebuild_cuda_tensor(*arguments)
        except RuntimeError as problem:
            reason = str(problem).partition("\n")[0]
            raise RequestError(f"the driver refuses an IPC handle: {reason}") from problem

    def synchronize(self, device: Any) -> None:
        import torch

        torch.cuda.current_stream(device).synchronize()


class Receiver:
    """The engine's end; see `transfer.receiver`.

    Args:
        place: where the engine receives weights.
        sharing: opens handles.
    """

    def __init__(self, place: Place, sharing: Sharing | None = None) -> None:
        self._place = place
        self._sharing = sharing or CudaSharing()
        self._packed: bool | None = None
        self._mapped: list[Any] = []

    def open(self, init_info: Mapping[str, Any]) -> None:
        info = read(IPCWeightTransferInitInfo, init_info, "init_info")
        if not self._sharing.uuid(self._place.device):
            raise RequestError("the backend 'ipc' needs an engine on a GPU; 'shm' has no handles")
        if type(info.packed) is not bool:
            raise RequestError(f"packed must be True or False, got {info.packed!r}")
        self._packed = info.packed

    def read_update(self, update_info: Mapping[str, Any]) -> UpdateInfo:
        update = read(IPCWeightTransferUpdateInfo, update_info, "update_info")
        if self._packed is None:
            raise RequestError("call init_weight_transfer_engine first")
        sizes = update.sizes
        if self._packed != isinstance(update.ipc_handles, Mapping):
            wanted = "one dict" if self._packed else "a list with a dict for each tensor"
            raise RequestError(f"ipc_handles must be {wanted} with packed={self._packed}")
        if self._packed and update.tensor_sizes is None:
            raise RequestError("packed tensors need tensor_sizes")
        for name, size, said in zip(update.names, sizes, update.tensor_sizes or sizes, strict=True):
            if size != said:
                raise RequestError(f"{name} has {size} bytes by its shape, {said} by tensor_sizes")
        return update

    def receive(self, update: UpdateInfo) -> None:
        assert isinstance(update, IPCWeightTransferUpdateInfo)
        try:
            tensors = self._unpacked(update) if self._packed else self._single(update)
            for name, shape, tensor in zip(update.names, update.shapes, tensors, strict=True):
                self._place.put(name, tuple(shape), tensor)
        finally:
            self._sharing.synchronize(self._place.device)
            self._mapped.clear()  # not before the copies have ended

    def progress(self) -> int:
        return 0

    def close(self) -> None:
        self._packed = None

    def _open(self, handles: object) -> Any:
        device = self._place.device
        arguments = handle_on(handles, self._sharing.uuid(device), device.index or 0)
        self._mapped.append(self._sharing.rebuild(arguments))
        return self._mapped[-1]

    def _single(self, update: IPCWeightTransferUpdateInfo) -> Iterator[Any]:
        each = zip(update.names, update.shapes, update.dtypes, update.ipc_handles, strict=True)
        for name, shape, dtype, handles in each:
            tensor = self._open(handles)
            if tensor.dtype != dtype or tensor.numel() != math.prod(shape):
                raise RequestError(
                    f"the handle of {name} is of {tensor.numel()} elements in {tensor.dtype}, not "
                    f"{shape} in {dtype}"
                )
            yield tensor

    def _unpacked(self, update: IPCWeightTransferUpdateInfo) -> Iterator[Any]:
        import torch

        buffer = self._open(update.ipc_handles).view(torch.uint8).view(-1)
        sizes = update.sizes
        if sum(sizes) > len(buffer):
            raise RequestError(f"the buffer has {len(buffer)} bytes, its tensors {sum(sizes)}")
        end = 0
        for size, dtype in zip(sizes, update.dtypes, strict=True):
            piece = buffer[end : end + size]
            end += size
            is_aligned = piece.storage_offset() % dtype.itemsize == 0
            yield (piece if is_aligned else piece.clone()).view(dtype)


def reduce(tensor: Any) -> tuple[Any, ...]:
    """The arguments with which another process rebuilds a tensor of a GPU."""
    from torch.multiprocessing.reductions import reduce_tensor

    arguments: tuple[Any, ...] = reduce_tensor(tensor)[1]
    return arguments


class Sender(BaseSender):
    """The trainer's end. The tensors must be on the GPU of the engine's first rank."""

    sharing: Sharing = CudaSharing()
    reduce: Callable[[Any], tuple[Any, ...]] = staticmethod(reduce)

    def connect(self) -> None:
        self.client.init({"packed": self.info.packed})

    def transmit(self) -> None:
        meta = self.source.metadata()
        sizes = UpdateInfo(**update_info_of(meta)).sizes
        pairs = self.checked_pairs(meta)
        most = self.info.packed_buffer_size_bytes
        for bucket in plan_buckets(sizes, most):
            part = slice(bucket.first, bucket.first + len(bucket.offsets))
            self._send(meta[part], sizes[part], pairs)
        next(pairs, None)  # raises if there are more

    def _send(
        self, meta: list[ParamMeta], sizes: list[int], pairs: Iterator[tuple[str, Any]]
    ) -> None:
        """Send tensors by one call, and keep them until it returns."""
        import torch

        # A copy of its own: a source may use the memory of one tensor for the next one.
        kept = [next(pairs)[1].reshape(-1).view(torch.uint8).clone() for _ in meta]
        info = update_info_of(meta)
        if self.info.packed:
            buffer = torch.cat(kept)
            info |= {"ipc_handles": self._handle(buffer), "tensor_sizes": sizes}
        else:
            kept = [each.view(one.dtype) for each, one in zip(kept, meta, strict=True)]
            info["ipc_handles"] = [self._handle(each) for each in kept]
        self.sharing.synchronize(kept[0].device)
        self.client.update(info)

    def _handle(self, tensor: Any) -> dict[str, tuple[Any, ...]]:
        uuid = self.sharing.uuid(tensor.device)
        if not uuid:
            raise RequestError(f"the backend 'ipc' needs tensors on a GPU, got {tensor.device}")
        return {uuid: self.reduce(tensor)}
