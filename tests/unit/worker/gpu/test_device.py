"""`CudaDevice` without a GPU, on a fake of torch.cuda that refuses calls in a wrong state.

The fake's functions take the arguments of torch's: a test compares their signatures.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import weakref
from types import SimpleNamespace

import pytest
import torch

from shmllm.errors import EngineStartError
from shmllm.worker.gpu import device as module
from shmllm.worker.gpu.device import CudaDevice, find_cuda_problem, find_link_problem


def like(real):
    """Make a decorator that binds each call to the signature of the real function."""
    signature = inspect.signature(real)

    def decorate(function):
        def checked(*args, **kwargs):
            signature.bind(*args, **kwargs)
            return function(*args, **kwargs)

        return checked

    return decorate


class FakeStream:
    def __init__(self, name, log):
        self.name = name
        self._log = log

    def wait_stream(self, other):
        self._log.append(f"{self.name} waits for {other.name}")

    def synchronize(self):
        self._log.append(f"{self.name} synchronizes")


class FakeUuid:
    """torch's UUID, which is no text."""

    def __str__(self):
        return "the-uuid"


class FakeCuda:
    """The part of torch.cuda that a device uses.

    Attributes:
        log: the calls whose order matters.
        graph_error: raised when a capture ends.
    """

    def __init__(self):
        self.log = []
        self.graph_error = None
        self.names, self.capabilities = ["NVIDIA H200"], [(9, 0)]
        self.main = self.current = FakeStream("main stream", self.log)
        self._names = iter(["side stream", "copy stream", "stream beside"])
        self.capturing = None
        self.pool_graphs = weakref.WeakSet()
        self.pool_was_used = False
        cuda = self

        class CUDAGraph:
            @like(torch.cuda.CUDAGraph.capture_begin)
            def capture_begin(self, pool=None, capture_error_mode="global"):
                assert cuda.current.name == "side stream", "the legacy stream cannot capture"
                assert cuda.capturing is None
                assert (pool, capture_error_mode) == ("pool", "thread_local")
                assert cuda.pool_graphs or not cuda.pool_was_used, "the pool was dropped"
                cuda.pool_graphs.add(self)
                cuda.pool_was_used, cuda.capturing = True, self
                cuda.log.append("begin")

            @like(torch.cuda.CUDAGraph.capture_end)
            def capture_end(self):
                assert cuda.current.name == "side stream", "it ends where it began"
                assert cuda.capturing is self
                cuda.capturing = None
                cuda.log.append("end")
                if cuda.graph_error is not None:
                    raise cuda.graph_error

            def replay(self):
                assert cuda.current == cuda.main
                cuda.log.append("replay")

        class Event:
            def __init__(self, enable_timing):
                self.enable_timing, self.time = enable_timing, None

            def record(self):
                self.time = len(cuda.log)
                cuda.log.append("record")

            def query(self):
                return True

            def synchronize(self):
                cuda.log.append("wait")

            def elapsed_time(self, end):
                assert self.enable_timing
                assert end.enable_timing
                return end.time - self.time

        self.CUDAGraph, self.Event = CUDAGraph, Event
        self.Stream = lambda device: FakeStream(next(self._names), self.log)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def current_stream(self, device=None):
        return self.current

    def set_device(self, index):
        self.log.append(f"device {index}")

    def device_count(self):
        return len(self.names)

    def get_device_name(self, index):
        return self.names[index]

    def get_device_properties(self, device):
        return SimpleNamespace(uuid=FakeUuid())

    def get_device_capability(self, index):
        return self.capabilities[index]

    def graph_pool_handle(self):
        return "pool"

    def synchronize(self, device):
        assert device == torch.device("cuda", 0)
        assert self.capturing is None, "not permitted while a graph is captured"
        self.log.append("synchronize")

    def empty_cache(self):
        assert self.capturing is None
        self.log.append("empty cache")

    def mem_get_info(self, device):
        return 700, 1000

    def memory_allocated(self, device):
        return 200

    def max_memory_allocated(self, device):
        return 300

    def reset_peak_memory_stats(self, device):
        self.log.append("reset peak")


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(module, "_cuda", fake)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return fake


@pytest.mark.parametrize(
    "name", [name for name in vars(FakeCuda) if not name.startswith("_")], ids=str
)
def test_torch_takes_the_arguments_that_the_fake_takes(name):
    parameters = list(inspect.signature(getattr(FakeCuda, name)).parameters)[1:]
    inspect.signature(getattr(torch.cuda, name)).bind(*parameters)


def test_torch_has_the_methods_of_events_and_graphs():
    inspect.signature(torch.cuda.Event.__new__).bind(object, enable_timing=True)
    inspect.signature(torch.cuda.Stream.__new__).bind(object, torch.device("cuda", 0))
    for name in ("record", "query", "synchronize"):
        inspect.signature(getattr(torch.cuda.Event, name)).bind(object)
    inspect.signature(torch.cuda.Event.elapsed_time).bind(object, object)
    inspect.signature(torch.cuda.CUDAGraph.replay).bind(object)


def test_captures_use_their_own_stream_and_synchronize(cuda):
    device = CudaDevice()
    assert (device.name, device.torch_device) == ("NVIDIA H200", torch.device("cuda", 0))
    assert device.uuid == "the-uuid"
    with device.capturing():
        assert not gc.isenabled()
        graphs = []
        for _ in range(2):
            device.begin_capture()
            graphs.append(device.end_capture())
    assert gc.isenabled()
    graphs[0].replay()
    around = ["synchronize", "empty cache", "begin", "end", "begin", "end", "synchronize"]
    assert cuda.log == ["device 0", *around, "replay"]


def test_the_memory_pool_outlives_graphs_that_were_deleted(cuda):
    device = CudaDevice()
    for _ in range(2):
        with device.capturing():
            device.begin_capture()
            device.end_capture()
        gc.collect()


def test_a_disabled_garbage_collector_stays_disabled(cuda):
    gc.disable()
    try:
        with CudaDevice().capturing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("graph_error", [None, RuntimeError("capture was invalidated")])
def test_a_capture_that_an_error_interrupts_is_ended(cuda, graph_error):
    device, cuda.graph_error = CudaDevice(), graph_error
    with pytest.raises(ZeroDivisionError), device.capturing():  # noqa: PT012
        device.begin_capture()
        raise ZeroDivisionError
    assert cuda.log[-2:] == ["begin", "end"]
    assert gc.isenabled()
    cuda.graph_error = None
    with device.capturing():
        device.begin_capture()
        device.end_capture()


def test_misuse_is_refused(cuda):
    device = CudaDevice()
    with pytest.raises(AssertionError, match="only within"):
        device.begin_capture()
    with device.capturing():
        with pytest.raises(AssertionError, match="nothing is being captured"):
            device.end_capture()
        device.begin_capture()
        with pytest.raises(AssertionError, match="one capture"):
            device.begin_capture()


def test_events_and_memory(cuda):
    device = CudaDevice()
    first, last = device.event(timing=True), device.event(timing=True)
    first.record()
    last.record()
    last.wait()
    assert last.is_done()
    assert last.elapsed_ms(first) == 1.0
    assert (device.free_bytes(), device.total_bytes()) == (700, 1000)
    assert (device.allocated_bytes(), device.peak_bytes()) == (200, 300)
    device.reset_peak()
    assert cuda.log[-1] == "reset peak"


def test_a_usable_gpu_has_no_problem(cuda):
    assert find_cuda_problem() == ""


def test_the_reason_why_a_gpu_cannot_be_used_is_one_sentence(cuda, monkeypatch):
    def problem(index=0):
        found = find_cuda_problem(index)
        with pytest.raises(EngineStartError) as caught:
            CudaDevice(index)
        assert str(caught.value) == found
        assert "\n" not in found
        return found

    assert "no cuda:1: CUDA finds 1 device(s)" in problem(1)
    cuda.capabilities = [(7, 5)]
    assert problem() == (
        "cuda:0 (NVIDIA H200) has compute capability 7.5, and the kernels need 8.0"
    )

    def too_old(index):
        raise RuntimeError("The NVIDIA driver on your system is too old (found 11040).\nUpdate it")

    monkeypatch.setattr(cuda, "get_device_capability", too_old)
    assert "cuda:0 cannot be used: The NVIDIA driver on your system is too old" in problem()
    cuda.names = []
    assert "CUDA finds no device" in problem()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "was built without CUDA" in problem()


def test_work_after_a_copy_ahead_waits_for_the_copy(cuda):
    device = CudaDevice()
    streams = []

    class Target(torch.Tensor):
        def copy_(self, source, non_blocking):
            assert non_blocking
            streams.append(cuda.current.name)

    target = torch.zeros(1).as_subclass(Target)
    device.copy_ahead(target, torch.zeros(1))
    assert streams == ["copy stream"]
    assert cuda.log[-1] == "main stream waits for copy stream"
    assert cuda.current is cuda.main


def test_work_beside_uses_a_stream_that_only_the_host_waits_for(cuda):
    device = CudaDevice()
    cuda.log.clear()
    with device.beside():
        assert cuda.current.name == "stream beside"
    assert cuda.log == ["stream beside synchronizes"]
    assert cuda.current is cuda.main


@pytest.mark.parametrize(
    "problem", [ModuleNotFoundError("No module named 'cuda'"), RuntimeError("cuMemCreate failed")]
)
def test_a_gpu_whose_driver_cannot_map_memory_gets_a_plain_arena(cuda, monkeypatch, problem):
    def refuse(*args):
        raise problem

    monkeypatch.setattr(module, "CudaArena", refuse)
    monkeypatch.setattr(module, "PlainArena", lambda *args, reason: (args, reason))
    device = CudaDevice()
    arguments = (100, "a test", device.torch_device)
    assert device.make_arena(100, "a test") == (arguments, str(problem))


def test_a_gpu_without_enough_memory_gets_no_arena(cuda, monkeypatch):
    def refuse(*args):
        raise EngineStartError("no memory")

    monkeypatch.setattr(module, "CudaArena", refuse)
    with pytest.raises(EngineStartError, match="no memory"):
        CudaDevice().make_arena(100, "a test")


class FakeLinks:
    """The part of the CUDA driver that knows links: GPUs of one pair have one, and can map the
    memory of one more."""

    CUdevice_P2PAttribute = SimpleNamespace(
        CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED=2,
        CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED=3,
    )
    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    not_initialized = 3

    def __init__(self, driver_works=True):
        self.result_of_init = 0 if driver_works else 100
        self.is_initialized = False

    def cuInit(self, flags):
        self.is_initialized = self.result_of_init == 0
        return (self.result_of_init,)

    def cuDeviceGetP2PAttribute(self, kind, one, other):
        if not self.is_initialized:
            return self.not_initialized, None
        if {one, other} == {1, 2}:
            return 0, 1
        return 0, int(kind == 2 and {one, other} == {2, 3})


def test_gpus_with_a_link_can_meet():
    assert find_link_problem([1, 2], FakeLinks()) == ""


@pytest.mark.parametrize(
    ("indices", "problem"),
    [
        ([0, 1], "cuda:0 cannot map the memory of cuda:1, which NVLink allows"),
        ([2, 3], "cuda:2 cannot change memory atomically on cuda:3, which NVLink allows"),
        ([1, 2, 3], "cuda:1 cannot map the memory of cuda:3, which NVLink allows"),
    ],
)
def test_gpus_without_a_link_are_named(indices, problem):
    assert find_link_problem(indices, FakeLinks()) == problem


def test_no_gpus_can_meet_without_a_driver():
    links = FakeLinks(driver_works=False)
    assert find_link_problem([1, 2], links) == "the CUDA driver cannot be used"
