"""The engine's end of a trainer's backend: what it receives goes into the update in progress.

This module owns who asked for the connection, and what happens after an error: the update ends, and
the engine goes on with the weights before. It must not know how weights are transmitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from shmllm.config.weight_transfer import BACKENDS
from shmllm.engine.weight_updates import WeightUpdates
from shmllm.errors import CallOrderError, RequestError

if TYPE_CHECKING:
    from shmllm.transfer.receiver import Receiver


class WeightTransfer:
    """
    Args:
        backend: the name of the backend.
        num_workers: the number of processes of this engine.
        weights: the weight updates of this engine.
    """

    def __init__(self, backend: str, num_workers: int, weights: WeightUpdates) -> None:
        self._backend = backend
        self._num_workers = num_workers
        self._weights = weights
        self._receiver: Receiver | None = None
        self._client: int | None = None
        self._receiving: int | None = None
        self._token: object = None

    def open(self, client: int, init_info: object, token: object) -> None:
        """Begin to connect with a trainer, instead of the one before. `progress` says when that is
        done. The connection ends with the front end that asked for it.

        Args:
            client: the front end.
            init_info: what the backend needs.
            token: names what this call begins, for `progress`.

        Raises:
            CallOrderError: an update is in progress.
            RequestError: the init_info is not valid.
        """
        self._check_idle()
        if not isinstance(init_info, Mapping):
            raise RequestError(f"init_info must be a dict, got {type(init_info).__name__}")
        if self._receiver is None:
            self._receiver = self._make_receiver()
        self._receiver.open(init_info)
        self._client, self._token = client, token

    def receive(self, client: int, update_info: object, token: object) -> None:
        """Begin to receive tensors of a front end's update. `progress` goes on with it.

        Args:
            client: the front end.
            update_info: what the backend says about the tensors.
            token: names what this call begins, for `progress`.

        Raises:
            CallOrderError: the front end has no update in progress, the tensors of the last call
                have not arrived, or there is no connection.
            RequestError: the update_info is not valid. The update has ended.
        """
        if not self._weights.updates(client):
            raise CallOrderError(
                "no update of the weights is under way: call start_weight_update first"
            )
        self.check_arrived(client)
        if self._receiver is None:
            self._receiver = self._make_receiver()
        if not isinstance(update_info, Mapping):
            raise RequestError(f"update_info must be a dict, got {type(update_info).__name__}")
        try:
            update = self._receiver.read_update(update_info)
            self._receiving, self._token = client, token
            self._receiver.receive(update)
        except BaseException:
            self._fail(client)
            raise

    def progress(self, client: int, token: object) -> int:
        """Put what has arrived into the update.

        Args:
            client: the front end.
            token: that of the call of `open` or `receive`.

        Returns:
            0 if all has arrived, or the connection is made; otherwise a number that falls.

        Raises:
            RequestError: the trainer is gone, or sent nothing in time. The update has ended. Or
                another call has ended the connection.
        """
        if self._receiver is None or token != self._token:
            raise RequestError("another call has ended the connection with the trainer")
        if self._receiving is not None and not self._weights.updates(self._receiving):
            self._fail(client)  # abandoned by another thread of the front end
            raise RequestError("the update of the weights was abandoned")
        try:
            left = self._receiver.progress()
        except RequestError as problem:
            self._fail(client)
            raise RequestError(str(problem)) from problem  # a front end knows no subclass
        except BaseException:
            self._fail(client)
            raise
        if not left:
            self._receiving = None
        return left

    def check_arrived(self, client: int) -> None:
        """Raise CallOrderError if tensors of a front end's update are still on their way."""
        if self._receiving == client:
            raise CallOrderError("the tensors of the last call have not arrived yet")

    def abandon(self, client: int) -> None:
        """Disconnect from the trainer if tensors of a front end's update are on their way, which
        nobody is going to take."""
        if self._receiving == client:
            self.close()

    def shut_down(self) -> None:
        """Disconnect from the trainer, if there is one.

        Raises:
            CallOrderError: an update is in progress.
        """
        self._check_idle()
        self.close()

    def forget_client(self, client: int) -> None:
        """Disconnect from the trainer if a front end that has ended asked for that, or was in the
        middle of an update."""
        if client in (self._client, self._receiving):
            self.close()

    def close(self) -> None:
        """Disconnect from the trainer. Idempotent."""
        self._receiving = self._client = self._token = None
        if self._receiver is not None:
            self._receiver.close()

    def _fail(self, client: int) -> None:
        """End the update, and a connection in which tensors of it may still be on their way."""
        was_receiving = self._receiving is not None
        self._weights.abandon(client)
        self._receiving = None
        if was_receiving and self._receiver is not None:
            self._receiver.close()

    def _check_idle(self) -> None:
        if self._weights.is_open:
            raise CallOrderError(
                "an update of the weights is under way; it has to be finished or abandoned first"
            )

    def _make_receiver(self) -> Receiver:
        from shmllm.transfer.receiver import Place

        place = Place(
            self._backend, self._weights.device, self._num_workers, self._weights.stage_tensor
        )
        receiver: Receiver = import_module(BACKENDS[self._backend]).Receiver(place)
        return receiver
