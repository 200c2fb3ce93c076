"""The backends "gloo" and "nccl": the trainer broadcasts buckets of tensors to engines.

Both ends divide the tensors into the same buckets and have a few broadcasts under way. The trainer
tells the engines how at the beginning; each update carries the list of the tensors only.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from shmllm.errors import CallOrderError, RequestError
from shmllm.transfer.buckets import Bucket, plan_buckets
from shmllm.transfer.connection import Connection
from shmllm.transfer.fields import read
from shmllm.transfer.group import POLL_S, BrokenConnectionError, Group, is_done
from shmllm.transfer.receiver import Place
from shmllm.transfer.rendezvous import ANSWER_S, gather, say_gone, serve_store
from shmllm.transfer.sender import Sender as BaseSender
from shmllm.transfer.sender import update_info_of
from shmllm.transfer.source import ParamMeta
from shmllm.transfer.trainer_info import NCCLWeightTransferInitInfo
from shmllm.transfer.update_info import UpdateInfo

LONGEST_PROGRESS_S = 0.05
"""How long `Receiver.progress` goes on while buckets arrive, before the engine runs a step."""


class _Buffers:
    """A few buffers that are filled and emptied in turns.

    Args:
        buckets: the buckets.
        most: the number of buffers.
        device: where they are.
    """

    def __init__(self, buckets: list[Bucket], most: int, device: Any) -> None:
        import torch

        size = max((each.num_bytes for each in buckets), default=0)
        try:
            self._free = deque(
                torch.empty(size, dtype=torch.uint8, device=device)
                for _ in range(min(most, len(buckets)))
            )
        except RuntimeError as problem:
            raise RequestError(f"no memory for buffers of {size:,} bytes") from problem

    @property
    def is_free(self) -> bool:
        return bool(self._free)

    def take(self) -> Any:
        return self._free.popleft()

    def give_back(self, buffer: Any) -> None:
        self._free.append(buffer)


def tensors_in(bucket: Bucket, update: UpdateInfo, buffer: Any) -> Iterator[tuple[int, Any]]:
    """The tensors of a bucket as views of a buffer: the index of each and the view, [elements] in
    its dtype."""
    dtypes, sizes = update.dtypes, update.sizes
    for index, offset in enumerate(bucket.offsets, bucket.first):
        yield index, buffer[offset : offset + sizes[index]].view(dtypes[index])


class Receiver:
    """The engine's end; see `transfer.receiver`."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._info: NCCLWeightTransferInitInfo | None = None
        self._connection: Connection | None = None
        self._update: UpdateInfo | None = None
        self._waiting: deque[Bucket] = deque()
        self._in_flight: deque[tuple[Bucket, Any, Any]] = deque()
        self._buffers: _Buffers | None = None
        self._deadline = 0.0

    def open(self, init_info: Mapping[str, Any]) -> None:
        if init_info.get("nccl_unique_id_b64") is not None:
            raise RequestError("nccl_unique_id_b64 is not supported: give master_address and port")
        info = read(NCCLWeightTransferInitInfo, init_info, "init_info")
        place = self._place
        if place.backend == "nccl" and place.device.type != "cuda":
            raise RequestError("the backend 'nccl' needs an engine on a GPU; a CPU has 'gloo'")
        self.close()
        self._info = info
        self._connection = Connection(info, place.backend, place.num_workers, self._device)

    def read_update(self, update_info: Mapping[str, Any]) -> UpdateInfo:
        update = read(UpdateInfo, update_info, "update_info")
        _ = update.dtypes  # raises if one does not exist
        if self._connection is None or not self._connection.is_joined:
            raise CallOrderError(
                "the engine has not joined a trainer's group: call init_weight_transfer_engine "
                "first, and again after an error"
            )
        if self._connection.gone:
            raise RequestError(self._connection.gone)
        return update

    def receive(self, update: UpdateInfo) -> None:
        assert self._info is not None
        buckets = [*plan_buckets(update.sizes, self._info.bucket_bytes)]
        self._buffers = _Buffers(buckets, self._info.packed_num_buffers, self._device)
        self._update, self._waiting = update, deque(buckets)
        self._deadline = time.monotonic() + self._info.timeout_s
        self._begin()

    def progress(self) -> int:
        connection = self._connection
        if connection is None:
            return 0
        if not connection.is_joined:
            return 1
        try:
            connection.group()
        except BaseException:
            self.close()
            raise
        until = time.monotonic() + LONGEST_PROGRESS_S
        while self._in_flight and is_done(self._in_flight[0][2]) and time.monotonic() < until:
            self._take_first()
        if self._in_flight and connection.gone:
            raise BrokenConnectionError(connection.gone)
        if self._in_flight and time.monotonic() > self._deadline:
            assert self._info is not None
            raise BrokenConnectionError(f"the trainer sent nothing for {self._info.timeout_s:g} s")
        left = len(self._in_flight) + len(self._waiting)
        if not left:
            self._buffers = self._update = None
        return left

    def close(self) -> None:
        connection, self._connection = self._connection, None
        self._waiting.clear()
        self._in_flight.clear()
        self._buffers = self._update = None
        if connection is not None:
            connection.close()

    @property
    def _device(self) -> Any:
        import torch

        return self._place.device if self._place.backend == "nccl" else torch.device("cpu")

    def _begin(self) -> None:
        """Begin as many broadcasts as there are free buffers."""
        assert self._connection is not None
        assert self._buffers is not None
        group = self._connection.group()
        while self._waiting and self._buffers.is_free:
            bucket, buffer = self._waiting.popleft(), self._buffers.take()
            self._in_flight.append((bucket, buffer, group.broadcast(buffer[: bucket.num_bytes])))

    def _take_first(self) -> None:
        assert self._update is not None
        assert self._buffers is not None
        assert self._info is not None
        bucket, buffer, _ = self._in_flight.popleft()
        for index, tensor in tensors_in(bucket, self._update, buffer):
            self._place.put(self._update.names[index], tuple(self._update.shapes[index]), tensor)
        self._buffers.give_back(buffer)
        self._deadline = time.monotonic() + self._info.timeout_s
        self._begin()


class Sender(BaseSender):
    """The trainer's end. The client's calls run in a thread beside the broadcasts."""

    _group: Group | None = None
    _store: Any = None

    def connect(self) -> None:
        import torch

        given = self.info
        if given.backend == "nccl" and not torch.cuda.is_available():
            raise RequestError("the backend 'nccl' needs a GPU; a CPU has 'gloo'")
        is_nccl = given.backend == "nccl"
        self._device = torch.device("cpu")
        if is_nccl:
            self._device = torch.device("cuda", torch.cuda.current_device())
        fields = {name: value for name, value in asdict(given).items() if name != "rank"}
        self._wire = NCCLWeightTransferInitInfo(**fields)
        timeout_s = self._wire.timeout_s
        self._store = serve_store(given.master_address, given.master_port, timeout_s)
        self._wire.master_port = self._store.port
        call = _in_thread(lambda: self.client.init(asdict(self._wire)))
        try:
            deadline = time.monotonic() + timeout_s
            size = gather(self._store, given.world_size - 1, deadline, lambda: _look(call))
            self._group = Group(given.backend, self._store, 0, size, self._device, self._wire)
            _await(call, timeout_s)
        except BaseException:
            _error_of(call, ANSWER_S)  # the engine reads why, before the store is gone
            self.disconnect()
            raise

    def transmit(self) -> None:
        meta = self.source.metadata()
        info = update_info_of(meta)
        call = _in_thread(lambda: self.client.update(info))
        try:
            self._broadcast(meta, UpdateInfo(**info), call)
            _await(call, self._wire.broadcast_s)
        except BaseException as problem:
            self.disconnect()  # so that the engines do not wait
            theirs = _error_of(call, self._wire.timeout_s)
            if isinstance(problem, BrokenConnectionError) and theirs is not None:
                raise theirs from problem  # which may say why
            raise

    def _broadcast(self, meta: list[ParamMeta], update: UpdateInfo, call: Future[None]) -> None:
        assert self._group is not None
        buckets = [*plan_buckets(update.sizes, self._wire.bucket_bytes)]
        buffers = _Buffers(buckets, self._wire.packed_num_buffers, self._device)
        in_flight: deque[tuple[Any, Any]] = deque()

        def wait_first() -> None:
            buffer, work = in_flight.popleft()
            deadline = time.monotonic() + self._wire.timeout_s
            while not is_done(work):
                _look(call)
                if time.monotonic() > deadline:
                    raise BrokenConnectionError(
                        f"no engine took weights for {self._wire.timeout_s:g} s"
                    )
                time.sleep(POLL_S)
            buffers.give_back(buffer)

        pairs = self.checked_pairs(meta)
        for bucket in buckets:
            if not buffers.is_free:
                wait_first()
            buffer = buffers.take()
            for _, view in tensors_in(bucket, update, buffer):
                _, tensor = next(pairs)
                view.copy_(tensor.reshape(-1))
            in_flight.append((buffer, self._group.broadcast(buffer[: bucket.num_bytes])))
        next(pairs, None)  # raises if there are more
        while in_flight:
            wait_first()

    def check_connected(self) -> None:
        if self._group is None:
            raise RequestError("the connection has ended; make a new one by trainer_init")

    def disconnect(self) -> None:
        group, store, self._group, self._store = self._group, self._store, None, None
        if store is not None:
            with contextlib.suppress(RuntimeError):
                say_gone(store)
        if group is not None:
            group.close()


def _in_thread(function: Callable[[], None]) -> Future[None]:
    """Call a function in another thread, which does not keep the process alive."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            function()
        except BaseException as problem:
            future.set_exception(problem)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="shmllm-trainer", daemon=True).start()
    return future


def _look(call: Future[None]) -> None:
    """Raise the error of a call that has failed."""
    if call.done():
        call.result()


def _await(call: Future[None], timeout_s: float) -> None:
    """Wait for the end of a call, and raise its error.

    Raises:
        BrokenConnectionError: it has not ended in time.
    """
    try:
        call.result(timeout_s)
    except TimeoutError as problem:
        if call.done():
            raise  # the call's own
        raise BrokenConnectionError(f"no engine has answered within {timeout_s:g} s") from problem


def _error_of(call: Future[None], timeout_s: float) -> BaseException | None:
    """The error of a call, if it ends with one in time."""
    try:
        return call.exception(timeout_s)
    except TimeoutError:
        return None
