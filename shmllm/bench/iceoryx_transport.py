"""iceoryx2 through its Python binding, as a transport: one publish-subscribe service per direction.

This module owns the nodes, the ports and the removal of the files that they leave. It must not
know the content of a message. The receiver polls its port and calls `sched_yield` between two polls
after the first few have failed, like shmllm's own latency policy. The module is imported only where
iceoryx2 is installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from importlib import import_module
from pathlib import Path
from typing import Any

from shmllm.bench.cases import KIB
from shmllm.bench.loads import Parts
from shmllm.bench.transports import Decode, Transport

iox: Any = import_module("iceoryx2")

BUFFERED = 256
BORROWED = 2
FIRST_SLICE_BYTES = 64 * KIB
POLLS_BEFORE_YIELD = 20
REQUESTS, OUTPUTS = "requests", "outputs"


class IceoryxTransport:
    """One end of the transport.

    Args:
        directory: the directory for this pair's files; the names in shared memory contain its
            name.
        outgoing: the service to publish to.
        incoming: the service to subscribe to.
    """

    def __init__(self, directory: str, outgoing: str, incoming: str) -> None:
        iox.set_log_level(iox.LogLevel.Error)
        self._prefix = _prefix(directory)
        self._node = _node(directory, self._prefix)
        self._services = [_service(self._node, name) for name in (outgoing, incoming)]
        self._subscriber = self._services[1].subscriber_builder().create()
        self._publisher = (
            self._services[0]
            .publisher_builder()
            .initial_max_slice_len(FIRST_SLICE_BYTES)
            .allocation_strategy(iox.AllocationStrategy.PowerOfTwo)
            .backpressure_strategy(iox.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )

    def send(self, parts: Parts) -> None:
        (message,) = parts
        length = len(message)
        sample = self._publisher.loan_slice_uninit(length)
        if isinstance(message, bytes):
            ctypes.memmove(sample.payload_ptr, message, length)
        else:
            source = (ctypes.c_char * length).from_buffer(message)  # type: ignore[arg-type]
            ctypes.memmove(sample.payload_ptr, source, length)
        sample.assume_init().send()

    def receive(self, decode: Decode) -> bytes:
        receive, polls = self._subscriber.receive, 0
        while (sample := receive()) is None:
            polls += 1
            if polls > POLLS_BEFORE_YIELD:
                os.sched_yield()
        result = decode(sample.payload().as_memory_view().cast("B"))
        sample.delete()
        return result

    def handshake(self) -> None:
        pass

    def close(self) -> None:
        self._services.clear()
        self._publisher = self._subscriber = self._node = None


def _prefix(directory: str) -> str:
    return f"shmllm_bench_{Path(directory).name.lstrip('.')}_"


def _node(directory: str, prefix: str) -> Any:
    config = iox.config.default()
    config.global_cfg.root_path = iox.Path.new(directory)
    config.global_cfg.prefix = iox.FileName.new(prefix)
    builder = iox.NodeBuilder.new().config(config)
    return builder.signal_handling_mode(iox.SignalHandlingMode.Disabled).create(iox.ServiceType.Ipc)


def _service(node: Any, name: str) -> Any:
    return (
        node.service_builder(iox.ServiceName.new(name))
        .publish_subscribe(iox.Slice[ctypes.c_uint8])
        .max_publishers(1)
        .max_subscribers(1)
        .subscriber_max_buffer_size(BUFFERED)
        .subscriber_max_borrowed_samples(BORROWED)
        .enable_safe_overflow(False)
        .open_or_create()
    )


def remove_leftovers(directory: str) -> None:
    """Removes the files that iceoryx2 leaves in /dev/shm even after an orderly end."""
    for path in Path("/dev/shm").glob(f"{_prefix(directory)}*"):
        with contextlib.suppress(OSError):
            path.unlink()


def open_iceoryx(option: str, directory: str) -> tuple[Transport, tuple[Any, ...]]:
    """Opens the front end's end; also returns the handles for the core."""
    return IceoryxTransport(directory, REQUESTS, OUTPUTS), (directory,)


def attach_iceoryx(directory: str) -> Transport:
    """Opens the core's end."""
    return IceoryxTransport(directory, OUTPUTS, REQUESTS)
