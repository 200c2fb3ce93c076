"""Memory of a GPU in two processes, on a fake CUDA driver that refuses calls in a wrong state."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import mmap
from types import SimpleNamespace

import pytest
import torch
from support.fake_cuda_driver import FakeDriver

from shmllm.errors import DeviceMemoryError
from shmllm.ipc import device_memory
from shmllm.ipc.device_memory import CudaSharing, LocalSharing

HOST = torch.device("cpu")
SIZE = 2**21 + 64


@pytest.fixture
def gpu():
    """The drivers of two processes with one GPU."""
    first = FakeDriver()
    return first, first.of_another_process()


def test_what_one_process_writes_the_other_one_reads(gpu):
    trainer, engine = map(CudaSharing, gpu)
    exported = trainer.export(SIZE, HOST)
    mapped = engine.open(exported.handle, SIZE, HOST)
    exported.tensor[-64:].view(torch.float32).copy_(torch.arange(16.0))
    assert len(mapped.tensor) == SIZE
    assert mapped.tensor[-64:].view(torch.float32).tolist() == list(range(16))
    assert mapped.tensor.dtype is torch.uint8
    for each in (mapped, exported):
        each.close()
        each.close()
    assert all(driver.is_clean for driver in gpu)


def test_a_handle_is_64_bytes_of_an_allocation_of_whole_granules(gpu):
    trainer, _ = gpu
    free = trainer.free_bytes
    exported = CudaSharing(trainer).export(SIZE, HOST)
    assert len(bytes.fromhex(exported.handle)) == 64
    assert free - trainer.free_bytes == 2 * 2**21
    exported.close()
    assert trainer.free_bytes == free


def test_memory_is_mapped_until_the_end_of_the_mapping_if_the_trainer_dies(gpu):
    trainer, engine = gpu
    exported = CudaSharing(trainer).export(SIZE, HOST)
    mapped = CudaSharing(engine).open(exported.handle, SIZE, HOST)
    exported.tensor.fill_(3)
    trainer.die()
    assert mapped.tensor.sum() == 3 * SIZE
    mapped.close()
    assert engine.is_clean
    assert engine.free_bytes == 2**30


def test_a_handle_is_refused_in_its_own_process_and_after_the_end_of_its_memory(gpu):
    trainer, engine = map(CudaSharing, gpu)
    exported = trainer.export(SIZE, HOST)
    with pytest.raises(DeviceMemoryError, match="cuIpcOpenMemHandle failed: CUDA_ERROR_INVALID_"):
        trainer.open(exported.handle, SIZE, HOST)
    exported.close()
    with pytest.raises(DeviceMemoryError, match="cuIpcOpenMemHandle failed"):
        engine.open(exported.handle, SIZE, HOST)


def test_a_gpu_reads_a_word_of_the_host(gpu):
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    words = torch.frombuffer(pages, dtype=torch.int64)
    word = words[mmap.PAGESIZE // 8 + 16 :][:1]
    mapped = CudaSharing(gpu[0]).map_host(word.data_ptr(), 8, HOST).view(torch.int64)
    word[0] = 7
    assert mapped.tolist() == [7]


def test_a_size_beyond_the_end_of_the_memory_is_refused(gpu):
    trainer, engine = map(CudaSharing, gpu)
    exported = trainer.export(SIZE, HOST)
    engine.open(exported.handle, 2 * 2**21, HOST).close()
    with pytest.raises(DeviceMemoryError, match="has 4,194,304 bytes, not 4,194,305"):
        engine.open(exported.handle, 2 * 2**21 + 1, HOST)
    assert gpu[1].is_clean
    exported.close()


def test_memory_whose_size_is_unknown_is_unmapped(gpu):
    trainer, engine = gpu
    exported = CudaSharing(trainer).export(SIZE, HOST)
    engine.fail = "cuMemGetAddressRange"
    with pytest.raises(DeviceMemoryError, match="cuMemGetAddressRange failed"):
        CudaSharing(engine).open(exported.handle, SIZE, HOST)
    assert engine.is_clean
    exported.close()


@pytest.mark.parametrize("text", ["", "xy", "00" * 63, "00" * 65, None, 5, ["00"]])
def test_a_text_that_is_no_handle_is_refused(gpu, text):
    with pytest.raises(DeviceMemoryError, match="not a handle of 64 bytes"):
        CudaSharing(gpu[0]).open(text, SIZE, HOST)
    assert gpu[0].calls == []


def test_memory_that_cannot_be_exported_is_freed(gpu):
    trainer, _ = gpu
    trainer.fail = "cuIpcGetMemHandle"
    with pytest.raises(DeviceMemoryError, match="cuIpcGetMemHandle failed: CUDA_ERROR_INVALID_V"):
        CudaSharing(trainer).export(SIZE, HOST)
    assert trainer.is_clean


def test_memory_that_cannot_be_used_is_unmapped_or_freed(gpu, monkeypatch):
    trainer, engine = gpu
    exported = CudaSharing(trainer).export(SIZE, HOST)
    monkeypatch.setattr(torch, "empty", None)
    with pytest.raises(TypeError):
        CudaSharing(engine).open(exported.handle, SIZE, HOST)
    with pytest.raises(TypeError):
        CudaSharing(trainer).export(SIZE, HOST)
    exported.close()
    assert engine.is_clean
    assert trainer.is_clean


def test_too_much_memory_is_refused_after_a_second_try(gpu):
    trainer, _ = gpu
    trainer.free_bytes = SIZE
    with pytest.raises(DeviceMemoryError, match="cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY"):
        CudaSharing(trainer).export(SIZE, HOST)
    assert trainer.calls == ["cuMemAlloc"] * 2
    trainer.free_bytes *= 2
    trainer.fail = "cuMemAlloc"
    CudaSharing(trainer).export(SIZE, HOST).close()


def test_without_the_bindings_memory_cannot_be_shared(monkeypatch):
    def import_module(name):
        raise ImportError(name)

    monkeypatch.setattr(device_memory, "import_module", import_module)
    with pytest.raises(DeviceMemoryError, match="cuda-bindings is missing"):
        CudaSharing().export(SIZE, HOST)


def test_an_exception_of_the_bindings_is_an_error_of_sharing(gpu):
    def fail(size):
        raise RuntimeError("no driver\nfor many reasons")

    gpu[0].cuMemAlloc = fail
    with pytest.raises(DeviceMemoryError, match=r"cuMemAlloc failed: no driver$"):
        CudaSharing(gpu[0]).export(SIZE, HOST)


def test_an_exception_without_a_text_is_an_error_of_sharing(gpu):
    def fail(size):
        raise RuntimeError

    gpu[0].cuMemAlloc = fail
    with pytest.raises(DeviceMemoryError, match="cuMemAlloc failed: RuntimeError"):
        CudaSharing(gpu[0]).export(SIZE, HOST)


def test_a_cpu_is_no_gpu():
    assert CudaSharing().uuid(HOST) == LocalSharing().uuid(HOST) == ""


def test_within_one_process_memory_is_handed_over_once():
    sharing = LocalSharing()
    memory = sharing.export(SIZE, HOST)
    mapped = sharing.open(memory.handle, SIZE, HOST)
    assert mapped.tensor.data_ptr() == memory.tensor.data_ptr()
    assert len(mapped.tensor) == SIZE
    with pytest.raises(DeviceMemoryError, match="not a handle of this process"):
        sharing.open(memory.handle, SIZE, HOST)
    mapped.close()
    memory.close()


def test_the_memory_may_be_written_outside_of_inference_mode(gpu):
    with torch.inference_mode():
        memory = CudaSharing(gpu[0]).export(SIZE, HOST)
        local = LocalSharing().export(SIZE, HOST)
    memory.tensor.fill_(1)
    local.tensor.fill_(1)


class FakeCuda:
    """The part of torch.cuda that is used; see `test_torch_takes_the_arguments_that_are_given`."""

    def __init__(self, log):
        self.log = log

    @contextlib.contextmanager
    def device(self, device):
        self.log.append(f"enter {device}")
        yield
        self.log.append("leave")

    def current_stream(self, device=None):
        wait = lambda: self.log.append(f"wait for the stream of {device}")  # noqa: E731
        return SimpleNamespace(synchronize=wait)

    def get_device_properties(self, device):
        return SimpleNamespace(uuid=5)

    def empty_cache(self):
        self.log.append("empty cache")


@pytest.fixture
def log(gpu, monkeypatch):
    """The calls of torch.cuda and of the first driver."""
    calls = gpu[0].calls
    monkeypatch.setattr(device_memory, "_cuda", lambda: FakeCuda(calls))
    return calls


GPU = torch.device("cuda", 1)


def test_a_gpu_is_known_by_its_uuid_and_waited_for_by_its_stream(log):
    sharing = CudaSharing()
    assert sharing.uuid(GPU) == LocalSharing().uuid(GPU) == "5"
    sharing.synchronize(GPU)
    LocalSharing().synchronize(GPU)
    assert log == ["wait for the stream of cuda:1"] * 2


def test_the_driver_is_called_with_the_context_of_the_gpu(gpu, log):
    driver = device_memory._Driver(GPU, gpu[0])
    driver.call("cuMemAlloc", 64)
    assert log == ["enter cuda:1", "wait for the stream of None", "cuMemAlloc", "leave"]


def test_torch_gives_back_what_it_does_not_use_before_memory_is_refused(gpu, log):
    driver = device_memory._Driver(GPU, gpu[0])
    gpu[0].fail = "cuMemAlloc"
    assert driver.allocate(64)
    assert [call for call in log if call in ("cuMemAlloc", "empty cache")] == [
        "cuMemAlloc",
        "empty cache",
        "cuMemAlloc",
    ]


IN_DRIVER = (
    "cuMemAlloc cuMemFree cuMemGetAddressRange "
    "cuIpcGetMemHandle cuIpcOpenMemHandle cuIpcCloseMemHandle"
)


def test_the_real_bindings_have_what_is_called():
    """Runs where the package is installed, with or without a GPU."""
    driver = pytest.importorskip("cuda.bindings.driver")
    assert all(callable(getattr(driver, name)) for name in IN_DRIVER.split())
    assert driver.CUresult.CUDA_SUCCESS.name == "CUDA_SUCCESS"
    assert driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS == 1
    every_byte = bytes(range(96, 160))
    handle = device_memory._Driver(HOST).handle(every_byte.hex())
    assert isinstance(handle, driver.CUipcMemHandle)
    assert ctypes.string_at(handle.getPtr(), 64) == every_byte


@pytest.mark.parametrize("name", [name for name in vars(FakeCuda) if not name.startswith("_")])
def test_torch_takes_the_arguments_that_are_given(name):
    parameters = list(inspect.signature(getattr(FakeCuda, name)).parameters)[1:]
    inspect.signature(getattr(torch.cuda, name)).bind(*parameters)
    inspect.signature(torch.cuda.Stream.synchronize).bind(object)
