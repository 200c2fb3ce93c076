"""The backends "gloo" and "nccl": the trainer broadcasts buckets of tensors to engines.

Both ends divide the tensors into the same buckets and have a few broadcasts under way. The trainer
tells the engines how at the beginning; each update carries the list of the tensors only.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

from shmllm.errors import CallOrderError, RequestError
from shmllm.transfer.buckets import Bucket, plan_buckets
from shmllm.transfer.fields import read
from shmllm.transfer.group import POLL_S, BrokenConnectionError, Group, is_done
from shmllm.transfer.receiver import Place
from shmllm.transfer.rendezvous import announce, gather, join_store, serve_store
from shmllm.transfer.sender import Sender as BaseSender
from shmllm.transfer.sender import update_info_of
from shmllm.transfer.source import ParamMeta
from shmllm.transfer.trainer_info import BUFFER_BYTES, NUM_BUFFERS, TIMEOUT_S
from shmllm.transfer.update_info import UpdateInfo

LONGEST_PROGRESS_S = 0.05
"""How long `Receiver.progress` goes on while buckets arrive, before the engine runs a step."""
MOST_BUFFERS = 16


@dataclass(kw_only=True)
class NCCLWeightTransferInitInfo:
    """How an engine joins a trainer's group; see `NCCLTrainerInitInfo` for the other fields.

    Attributes:
        rank_offset: the number of ranks of the trainer in the group, always 1.

    Raises:
        RequestError: a value is not valid.
    """

    master_address: str
    master_port: int
    world_size: int
    rank_offset: int = 1
    packed: bool = False
    packed_buffer_size_bytes: int = BUFFER_BYTES
    packed_num_buffers: int = NUM_BUFFERS
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        bounds = {
            "rank_offset": (1, 1),
            "world_size": (2, 2**31),
            "packed_buffer_size_bytes": (1, 2**40),
            "packed_num_buffers": (1, MOST_BUFFERS),
        }
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise RequestError(f"{name} must be from {least} to {most}, got {value!r}")
        if type(self.master_port) is not int or not 0 <= self.master_port < 2**16:
            raise RequestError(f"master_port is not a port: {self.master_port!r}")
        if not isinstance(self.master_address, str) or not self.master_address:
            raise RequestError(f"master_address is not an address: {self.master_address!r}")
        is_number = isinstance(self.timeout_s, int | float)
        if not is_number or not 0 < self.timeout_s <= 86_400:
            raise RequestError(
                f"timeout_s must be above 0 and at most 86,400, got {self.timeout_s!r}"
            )

    @property
    def bucket_bytes(self) -> int:
        """The largest bucket; 0: one for each tensor."""
        return self.packed_buffer_size_bytes if self.packed else 0

    @property
    def broadcast_s(self) -> float:
        """The longest time that a broadcast may take: it waits for those before it, too."""
        return self.timeout_s * (self.packed_num_buffers + 1)

    def join(self, backend: str, store: Any, rank: int, size: int, device: Any) -> Group:
        """See `Group`."""
        return Group(backend, store, rank, size, device, self.broadcast_s, self.packed_num_buffers)


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
    dtypes, sizes = update.dtypes(), update.sizes()
    for index, offset in enumerate(bucket.offsets, bucket.first):
        yield index, buffer[offset : offset + sizes[index]].view(dtypes[index])


class Receiver:
    """The engine's end; see `transfer.receiver`. A thread connects, because that takes as long as
    the trainer and all engines need."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._info: NCCLWeightTransferInitInfo | None = None
        self._joining: Future[Group] | None = None
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
        self._info, self._joining = info, Future()
        arguments = (self._joining, info, place.backend, place.num_workers, self._device)
        threading.Thread(target=_join, args=arguments, name="shmllm-join", daemon=True).start()

    def read_update(self, update_info: Mapping[str, Any]) -> UpdateInfo:
        update = read(UpdateInfo, update_info, "update_info")
        update.dtypes()
        if self._joining is None or not self._joining.done():
            raise CallOrderError(
                "the engine has not joined a trainer's group: call init_weight_transfer_engine "
                "first, and again after an error"
            )
        return update

    def receive(self, update: UpdateInfo) -> None:
        assert self._info is not None
        buckets = [*plan_buckets(update.sizes(), self._info.bucket_bytes)]
        self._buffers = _Buffers(buckets, self._info.packed_num_buffers, self._device)
        self._update, self._waiting = update, deque(buckets)
        self._deadline = time.monotonic() + self._info.timeout_s
        self._begin()

    def progress(self) -> int:
        if self._joining is not None and not self._joining.done():
            return 1
        if self._joining is not None and (problem := self._joining.exception()) is not None:
            self.close()
            raise problem
        until = time.monotonic() + LONGEST_PROGRESS_S
        while self._in_flight and is_done(self._in_flight[0][2]) and time.monotonic() < until:
            self._take_first()
        if self._in_flight and time.monotonic() > self._deadline:
            assert self._info is not None
            raise BrokenConnectionError(f"the trainer sent nothing for {self._info.timeout_s:g} s")
        left = len(self._in_flight) + len(self._waiting)
        if not left:
            self._buffers = self._update = None
        return left

    def close(self) -> None:
        joining, self._joining = self._joining, None
        self._waiting.clear()
        self._in_flight.clear()
        self._buffers = self._update = None
        if joining is not None:
            joining.add_done_callback(_close_group)

    @property
    def _device(self) -> Any:
        import torch

        return self._place.device if self._place.backend == "nccl" else torch.device("cpu")

    def _begin(self) -> None:
        """Begin as many broadcasts as there are free buffers."""
        assert self._joining is not None
        assert self._buffers is not None
        group = self._joining.result()
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


def _join(
    joined: Future[Group],
    info: NCCLWeightTransferInitInfo,
    backend: str,
    num_workers: int,
    device: Any,
) -> None:
    try:
        store = join_store(info.master_address, info.master_port, info.timeout_s)
        rank, size = announce(store, num_workers, time.monotonic() + info.timeout_s)
        group = info.join(backend, store, rank, size, device)
    except BaseException as problem:
        joined.set_exception(problem)
    else:
        joined.set_result(group)


def _close_group(joined: Future[Group]) -> None:
    if joined.exception() is None:
        joined.result().close()


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
        self._device = torch.device("cuda" if is_nccl else "cpu")
        fields = {name: value for name, value in asdict(given).items() if name != "rank"}
        self._wire = NCCLWeightTransferInitInfo(**fields)
        timeout_s = self._wire.timeout_s
        self._store = serve_store(given.master_address, given.master_port, timeout_s)
        self._wire.master_port = self._store.port
        call = _in_thread(lambda: self.client.init(asdict(self._wire)))
        try:
            deadline = time.monotonic() + timeout_s
            size = gather(self._store, given.world_size - 1, deadline, lambda: _look(call))
            self._group = self._wire.join(given.backend, self._store, 0, size, self._device)
            call.result(timeout_s)
        except BaseException:
            self.disconnect()
            raise

    def transmit(self) -> None:
        meta = self.source.metadata()
        info = update_info_of(meta)
        call = _in_thread(lambda: self.client.update(info))
        try:
            self._broadcast(meta, UpdateInfo(**info), call)
            call.result(self._wire.broadcast_s)
        except BaseException as problem:
            self.disconnect()  # so that the engines do not wait
            theirs = _error_of(call, self._wire.broadcast_s)
            if isinstance(problem, BrokenConnectionError) and theirs is not None:
                raise theirs from problem  # which may say why
            raise

    def _broadcast(self, meta: list[ParamMeta], update: UpdateInfo, call: Future[None]) -> None:
        assert self._group is not None
        buckets = [*plan_buckets(update.sizes(), self._wire.bucket_bytes)]
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
        group, self._group, self._store = self._group, None, None
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


def _error_of(call: Future[None], timeout_s: float) -> BaseException | None:
    """The error of a call, if it ends with one in time."""
    try:
        return call.exception(timeout_s)
    except TimeoutError:
        return None
