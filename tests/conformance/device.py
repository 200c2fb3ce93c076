"""The tests that a GPU and the fake GPU pass; each folder has a fixture `gpu_device`."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shmllm.worker.arena import Contents
from shmllm.worker.gpu.device import CudaDevice
from shmllm_kernels.gpu.norm import rms_norm


def values(tensor: torch.Tensor) -> list[float]:
    """Return the values of a tensor, after the device has computed them."""
    numbers: list[float] = tensor.tolist()
    return numbers


@contextlib.contextmanager
def no_waits(device: Any) -> Iterator[None]:
    """Raise errors where the host waits implicitly: when it reads a tensor, or in a blocking copy.
    Waiting for an event is allowed."""
    if isinstance(device, CudaDevice):
        with warnings.catch_warnings(action="ignore"):  # torch warns once that this is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    device.may_wait = False
    try:
        yield
    finally:
        device.may_wait = True


class DeviceConformance:
    @pytest.fixture
    def make(self, gpu_device):
        """A function that makes a tensor of these numbers, outside of captures."""

        def of(*numbers: float) -> torch.Tensor:
            return torch.tensor(numbers, device=gpu_device.torch_device)

        return of

    @staticmethod
    def capture(device, *calls):
        """Capture a graph of each call. Every call is executed once before, so that its kernels are
        compiled."""
        graphs = []
        for call in calls:
            call()
        with device.capturing():
            for call in calls:
                device.begin_capture()
                call()
                graphs.append(device.end_capture())
        return graphs

    def test_a_capture_executes_nothing_and_a_replay_executes_it(self, gpu_device, make):
        x, y = make(1.0, 2.0), make(0.0, 0.0)
        torch.add(x, 1, out=y)
        with gpu_device.capturing():
            gpu_device.begin_capture()
            torch.mul(x, 3, out=y)
            graph = gpu_device.end_capture()
        assert values(y) == [2.0, 3.0]
        graph.replay()
        assert values(y) == [3.0, 6.0]

    def test_a_graph_has_constant_numbers_and_reads_tensors_again(self, gpu_device, make):
        x, y, factor = make(1.0, 2.0), make(0.0, 0.0), 10
        (graph,) = self.capture(gpu_device, lambda: torch.mul(x, factor, out=y))
        factor = 1000
        x.copy_(make(5.0, 7.0))
        graph.replay()
        assert values(y) == [50.0, 70.0]

    def test_kernels_of_triton_are_captured_too(self, gpu_device):
        where = gpu_device.torch_device
        x, weight = torch.ones(2, 8, device=where), torch.ones(8, device=where)
        out = torch.zeros_like(x)
        (graph,) = self.capture(gpu_device, lambda: rms_norm(out, x, weight, 1e-6))
        weight.fill_(3.0)
        x.mul_(17.0)
        graph.replay()
        gpu_device.synchronize()
        torch.testing.assert_close(out.cpu(), torch.full((2, 8), 3.0))

    def test_a_capture_can_use_what_it_allocates(self, gpu_device, make):
        x, y = make(1.0, 2.0), make(0.0, 0.0)

        def compute():
            total = torch.zeros_like(x)
            for _ in range(3):
                total += x * 2
            torch.add(total.flip(0), torch.empty_like(x).fill_(0.5), out=y)

        (graph,) = self.capture(gpu_device, compute)
        for first in (1.0, 4.0):
            x[0] = first
            graph.replay()
            assert values(y) == [12.5, 6 * first + 0.5]

    def test_graphs_pass_results_in_memory_outside_of_their_pool(self, gpu_device, make):
        """Each graph allocates memory, and eager work is launched between them."""
        x, middle, y = make(1.0, 2.0), make(0.0, 0.0), make(0.0, 0.0)
        first, second = self.capture(
            gpu_device,
            lambda: middle.copy_((x * 2 + 1) * 5),
            lambda: y.copy_((middle + 3) * (middle - 3)),
        )
        for round_ in range(3):
            x.fill_(round_)
            first.replay()
            middle.neg_()
            second.replay()
            assert values(y) == [(10 * round_ + 5) ** 2 - 9] * 2

    def test_graphs_are_replayed_in_any_order(self, gpu_device, make):
        x, y = make(3.0), make(0.0)
        add, multiply = self.capture(gpu_device, lambda: x.add_(1), lambda: x.mul_(2))
        x.fill_(3.0)
        for graph in (multiply, add, add, multiply, add):
            graph.replay()
        y.copy_(x)
        assert values(y) == [17.0]

    def test_captures_work_after_earlier_graphs_were_freed(self, gpu_device, make):
        x = make(1.0)
        for _ in range(3):
            (graph,) = self.capture(gpu_device, lambda: x.add_(x * 2))
            del graph
            gc.collect()
        x.fill_(1.0)
        (graph,) = self.capture(gpu_device, lambda: x.add_(1))
        x.fill_(5.0)
        graph.replay()
        assert values(x) == [6.0]

    def test_an_error_within_a_capture_leaves_the_device_usable(self, gpu_device, make):
        x = make(1.0)

        def fail():
            with gpu_device.capturing():
                gpu_device.begin_capture()
                x.add_(1)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        (graph,) = self.capture(gpu_device, lambda: x.mul_(3))
        assert gc.isenabled()
        x.fill_(2.0)
        graph.replay()
        assert values(x) == [6.0]

    def test_captures_are_only_within_capturing_and_one_at_a_time(self, gpu_device, make):
        x = make(1.0)
        with pytest.raises(AssertionError, match="only within"):
            gpu_device.begin_capture()
        with gpu_device.capturing():
            gpu_device.begin_capture()
            x.add_(1)  # CUDA warns about empty graphs
            with pytest.raises(AssertionError, match="one capture"):
                gpu_device.begin_capture()

    def test_inputs_and_results_are_copied_through_pinned_memory(self, gpu_device):
        on_device = torch.zeros(4, dtype=torch.int64, device=gpu_device.torch_device)
        sent, received = (gpu_device.pinned((4,), torch.int64) for _ in range(2))
        event = gpu_device.event()
        for round_ in range(3):
            sent.numpy()[:] = range(round_, round_ + 4)
            on_device.copy_(sent, non_blocking=True)
            on_device.mul_(10)
            received.copy_(on_device, non_blocking=True)
            event.record()
            event.wait()
            assert event.is_done()
            assert received.tolist() == [10 * (round_ + i) for i in range(4)]

    def test_work_after_a_copy_ahead_sees_the_copy(self, gpu_device, make):
        x, early, sent = make(1.0), make(0.0), gpu_device.pinned((1,), torch.float32)
        gpu_device.synchronize()
        for round_ in range(3):
            event = gpu_device.event()
            for _ in range(50):
                x.mul_(1.0)
            sent.numpy()[:] = round_
            gpu_device.copy_ahead(early, sent)
            x.copy_(early)
            event.record()
            event.wait()
            assert values(x) == [float(round_)]

    def test_work_beside_sees_what_the_host_has_waited_for(self, gpu_device, make):
        x, event = make(1.0), gpu_device.event()
        for round_ in range(3):
            x.add_(1.0)
            event.record()
            event.wait()
            for _ in range(50):
                y = make(round_ + 2.0).mul_(1.0)
            with gpu_device.beside():
                found = (x * 10).cpu()
            assert found.tolist() == [10 * (round_ + 2.0)]
        assert values(y) == [4.0]

    def test_implicit_waits_of_the_host_can_be_refused(self, gpu_device, make):
        x, pinned, event = make(1.0), gpu_device.pinned((1,), torch.float32), gpu_device.event()
        with no_waits(gpu_device):
            pinned.copy_(x.add_(1), non_blocking=True)
            event.record()
            event.wait()
            x.add_(1)
            with pytest.raises(RuntimeError):
                x.item()
        assert pinned.tolist() == [2.0]
        assert x.item() == 3.0

    def test_an_event_waits_only_for_work_before_it(self, gpu_device, make):
        x, before, after = make(1.0), gpu_device.event(), gpu_device.event()
        kept = gpu_device.pinned((1,), torch.float32)
        kept.copy_(x, non_blocking=True)
        before.record()
        x.fill_(2.0)
        after.record()
        before.wait()
        assert kept.tolist() == [1.0]
        after.wait()
        assert values(x) == [2.0]

    def test_an_event_that_was_never_recorded_counts_as_reached(self, gpu_device):
        event = gpu_device.event()
        assert event.is_done()
        event.wait()

    def test_events_measure_the_devices_time(self, gpu_device, make):
        x, first, last = make(1.0), gpu_device.event(timing=True), gpu_device.event(timing=True)
        first.record()
        for _ in range(10):
            x.add_(1)
        last.record()
        last.wait()
        assert 0 < last.elapsed_ms(first) < 60_000

    def test_memory_is_counted(self, gpu_device):
        total = gpu_device.total_bytes()
        assert 0 < gpu_device.free_bytes() <= total
        gpu_device.reset_peak()
        before = gpu_device.allocated_bytes()
        tensor = torch.zeros(2**20, dtype=torch.uint8, device=gpu_device.torch_device)
        assert gpu_device.allocated_bytes() >= before + 2**20
        gpu_device.synchronize()
        del tensor
        assert gpu_device.allocated_bytes() <= before + 2**19
        assert gpu_device.peak_bytes() >= before + 2**20
        gpu_device.reset_peak()
        assert gpu_device.peak_bytes() == gpu_device.allocated_bytes()

    def test_tensors_and_graphs_are_valid_after_an_arena_is_restored(self, gpu_device, make):
        arena, y = gpu_device.make_arena(4096, "a test"), make(0.0, 0.0)
        x = arena.allocate((2,), torch.float32)
        assert values(x) == [0.0, 0.0]
        (graph,) = self.capture(gpu_device, lambda: torch.mul(x, 2, out=y))
        x.fill_(4.0)
        arena.release()
        assert arena.contents is Contents.LOST
        arena.restore()
        x.add_(3.0)
        graph.replay()
        assert values(y) == [6.0, 6.0]
