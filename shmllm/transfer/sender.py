"""The trainer's end of a backend: what all of them have in common."""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from shmllm.errors import RequestError, ShmLLMError
from shmllm.transfer.source import ParamMeta, WeightSource
from shmllm.transfer.trainer_info import TrainerInitInfo

METHODS = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)
"""The methods of a client."""


class Client:
    """Calls an engine for a trainer.

    Args:
        target: an `LLM`, or an object with the four methods of vLLM's clients, which take the
            init_info and the update_info themselves.

    Raises:
        RequestError: a method is missing, or is a coroutine.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self._is_llm = hasattr(target, "collective_rpc")
        for name in METHODS:
            method = getattr(target, name, None)
            if method is None or inspect.iscoroutinefunction(method):
                raise RequestError(
                    f"the client must be an LLM or have a method {name} that is no coroutine, got "
                    f"{type(target).__name__}"
                )

    def init(self, init_info: Mapping[str, Any]) -> None:
        argument = {"init_info": init_info} if self._is_llm else init_info
        self.target.init_weight_transfer_engine(argument)

    def start(self) -> None:
        self.target.start_weight_update()

    def update(self, update_info: Mapping[str, Any]) -> None:
        self.target.update_weights({"update_info": update_info} if self._is_llm else update_info)

    def finish(self, version: int | str | None) -> None:
        if version is None:
            self.target.finish_weight_update()
        else:
            self.target.finish_weight_update(weight_version=version)

    def abandon(self) -> None:
        """Abandon an update, if the target can. An engine that has ended is no error."""
        if hasattr(self.target, "abandon_weight_update"):
            with contextlib.suppress(ShmLLMError):
                self.target.abandon_weight_update()

    def shut_down(self) -> None:
        """Tell the engine to disconnect, if the target can; errors do not matter then."""
        if hasattr(self.target, "shutdown_weight_transfer_engine"):
            with contextlib.suppress(ShmLLMError):
                self.target.shutdown_weight_transfer_engine()


class Sender(ABC):
    """Sends a trainer's weights to an engine.

    Args:
        info: how.
        client: an `LLM`, or an object as `Client` describes it.
        source: the weights.
    """

    def __init__(self, info: TrainerInitInfo, client: Any, source: WeightSource) -> None:
        self.info: Any = info
        self.source = source
        if info.is_sender:
            self.client = Client(client)
            self.connect()

    def send_weights(self, version: int | str | None = None) -> None:
        """Send all weights as one update, which the engine uses when this returns. Every rank of
        the trainer calls this method.

        Args:
            version: the new version; None: the next number.

        Raises:
            RequestError: the engine refused the weights, or the other end did not answer in time.
                The engine goes on with the weights before.
            EngineDeadError: the engine has ended.
        """
        if not self.info.is_sender:
            self.source.metadata()  # which may be a collective
            for _ in self.source:
                pass
            return
        self.check_connected()
        self.client.start()
        try:
            self.transmit()
            self.client.finish(version)
        except BaseException:
            self.disconnect()
            self.client.abandon()
            raise

    def shutdown(self) -> None:
        """Disconnect from the engine. Idempotent."""
        if self.info.is_sender:
            self.client.shut_down()
            self.disconnect()

    def checked_pairs(self, meta: list[ParamMeta] | None = None) -> Iterator[tuple[str, Any]]:
        """The source's (name, tensor) pairs, if they are those of its metadata.

        Raises:
            RequestError: they differ; names the first one that does.
        """
        expected = iter(self.source.metadata() if meta is None else meta)
        for name, tensor in self.source:
            found = ParamMeta(name, tensor.dtype, tuple(tensor.shape))
            if (wanted := next(expected, None)) != found:
                raise RequestError(f"the source's metadata say {wanted}, but it has {found}")
            yield name, tensor.detach()
        if (wanted := next(expected, None)) is not None:
            raise RequestError(f"the source ended before {wanted.name}")

    @abstractmethod
    def connect(self) -> None:
        """Connect with the engine; on rank 0 only."""

    @abstractmethod
    def transmit(self) -> None:
        """Send all weights into the update that was started."""

    def check_connected(self) -> None:  # noqa: B027
        """Raise RequestError after `disconnect`."""

    def disconnect(self) -> None:  # noqa: B027
        """End the connection, of whose state nothing is known after an error. Idempotent."""


def update_info_of(meta: list[ParamMeta]) -> dict[str, Any]:
    """The lists of an update_info."""
    return {
        "names": [each.name for each in meta],
        "dtype_names": [str(each.dtype).removeprefix("torch.") for each in meta],
        "shapes": [list(each.shape) for each in meta],
    }
