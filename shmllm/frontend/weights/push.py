"""WeightPush: sends new weights from a front end to the engine.

This module owns the sequence of calls of an update, and the choice of buckets for each tensor:
buckets in memory of the engine's GPU for tensors on that GPU, and buckets in shared memory of the
host for all others. It copies the tensors of an iterable, each one before it asks for the next. It
does not import torch: a caller with torch tensors has imported it.

One call at a time is inside of the push, whichever thread makes it: buckets, memory on the GPU and
the engine's update belong to that call, or to the parts that follow `start`. A call that its
coroutine has cancelled ends between two tensors and abandons the update.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

from shmllm.client.protocol import DeviceSharing
from shmllm.config.info import EngineInfo
from shmllm.errors import CallError, CallOrderError, DeviceMemoryError, RequestError, ShmLLMError
from shmllm.frontend.cancelled_calls import Cancellation, cancellation_of_this_call
from shmllm.frontend.dispatcher import Dispatcher
from shmllm.frontend.weights.buckets import DeviceBuckets, HostBuckets, Packer
from shmllm.wire.messages import Method
from shmllm.wire.values import is_torch_tensor
from shmllm.wire.weight_bucket import Source

logger = logging.getLogger(__name__)

NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]]
UpdateMode = Literal["keep", "abort"]
Version = int | str
Result = TypeVar("Result")

CANCELLED_S = 10.0
"""The time for which a call waits for the end of a cancelled one, in seconds."""
PAUSE_S = 0.001
"""The time between two looks whether it has ended, in seconds."""


def finish_options(
    version: Version | None, mode: str, reset_prefix_cache: bool
) -> dict[str, object]:
    """The options with which an update ends; see `LLM.update_weights`."""
    if mode not in ("keep", "abort"):
        raise RequestError(f"the mode of an update is 'keep' or 'abort', got {mode!r}")
    return {"version": version, "abort": mode == "abort", "reset_prefix_cache": reset_prefix_cache}


class WeightPush:
    """The weight updates of one front end.

    Args:
        dispatcher: the front end's connection to the engine.
        info: the information that the engine reports.
        sharing: shares memory of a GPU with the engine.
    """

    def __init__(self, dispatcher: Dispatcher, info: EngineInfo, sharing: DeviceSharing) -> None:
        self._dispatcher = dispatcher
        self._info = info
        self._sharing = sharing
        self._device: DeviceBuckets | None = None
        self._may_share = bool(info.device_uuid)
        self._has_reported = False
        self._is_sending = False
        self._inside: dict[str, Cancellation] = {}
        self._opener: Cancellation | None = None

    @property
    def is_open(self) -> bool:
        """Whether `start` began an update that has not been finished or abandoned, so that weights
        are a part of it."""
        return self._opener is not None and not self._opener.is_requested

    def start(self) -> None:
        """Begin an update of several calls.

        Raises:
            CallOrderError: an update has been started already, here or by another front end.
        """

        self._alone(lambda: self._begin(in_parts=True))

    def add(self, weights: NamedTensors) -> None:
        """Send a part of the weights of the update that `start` began.

        Raises:
            CallOrderError: no update was started, or another call is in progress.
            RequestError: tensors are invalid. The update has ended and changed nothing.
        """
        self.add_by(lambda: self._send(weights, self._info.weight_bytes))

    def add_by(self, send: Callable[[], None]) -> None:
        """As `add`, of what a function sends."""

        def add() -> None:
            self._check_open()
            try:
                send()
                self._dispatcher.call(Method.CHECK_WEIGHTS)
            except BaseException:
                self._abandon_after_error()
                raise

        self._alone(add)

    def finish(self, **options: Any) -> set[str]:
        """Replace the model's weights by those that were sent. Returns their names.

        `WeightUpdates.finish` documents the options and the errors.
        """

        def finish() -> set[str]:
            self._check_open()
            try:
                return set(self._end(Method.FINISH_WEIGHTS, options))
            except BaseException:
                self._abandon_after_error()
                raise

        return self._alone(finish)

    def abandon(self) -> None:
        """End the update without changing the model's weights."""
        self._alone(lambda: self._end(Method.ABANDON_WEIGHTS))

    def update(self, weights: NamedTensors, **options: Any) -> set[str]:
        """A complete update. Returns the names of the weights that it changed.

        `WeightUpdates.finish` documents the options and the errors.
        """

        def update() -> set[str]:
            self._begin(in_parts=False)
            try:
                self._send(weights, _num_bytes(weights, self._info.weight_bytes))
                return set(self._end(Method.FINISH_WEIGHTS, options))
            except BaseException:
                self._abandon_after_error()
                raise

        return self._alone(update)

    def close(self) -> None:
        """Free the memory on the GPU, after the connection to the engine has ended. If another
        thread sends weights, it gets an error and frees the memory itself, when its copies are
        done. Idempotent."""
        if not self._is_sending:
            self._close_device()

    def _alone(self, function: Callable[[], Result]) -> Result:
        """Call a function while no other call is inside. A cancelled one is about to leave, so
        this waits for it.

        Raises:
            CallOrderError: another call is inside; nothing changed.
        """
        me = cancellation_of_this_call()
        deadline = time.monotonic() + CANCELLED_S
        try:
            while (other := self._inside.setdefault("call", me)) is not me:
                me.check()
                if not other.is_requested or time.monotonic() >= deadline:
                    raise CallOrderError(
                        "another call of this front end updates the weights; call again when it "
                        "has ended"
                    )
                time.sleep(PAUSE_S)
            me.check()
            if self._opener is not None and self._opener.is_requested:
                self._end(Method.ABANDON_WEIGHTS)  # nobody knows of the update that it began
            return function()
        finally:
            # No call may come here, where an exception of a signal handler could end this.
            if "call" in self._inside and self._inside["call"] is me:
                del self._inside["call"]

    def _begin(self, in_parts: bool) -> None:
        """Begin an update in the engine, of one call or of several."""
        me = cancellation_of_this_call()
        try:
            self._dispatcher.call(Method.START_WEIGHTS)
            self._close_device()  # it is left if an exception interrupted the end of an update
            self._may_share = bool(self._info.device_uuid)
            me.check()
            self._opener = me if in_parts else None
        except ShmLLMError:
            raise
        except BaseException:  # the engine may have begun the update
            if self._opener is None:
                self._abandon_after_error()
            raise

    def _end(self, method: Method, options: Mapping[str, object] | None = None) -> Any:
        """Call the method that ends the update, and free the memory on the GPU when the engine has
        answered or died: until then it may read that memory."""
        self._opener = None
        try:
            result = self._dispatcher.call(method, options)
        except ShmLLMError:
            self._close_device()
            raise
        self._close_device()
        return result

    def _check_open(self) -> None:
        if not self.is_open:
            raise CallOrderError(
                "no update of the weights is under way: start_weight_update() was not called, or "
                "the update has ended with an error"
            )

    def _abandon_after_error(self) -> None:
        with contextlib.suppress(ShmLLMError):
            self._end(Method.ABANDON_WEIGHTS)

    def _send(self, weights: NamedTensors, num_bytes: int) -> None:
        """Send tensors. The memory on the GPU gets `num_bytes` bytes, if so many make sense."""
        host = Packer(HostBuckets(self._dispatcher))
        cancellation = cancellation_of_this_call()
        self._is_sending = True
        try:
            for name, tensor in _pairs(weights):
                cancellation.check()
                packer = self._device_packer(tensor, num_bytes)
                if packer is None:
                    host.put(Source(name, tensor))
                else:
                    packer.put(Source(name, tensor, on_device=True))
            host.flush()
            if self._device is not None:
                self._device.packer.flush()
        except BaseException:
            host.discard()
            raise
        finally:
            self._is_sending = False

    def _device_packer(self, tensor: Any, num_bytes: int) -> Packer | None:
        """The packer for a tensor on the engine's GPU; None if it goes through the host's memory,
        because it is elsewhere or the memory of the GPU cannot be shared."""
        if not self._may_share or not is_torch_tensor(tensor):
            return None
        uuid = self._sharing.uuid(tensor.device)
        if uuid != self._info.device_uuid:
            if uuid and self._info.data_parallel_size > 1:
                self._report("several engines get them")
            elif uuid:
                self._report(f"they are on GPU {uuid}, the engine on {self._info.device_uuid}")
            return None
        if self._device is None:
            try:
                self._device = DeviceBuckets(
                    self._dispatcher, self._sharing, tensor.device, num_bytes
                )
                self._device.lend()
            except (DeviceMemoryError, RequestError, CallError) as problem:
                self._close_device()
                self._may_share = False  # in this update; the next one tries again
                self._report(str(problem))
                return None
        return self._device.packer

    def _report(self, reason: str) -> None:
        if not self._has_reported:
            logger.warning("weights on a GPU are copied through host memory: %s", reason)
        self._has_reported = True

    def _close_device(self) -> None:
        """Free the memory on the GPU. The engine's update has ended, so it maps it no more."""
        device, self._device = self._device, None
        if device is None:
            return
        try:
            device.close()
        except DeviceMemoryError as problem:
            logger.warning("the memory of the buckets on the GPU was not freed: %s", problem)


def _num_bytes(weights: NamedTensors, most: int) -> int:
    """The size of tensors, if they are all there and no generator makes them; else `most`."""
    if not isinstance(weights, Mapping | list | tuple):
        return most
    return sum(_size(tensor) for _, tensor in _pairs(weights))


def _size(tensor: Any) -> int:
    try:
        return int(tensor.nbytes)
    except (AttributeError, RuntimeError):  # `Source` is going to refuse it
        return 0


def _pairs(weights: NamedTensors) -> Iterator[tuple[str, Any]]:
    for pair in weights.items() if isinstance(weights, Mapping) else weights:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise RequestError(f"weights are (name, tensor) pairs, got {type(pair).__name__}")
        yield pair[0], pair[1]
