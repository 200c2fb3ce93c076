"""Updates of the model's weights: one at a time, and each one completely or not at all.

This module owns the update in progress, its staged weights, the memory that its front end lends
for it, and the version of the weights in force. It must not know how messages were transmitted. It
imports torch only in functions, when the runner has already imported it.

A front end whose tensors lie on the engine's GPU lends memory there (`client.protocol`): it fills
the memory, waits for its copies, and sends the list of the pieces; the engine copies the pieces,
waits for its copies, and answers. So the two never use the memory at the same time, and no event is
shared: an event would save a wait of 10 to 20 us on each side for a bucket of 256 MiB, but the
message that announces the bucket has to travel anyway, and without MPS two processes take turns on
a GPU, so their copies cannot overlap.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

from shmllm.client.protocol import DeviceMemory, DeviceSharing
from shmllm.engine.blocks_elsewhere import WeightsSource
from shmllm.errors import CallOrderError, DeviceMemoryError, RequestError
from shmllm.ipc.device_memory import CudaSharing
from shmllm.wire.weight_bucket import DEVICE_BUCKET_BYTES, Piece, as_pieces

logger = logging.getLogger(__name__)

Version = int | str

FIRST_VERSION = 0
LONGEST_VERSION = 256


class WeightUpdates:
    """
    Args:
        model: returns the model.
        on_written: called after weights were written, with whether to forget the cached prefixes,
            and where all weights were read from, if it is known.
        abort_all: ends all requests.

    Attributes:
        version: the version of the weights in force.
        sharing: maps the memory that front ends lend.
    """

    def __init__(
        self,
        model: Callable[[], Any],
        on_written: Callable[[bool, WeightsSource | None], None],
        abort_all: Callable[[], None],
    ) -> None:
        self._model = model
        self._on_written = on_written
        self._abort_all = abort_all
        self._client: int | None = None
        self._staged: Any = None
        self._lent: DeviceMemory | None = None
        self._has_reported = False
        self.sharing: DeviceSharing = CudaSharing()
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

    def stage(self, client: int, pieces: Iterable[Piece], bucket: memoryview) -> None:
        """Copy the pieces in a bucket. Does nothing if this front end has no update in progress.

        Args:
            client: the front end that sent the bucket.
            pieces: the pieces of tensors in the bucket.
            bucket: the bytes of the bucket.
        """
        if self._staged is None or client != self._client:
            return
        import torch

        empty = torch.empty(0, dtype=torch.uint8)
        self._put(pieces, torch.frombuffer(bucket, dtype=torch.uint8) if bucket else empty)

    def lend(self, client: int, handle: str, num_bytes: int) -> None:
        """Map the memory in which a front end is going to fill buckets, until its update ends.

        Args:
            client: the front end whose update this is.
            handle: the handle of memory on the GPU of the model.
            num_bytes: the size of the memory.

        Raises:
            RequestError: the model is not on a GPU, the size is not valid, or the memory cannot
                be mapped. The update continues.
            CallOrderError: this front end has no update in progress.
        """
        self._staged_by(client)
        self._give_back()
        device = self.device
        if not self.sharing.uuid(device):
            raise RequestError(f"the engine computes on {device} and shares no memory of it")
        if type(num_bytes) is not int or not 0 < num_bytes <= DEVICE_BUCKET_BYTES:
            raise RequestError(f"a bucket has 1 to {DEVICE_BUCKET_BYTES:,} bytes, got {num_bytes}")
        try:
            self._lent = self.sharing.open(handle, num_bytes, device)
        except DeviceMemoryError as problem:
            raise RequestError(str(problem)) from problem

    def stage_lent(self, client: int, pieces: object) -> None:
        """Copy the pieces in the memory that a front end has lent. No copy is left under way.

        Args:
            client: the front end whose update this is.
            pieces: the pieces of tensors in the memory, as JSON has made them.

        Raises:
            CallOrderError: this front end has no update in progress, or has lent no memory.
            ProtocolMismatchError: the pieces are not valid; nothing was copied.
        """
        self._staged_by(client)
        if self._lent is None:
            raise CallOrderError("there are no lent buckets: no memory was lent for this update")
        memory = self._lent.tensor
        try:
            self._put(as_pieces(pieces, len(memory)), memory)
        finally:
            self.sharing.synchronize(memory.device)
        if self._staged.uses_host and not self._has_reported:
            self._has_reported = True
            logger.warning(
                "new weights wait in the host's memory, which takes seconds: too little memory of "
                "the GPU is free (docs/rl.md says how much an update needs)"
            )

    def _put(self, pieces: Iterable[Piece], bucket: Any) -> None:
        """Stage pieces of a bucket, a torch tensor (bytes,) uint8."""
        import torch

        for name, dtype, shape, begin, length, offset in pieces:
            kind = getattr(torch, dtype)
            piece = bucket[offset : offset + length * kind.itemsize].view(kind)
            self._staged.put(name, shape, begin, piece)

    def stage_tensor(self, name: str, shape: tuple[int, ...], tensor: Any) -> None:
        """Copy a whole tensor into the update in progress.

        Args:
            name: the name in the checkpoint.
            shape: the shape.
            tensor: its elements, a torch tensor of any shape.
        """
        self._staged.put(name, shape, 0, tensor.reshape(-1))

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
        self._staged = self._client = None
        self._give_back()
        with contextlib.closing(staged):
            _check_version(version)
            model = self._model()
            model.check_awake()
            staged.check_complete(() if partial else model.missing)
            if abort:
                self._abort_all()
            names: list[str] = staged.copy_into_place()
        self._on_written(reset_prefix_cache, None)
        self.version = self._next_version() if version is None else version
        return names

    @property
    def device(self) -> Any:
        """The torch.device of the model's weights."""
        weight, *_ = next(iter(self._model().named_weights().values()))
        return weight.device

    @property
    def is_open(self) -> bool:
        """Whether a front end has an update in progress."""
        return self._staged is not None

    def updates(self, client: int) -> bool:
        """Whether this front end has an update in progress."""
        return self._staged is not None and client == self._client

    def abandon(self, client: int) -> None:
        """End a front end's update, if it has one. Drop the staged weights and end the mapping of
        the lent memory."""
        if client == self._client and self._staged is not None:
            staged, self._staged, self._client = self._staged, None, None
            self._give_back()
            staged.close()

    def weights_changed(self, source: WeightsSource | None = None) -> None:
        """Give the weights a new version, because a call of the worker overwrote some of them.

        Args:
            source: where all of them were read from; None: from no directory.
        """
        self._on_written(True, source)
        self.version = self._next_version()

    def set_version(self, version: Version) -> None:
        """Give the weights in force another version.

        Raises:
            RequestError: the version is not valid.
        """
        if version is None:
            raise RequestError("a version is a whole number or a text, got None")
        _check_version(version)
        self.version = version

    def take_new_version(self) -> Version | None:
        """The version in force if it changed since the last call; otherwise None."""
        if self.version == self._taken_version:
            return None
        self._taken_version = self.version
        return self.version

    def _give_back(self) -> None:
        """End the mapping of lent memory, if there is one. This must not end the engine when a
        front end has died, so an error is only logged."""
        lent, self._lent = self._lent, None
        if lent is None:
            return
        try:
            lent.close()
        except DeviceMemoryError as problem:
            logger.warning("the memory that a front end lent stays mapped: %s", problem)

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
