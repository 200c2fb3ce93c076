"""WeightPush: sends new weights from a front end to the engine.

This module owns the sequence of calls of an update. It copies the tensors of an iterable into
buckets, each tensor before it asks for the next one. It does not import torch: a caller with torch
tensors has imported it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from shmllm.client.protocol import BucketMemory
from shmllm.errors import CallOrderError, RequestError, ShmLLMError
from shmllm.frontend.dispatcher import Dispatcher
from shmllm.wire.messages import Method
from shmllm.wire.weight_bucket import Bucket, Source

NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]]
UpdateMode = Literal["keep", "abort"]
Version = int | str


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

    Attributes:
        is_open: whether an update was started and has not been finished or abandoned.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.is_open = False

    def start(self) -> None:
        """Begin an update of several calls.

        Raises:
            CallOrderError: an update has been started already, here or by another front end.
        """
        self._dispatcher.call(Method.START_WEIGHTS)
        self.is_open = True

    def add(self, weights: NamedTensors) -> None:
        """Send a part of the weights of the update that `start` began.

        Raises:
            CallOrderError: no update was started.
            RequestError: tensors are invalid. The update has ended and changed nothing.
        """
        self._check_open()
        with self._abandoning():
            self._send(weights)
            self._dispatcher.call(Method.CHECK_WEIGHTS)

    def finish(self, **options: Any) -> set[str]:
        """Replace the model's weights by those that were sent. Returns their names.

        `WeightUpdates.finish` documents the options and the errors.
        """
        self._check_open()
        self.is_open = False
        return set(self._dispatcher.call(Method.FINISH_WEIGHTS, options))

    def abandon(self) -> None:
        """End the update without changing the model's weights."""
        self.is_open = False
        self._dispatcher.call(Method.ABANDON_WEIGHTS)

    def update(self, weights: NamedTensors, **options: Any) -> set[str]:
        """A complete update. Returns the names of the weights that it changed.

        `WeightUpdates.finish` documents the options and the errors.
        """
        self.start()
        with self._abandoning():
            self._send(weights)
            return self.finish(**options)

    def _check_open(self) -> None:
        if not self.is_open:
            raise CallOrderError(
                "no update of the weights is under way: start_weight_update() was not called, or "
                "the update has ended with an error"
            )

    @contextlib.contextmanager
    def _abandoning(self) -> Iterator[None]:
        """A context whose exceptions end the update."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(ShmLLMError):
                self.abandon()
            raise

    def _send(self, weights: NamedTensors) -> None:
        with _Packer(self._dispatcher) as packer:
            for name, tensor in _pairs(weights):
                packer.put(Source(name, tensor))


class _Packer:
    """Copies tensors into buckets, one after the other, and sends each bucket when it is full.

    Leaving the context sends the last bucket, or releases it after an exception.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._open: tuple[BucketMemory, Bucket] | None = None

    def __enter__(self) -> _Packer:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._open is None:
            return
        lease, bucket = self._open
        if kind is None:
            self._dispatcher.send_bucket(lease, bucket.to_json())
        else:
            lease.abort()

    def put(self, source: Source) -> None:
        """Copy a whole tensor, into as many buckets as it needs."""
        while True:
            if self._open is None:
                lease = self._dispatcher.claim_bucket()
                self._open = lease, Bucket(lease.buffer)
            lease, bucket = self._open
            bucket.fill(source)
            if bucket.is_full:
                self._open = None
                self._dispatcher.send_bucket(lease, bucket.to_json())
            if source.is_sent:
                return


def _pairs(weights: NamedTensors) -> Iterator[tuple[str, Any]]:
    for pair in weights.items() if isinstance(weights, Mapping) else weights:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise RequestError(f"weights are (name, tensor) pairs, got {type(pair).__name__}")
        yield pair[0], pair[1]
