"""Updates of the weights, as the engine sees them: one at a time, all of it or nothing.

Owns whose update is under way, its staged weights, and the version in force. Must not know
how weights come here. torch is there when the first update begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from shmllm.errors import CallOrderError, RequestError

Version = int | str

FIRST_VERSION = 0
LONGEST_VERSION = 256


class WeightUpdates:
    """
    Args:
        model: returns the model.
        written: called when weights were written, with whether to forget cached prefixes.
        abort_running: ends all requests.

    Attributes:
        version: of the weights in force.
    """

    def __init__(
        self,
        model: Callable[[], Any],
        written: Callable[[bool], None],
        abort_running: Callable[[], None],
    ) -> None:
        self._model = model
        self._written = written
        self._abort_running = abort_running
        self._client: int | None = None
        self._staged: Any = None
        self.version: Version = FIRST_VERSION
        self._announced: Version = FIRST_VERSION

    def start(self, client: int) -> None:
        """Begin an update for a front end.

        Raises:
            CallOrderError: one is under way.
            RequestError: the weights are asleep.
        """
        if self._staged is not None:
            whose = "this" if client == self._client else "another"
            raise CallOrderError(
                f"an update of the weights by {whose} front end is under way; it has to be "
                "finished or abandoned first"
            )
        from shmllm.models.weight_staging import StagedWeights

        model = self._model()
        model.check_awake()
        self._staged, self._client = StagedWeights(model), client

    def stage(
        self,
        client: int,
        pieces: Iterable[tuple[str, str, tuple[int, ...], int, int, int]],
        bucket: memoryview,
    ) -> None:
        """Copy what lies in a bucket; passed over if there is no update of this front end.

        Args:
            pieces: see `weight_bucket.Piece`; they lie in the bucket.
        """
        if self._staged is None or client != self._client:
            return
        import torch

        for name, dtype, shape, begin, length, offset in pieces:
            kind = getattr(torch, dtype)
            piece = torch.empty(0, dtype=kind)
            if length:
                piece = torch.frombuffer(bucket, dtype=kind, count=length, offset=offset)
            self._staged.put(name, shape, begin, piece)

    def check(self, client: int) -> None:
        """Say what is wrong with what came so far, which ends the update.

        Raises:
            RequestError: names the tensors.
            CallOrderError: there is no update.
        """
        try:
            self._own(client).check()
        except RequestError:
            self.abandon(client)
            raise

    def finish(
        self,
        client: int,
        version: Version | None = None,
        *,
        abort: bool = False,
        reset_prefix_cache: bool = True,
        partial: bool = False,
    ) -> list[str]:
        """Put the new weights in force, between two steps. Whatever happens, the update ends.

        Args:
            version: None counts up.
            abort: end the requests that run. They go on otherwise, with the keys and values
                that they have.
            reset_prefix_cache: forget cached prefixes, which the old weights made.
            partial: weights that were lost with their memory may be missing still.

        Returns:
            The names written, sorted.

        Raises:
            RequestError: what came cannot be taken; names the tensors.
            CallOrderError: there is no update.
        """
        staged = self._own(client)
        self.abandon(client)
        check_version(version)
        model = self._model()
        model.check_awake()
        staged.check_complete(() if partial else model.missing)
        if abort:
            self._abort_running()
        names: list[str] = staged.copy_into_place()
        self._written(reset_prefix_cache)
        self.version = self._next_version() if version is None else version
        return names

    def abandon(self, client: int) -> None:
        """Drop what a front end has staged, if it has; also when it is gone."""
        if client == self._client:
            self._staged = self._client = None

    def weights_changed(self) -> None:
        """The model's weights were overwritten in another way."""
        self._written(True)
        self.version = self._next_version()

    def take_new_version(self) -> Version | None:
        """The version in force, if it is another one than when this was last asked."""
        if self.version == self._announced:
            return None
        self._announced = self.version
        return self.version

    def _own(self, client: int) -> Any:
        if self._staged is None or client != self._client:
            raise CallOrderError("no update of the weights is under way; start one first")
        return self._staged

    def _next_version(self) -> Version:
        if isinstance(self.version, int):
            return self.version + 1
        count: int = self._model().weights_version
        return count


def check_version(version: object) -> None:
    """Raise RequestError unless it can be a version, or None."""
    is_text = isinstance(version, str) and len(version) <= LONGEST_VERSION
    is_number = type(version) is int and abs(version) < 2**63
    if version is not None and not is_text and not is_number:
        raise RequestError(
            f"a version is a whole number or a text of at most {LONGEST_VERSION} characters, "
            f"got {version!r}"
        )
