"""Sends new weights to the engine's model, however many and however large.

Owns which calls make an update, and that tensors of any iterable go out in full buckets, each
copied before the next one is asked for. torch is not imported: who has tensors has it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from shmllm.client.protocol import Lease
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
    """The updates of one front end.

    Args:
        dispatcher: to the engine.

    Attributes:
        is_open: whether an update was started that is still to be finished.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.is_open = False

    def start(self) -> None:
        """Begin an update of several calls.

        Raises:
            CallOrderError: one is under way.
        """
        self._dispatcher.call(Method.START_WEIGHTS)
        self.is_open = True

    def add(self, weights: NamedTensors) -> None:
        """Send a part of the update.

        Raises:
            RequestError: tensors are wrong. The update is over, and nothing changed.
        """
        self._check_open()
        with self._abandoning():
            self._send(weights)
            self._dispatcher.call(Method.CHECK_WEIGHTS)

    def finish(self, **options: Any) -> set[str]:
        """Put what was sent in force; see `WeightUpdates.finish` for options and errors."""
        self._check_open()
        self.is_open = False
        return set(self._dispatcher.call(Method.FINISH_WEIGHTS, options))

    def abandon(self) -> None:
        """Drop what was sent."""
        self.is_open = False
        self._dispatcher.call(Method.ABANDON_WEIGHTS)

    def update(self, weights: NamedTensors, **options: Any) -> set[str]:
        """A whole update. Returns the names written."""
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
    """Fills one bucket after the other."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._open: tuple[Lease, Bucket] | None = None

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
        """Copy a tensor out, whole."""
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
