"""Memory of a GPU that two processes share, by a CUDA IPC handle of 64 bytes.

There is one class for each end: `ExportedMemory` in the process that allocates the memory, and
`MappedMemory` in a process that maps it. This module must not know what lies in the memory or how
a handle is sent. Only its functions import torch and cuda-bindings.

The memory comes from cuMemAlloc and not from torch's allocator. A handle stands for a whole
allocation: in torch's allocator that is a segment, in which other tensors lie, and expandable
segments (cuMemCreate) have no such handle. Sizes are multiples of 2 MiB, because the driver may
put smaller allocations into one block, and a handle shows the whole block.

The driver keeps the memory as long as a process maps it, also after the end of the process that
allocated it. Only cuMemFree has to come after every cuIpcCloseMemHandle: the exporting process
must call `ExportedMemory.close` after the other one has called `MappedMemory.close` or ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from shmllm.errors import DeviceMemoryError

GRANULARITY_BYTES = 2 * 2**20
HANDLE_BYTES = 64
_PORTABLE, _MAPPED = 1, 2  # CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag that the driver takes


class CudaSharing:
    """Shares memory with CUDA; a `client.protocol.DeviceSharing`.

    Args:
        driver: the module `cuda.bindings.driver`, or a fake in tests; None imports it at first use.
    """

    def __init__(self, driver: Any = None) -> None:
        self._driver = driver

    def uuid(self, device: Any) -> str:
        """The UUID of a GPU, which is the same in all processes; empty for another device."""
        if device.type != "cuda":
            return ""
        return str(_cuda().get_device_properties(device).uuid)

    def export(self, num_bytes: int, device: Any) -> ExportedMemory:
        return ExportedMemory(num_bytes, _Driver(device, self._driver))

    def open(self, handle: str, num_bytes: int, device: Any) -> MappedMemory:
        return MappedMemory(handle, num_bytes, _Driver(device, self._driver))

    def map_host(self, address: int, num_bytes: int, device: Any) -> Any:
        """Let a GPU read memory of the host, which must stay mapped as long as this process lives.

        Args:
            address: where it begins.
            num_bytes: its size.
            device: the GPU.

        Returns:
            (num_bytes,) uint8, the memory as the GPU sees it. It does not own the memory.

        Raises:
            DeviceMemoryError: the driver refuses it.
        """
        driver = _Driver(device, self._driver)
        page = address // mmap.PAGESIZE * mmap.PAGESIZE
        size = -(-(address + num_bytes - page) // mmap.PAGESIZE) * mmap.PAGESIZE
        driver.call("cuMemHostRegister", page, size, _PORTABLE | _MAPPED)
        begin = int(driver.call("cuMemHostGetDevicePointer", page, 0))
        return driver.tensor_at(begin + address - page, num_bytes)

    def synchronize(self, device: Any) -> None:
        """Wait for the work of this thread's current stream."""
        _cuda().current_stream(device).synchronize()


class ExportedMemory:
    """Memory that this process allocates and another one may map.

    Args:
        num_bytes: the size.
        driver: the driver of the GPU.

    Attributes:
        handle: the handle, in hexadecimal digits.
        tensor: (num_bytes,) uint8, the memory. It does not keep this object alive.

    Raises:
        DeviceMemoryError: there is not that much memory, or the driver does not export it.
    """

    def __init__(self, num_bytes: int, driver: _Driver) -> None:
        self._driver = driver
        size = -(-max(num_bytes, 1) // GRANULARITY_BYTES) * GRANULARITY_BYTES
        self._address = int(driver.allocate(size))
        try:
            handle = driver.call("cuIpcGetMemHandle", self._address)
            self.handle = ctypes.string_at(handle.getPtr(), HANDLE_BYTES).hex()
            self.tensor = driver.tensor_at(self._address, num_bytes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free the memory, which no process may map any more. Idempotent."""
        address, self._address = self._address, 0
        if address:
            self._driver.call("cuMemFree", address)


class MappedMemory:
    """Memory that another process allocated and exported.

    Args:
        handle: the `ExportedMemory.handle`.
        num_bytes: the size; the memory behind the handle may be larger.
        driver: the driver of the GPU.

    Attributes:
        tensor: (num_bytes,) uint8, the memory, which must not be used after `close`.

    Raises:
        DeviceMemoryError: the text is no handle, the memory is smaller, or the driver refuses the
            handle: the memory was freed, is on a GPU out of reach or of this process, or a
            container forbids the access.
    """

    def __init__(self, handle: str, num_bytes: int, driver: _Driver) -> None:
        self._driver = driver
        self._address = int(
            driver.call("cuIpcOpenMemHandle", driver.handle(handle), _LAZY_PEER_ACCESS)
        )
        try:
            # An access behind the end would end every later call of CUDA in this process.
            size = driver.bytes_at(self._address)
            if num_bytes > size:
                raise DeviceMemoryError(
                    f"the memory of the handle has {size:,} bytes, not {num_bytes:,}"
                )
            self.tensor = driver.tensor_at(self._address, num_bytes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the mapping. Work that uses it must be done. Idempotent."""
        address, self._address = self._address, 0
        if address:
            self._driver.call("cuIpcCloseMemHandle", address)


class LocalSharing:
    """Hands memory over within one process, where the driver opens no handle of its own; a
    `client.protocol.DeviceSharing` for an engine in the caller's process."""

    def __init__(self) -> None:
        self._exported: dict[str, LocalMemory] = {}
        self._cuda = CudaSharing()

    def uuid(self, device: Any) -> str:
        return self._cuda.uuid(device)

    def export(self, num_bytes: int, device: Any) -> LocalMemory:
        memory = LocalMemory(num_bytes, device)
        self._exported = {memory.handle: memory}
        return memory

    def open(self, handle: str, num_bytes: int, device: Any) -> LocalMemory:
        try:
            return self._exported.pop(handle)
        except KeyError:
            raise DeviceMemoryError(f"{handle!r} is not a handle of this process") from None

    def synchronize(self, device: Any) -> None:
        self._cuda.synchronize(device)


class LocalMemory:
    """Both ends of memory that `LocalSharing` hands over. The first `close` frees it."""

    def __init__(self, num_bytes: int, device: Any) -> None:
        torch = import_module("torch")
        try:
            with torch.inference_mode(False):
                self.tensor: Any = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as problem:
            raise DeviceMemoryError(_first_line(problem)) from problem
        self.handle = str(id(self))

    def close(self) -> None:
        self.tensor = None


class _Driver:
    """The functions of the CUDA driver, with the context of a GPU.

    Args:
        device: the GPU, a torch.device; tests with a fake driver use a CPU.
        bindings: the module `cuda.bindings.driver`; None imports it.

    Raises:
        DeviceMemoryError: the package cuda-bindings is missing.
    """

    def __init__(self, device: Any, bindings: Any = None) -> None:
        self._device = device
        try:
            self._bindings = bindings or import_module("cuda.bindings.driver")
        except ImportError as problem:
            raise DeviceMemoryError("the package cuda-bindings is missing") from problem

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the driver. Returns its value; a list if it has none or several.

        Raises:
            DeviceMemoryError: the function returned an error.
        """
        try:
            with self._context():
                result, *values = getattr(self._bindings, name)(*arguments)
        except RuntimeError as problem:  # from torch, or from the bindings: there is no driver
            raise DeviceMemoryError(f"{name} failed: {_first_line(problem)}") from problem
        if result != self._bindings.CUresult.CUDA_SUCCESS:
            raise DeviceMemoryError(f"{name} failed: {getattr(result, 'name', result)}")
        return values[0] if len(values) == 1 else values

    def allocate(self, num_bytes: int) -> Any:
        """Allocate memory, if need be after torch has given back what it keeps without use."""
        try:
            return self.call("cuMemAlloc", num_bytes)
        except DeviceMemoryError:
            if self._device.type == "cuda":
                _cuda().empty_cache()
            return self.call("cuMemAlloc", num_bytes)

    def handle(self, text: str) -> Any:
        """The driver's handle of an `ExportedMemory.handle`."""
        try:
            content = bytes.fromhex(text)
        except (TypeError, ValueError):
            content = b""
        if len(content) != HANDLE_BYTES:
            raise DeviceMemoryError(f"{text!r} is not a handle of {HANDLE_BYTES} bytes")
        handle = self._bindings.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), content, HANDLE_BYTES)
        return handle

    def bytes_at(self, address: int) -> int:
        """The number of bytes from an address to the end of its allocation."""
        base, size = self.call("cuMemGetAddressRange", address)
        return int(base) + int(size) - address

    def tensor_at(self, address: int, num_bytes: int) -> Any:
        """A tensor (num_bytes,) uint8 over memory that it does not own."""
        torch = import_module("torch")
        storage = torch._C._construct_storage_from_data_pointer(address, self._device, num_bytes)
        with torch.inference_mode(False):  # both modes may write the tensor then
            empty = torch.empty(0, dtype=torch.uint8, device=self._device)
            return empty.set_(storage, 0, (num_bytes,), (1,))

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        if self._device.type != "cuda":
            yield
            return
        cuda = _cuda()
        with cuda.device(self._device):
            # The first call of the runtime makes the context current in this thread.
            cuda.current_stream().synchronize()
            yield


def _first_line(problem: Exception) -> str:
    return str(problem).partition("\n")[0] or type(problem).__name__


def _cuda() -> Any:
    return import_module("torch.cuda")
