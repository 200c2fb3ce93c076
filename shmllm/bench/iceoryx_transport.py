"""iceoryx2 through its Python binding: one publish-subscribe service per direction.

Owns nodes, ports and what they leave behind; must not know what a message means. Its ports
are polled, with a `sched_yield` between two looks once a few have failed, as our own
latency policy does. Only imported where iceoryx2 is installed.
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
from shmllm.bench.transports import Take, Transport

iox: Any = import_module("iceoryx2")

BUFFERED = 256
BORROWED = 2
FIRST_SLICE_BYTES = 64 * KIB
BARE_LOOKS = 20
REQUESTS, OUTPUTS = "requests", "outputs"


class IceoryxLink:
    """One end.

    Args:
        directory: for the files of this pair; its name makes the shared memory's names.
        outgoing: service to publish in.
        incoming: service to subscribe to.
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

    def receive(self, take: Take) -> bytes:
        receive, looks = self._subscriber.receive, 0
        while (sample := receive()) is None:
            looks += 1
            if looks > BARE_LOOKS:
                os.sched_yield()
        result = take(sample.payload().as_memory_view().cast("B"))
        sample.delete()
        return result

    def greet(self) -> None:
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
    """Remove what iceoryx2 leaves in shared memory even after an orderly end."""
    for path in Path("/dev/shm").glob(f"{_prefix(directory)}*"):
        with contextlib.suppress(OSError):
            path.unlink()


def open_iceoryx(option: str, directory: str) -> tuple[Transport, tuple[Any, ...]]:
    """The front end's end, and what the core needs."""
    return IceoryxLink(directory, REQUESTS, OUTPUTS), (directory,)


def attach_iceoryx(directory: str) -> Transport:
    """The core's end."""
    return IceoryxLink(directory, OUTPUTS, REQUESTS)
