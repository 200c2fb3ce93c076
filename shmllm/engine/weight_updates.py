"""Updates of the model's weights: one at a time, and each one completely or not at all.

This module owns the update in progress, its staged weights, and the version of the weights in
force. It must not know how the weights were transmitted. It imports torch only in functions, when
the runner has already imported it.
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
        on_written: called after weights were written. Its argument says whether to forget the
            cached prefixes.
        abort_all: ends all requests.

    Attributes:
        version: the version of the weights in force.
    """

    def __init__(
        self,
        model: Callable[[], Any],
        on_written: Callable[[bool], None],
        abort_all: Callable[[], None],
    ) -> None:
        self._model = model
        self._on_written = on_written
        self._abort_all = abort_all
        self._client: int | None = None
        self._staged: Any = None
        self.version: Version = FIRST_VERSION
        self._taken_version: Version = FIRST_VERSION

    def start(self, client: int) -> None:
        """Begin an update for a front end.

        Raises:
            CallOrderError: another update is in progress.
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
        """Copy the pieces in a bucket. Does nothing if this front end has no update in progress.

        Args:
            client: the front end that sent the bucket.
            pieces: the pieces of tensors in the bucket; see `weight_bucket.Piece`.
            bucket: the bytes of the bucket.
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
        """Check the staged weights. A problem ends the update.

        Raises:
            RequestError: staged weights are not valid; the message names the tensors.
            CallOrderError: this front end has no update in progress.
        """
        try:
            self._staged_by(client).check()
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
        """Copy the staged weights into the model, between two steps. The update ends in any case.

        Args:
            client: the front end whose update this is.
            version: the new version; None means the next number.
            abort: end all requests. Otherwise they continue with their keys and values.
            reset_prefix_cache: forget the cached prefixes, which were computed with the previous
                weights.
            partial: weights that a sleep discarded may remain missing after this update.

        Returns:
            The names of the written weights, sorted.

        Raises:
            RequestError: staged weights or the version are not valid; the message names the
                tensors.
            CallOrderError: this front end has no update in progress.
        """
        staged = self._staged_by(client)
        self.abandon(client)
        _check_version(version)
        model = self._model()
        model.check_awake()
        staged.check_complete(() if partial else model.missing)
        if abort:
            self._abort_all()
        names: list[str] = staged.copy_into_place()
        self._on_written(reset_prefix_cache)
        self.version = self._next_version() if version is None else version
        return names

    def abandon(self, client: int) -> None:
        """End a front end's update, if it has one, and drop the staged weights."""
        if client == self._client:
            self._staged = self._client = None

    def weights_changed(self) -> None:
        """Give the weights a new version, because a call of the worker overwrote some of them."""
        self._on_written(True)
        self.version = self._next_version()

    def take_new_version(self) -> Version | None:
        """The version in force if it changed since the last call; otherwise None."""
        if self.version == self._taken_version:
            return None
        self._taken_version = self.version
        return self.version

    def _staged_by(self, client: int) -> Any:
        if self._staged is None or client != self._client:
            raise CallOrderError("no update of the weights is under way; start one first")
        return self._staged

    def _next_version(self) -> Version:
        if isinstance(self.version, int):
            return self.version + 1
        count: int = self._model().weights_version
        return count


def _check_version(version: object) -> None:
    """Raise RequestError unless `version` is a valid version or None."""
    is_text = isinstance(version, str) and len(version) <= LONGEST_VERSION
    is_number = type(version) is int and abs(version) < 2**63
    if version is not None and not is_text and not is_number:
        raise RequestError(
            f"a version is a whole number or a text of at most {LONGEST_VERSION} characters, "
            f"got {version!r}"
        )
