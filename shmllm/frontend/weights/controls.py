"""What a front end does to the weights of its engine.

This module owns what users see of that. Pairs of names and tensors go through `WeightPush`; what a
trainer sends by a network or by handles of a GPU is announced by `WeightTransfer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, cast

from shmllm.errors import CallOrderError, RequestError
from shmllm.frontend.dispatcher import Dispatcher
from shmllm.frontend.front_end import FrontEnd
from shmllm.frontend.weights.push import (
    NamedTensors,
    UpdateMode,
    Version,
    WeightPush,
    finish_options,
)
from shmllm.frontend.weights.transfer import (
    HasUpdateInfo,
    WeightTransfer,
    as_update_request,
    init_info_of,
)
from shmllm.wire.messages import Method
from shmllm.wire.rpc import RpcCall

CALLED_BY_NAME = {
    "init_weight_transfer_engine": "init_info",
    "start_weight_update": "",
    "start_draft_weight_update": "",
    "update_weights": "update_info",
    "finish_weight_update": "",
    "update_weight_version": "",
    "get_weight_version": "",
    "shutdown_weight_transfer_engine": "",
}
"""The methods that `collective_rpc` calls here by their names, each with the argument that is the
content of its request."""


class WeightControls:
    """The methods of `LLM` about weights."""

    front_end: FrontEnd
    _dispatcher: Dispatcher
    _weight_push: WeightPush
    _weight_transfer: WeightTransfer

    def update_weights(
        self,
        weights: NamedTensors | HasUpdateInfo,
        *,
        version: Version | None = None,
        mode: UpdateMode = "keep",
        reset_prefix_cache: bool = True,
    ) -> None:
        """Overwrite weights of the engine's model between two steps: all given ones, or none.

        Between `start_weight_update` and `finish_weight_update` each call sends a part of the
        update; `finish_weight_update` then takes the options.

        Args:
            weights: (name as in the Hugging Face checkpoint, tensor) pairs, or a dict: torch
                tensors on any device or numpy arrays, of the checkpoint's shapes and any
                floating dtype. A generator may yield them one by one, in the same memory.
                Weights that are left out stay as they are. After sleep at level 2, which
                discards weights, all of them have to be given. Tied weights are given once,
                under the embedding's name.
                Or, if a trainer sends the tensors itself, a dict {"update_info": info} or an
                object with `update_info`; the backend says what that contains (docs/rl.md). It
                needs an update that was started.
            version: the new version, for `get_weight_version` and outputs. None adds one to the
                last version, or takes the number of updates if the last version was a text.
            mode: "keep" lets running requests continue with their keys and values; their
                outputs have a span in `weight_versions` for each version. "abort" ends them with
                reason "abort". To let them finish, call `pause_generation("wait")` first.
            reset_prefix_cache: forget cached prefixes, which the previous weights computed.

        Raises:
            RequestError: a name is unknown, a shape differs, or a tensor is missing, not
                floating or not finite; lists all of them. Or the trainer is gone. The update ends
                without any change.
            CallOrderError: another update is in progress; also a RuntimeError.
        """
        has_options = version is not None or mode != "keep" or not reset_prefix_cache
        if (request := as_update_request(weights)) is not None:
            self._receive_weights(request.update_info, has_options)
            return
        pairs = cast(NamedTensors, weights)
        if not self._weight_push.is_open:
            options = finish_options(version, mode, reset_prefix_cache)
            self._weight_push.update(pairs, **options)
            return
        _refuse_options(has_options)
        self._weight_push.add(pairs)

    def _receive_weights(
        self, update_info: Any, has_options: bool = False, timeout_s: float | None = None
    ) -> None:
        _refuse_options(has_options)
        self._weight_push.add_by(lambda: self._weight_transfer.receive(update_info, timeout_s))

    def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        """Begin an update of several calls of `update_weights`. The engine runs one at a time.

        Args:
            is_checkpoint_format: True: names and shapes are those of the checkpoint.

        Raises:
            RequestError: `is_checkpoint_format` is False.
            CallOrderError: an update of this or another front end is in progress; also a
                RuntimeError.
        """
        if not is_checkpoint_format:
            raise RequestError(
                "is_checkpoint_format must be True: weights have the names and shapes of the "
                "checkpoint"
            )
        self._weight_push.start()

    def finish_weight_update(
        self,
        version: Version | None = None,
        *,
        weight_version: Version | None = None,
        mode: UpdateMode = "keep",
        reset_prefix_cache: bool = True,
    ) -> None:
        """Put the weights sent since `start_weight_update` in force; see `update_weights`.

        Args:
            version, mode, reset_prefix_cache: those of `update_weights`.
            weight_version: vLLM's name of `version`.

        Raises:
            RequestError: as for `update_weights`.
            CallOrderError: no update is in progress, or tensors of it have not arrived.
        """
        if version is not None and weight_version is not None:
            raise RequestError("version and weight_version are the same; give one of them")
        version = weight_version if version is None else version
        self._weight_push.finish(**finish_options(version, mode, reset_prefix_cache))

    def abandon_weight_update(self) -> None:
        """Discard the weights sent since `start_weight_update`, if any."""
        self._weight_push.abandon()

    def get_weight_version(self) -> Version:
        """The version of the weights in force; 0 before the first update."""
        version: Version = self._dispatcher.call(Method.GET_WEIGHT_VERSION)
        return version

    def update_weight_version(self, new_version: Version) -> None:
        """Give the weights in force another version, for `get_weight_version` and outputs.

        Raises:
            RequestError: it is neither a whole number nor a text of at most 256 characters.
        """
        self._dispatcher.call(Method.SET_WEIGHT_VERSION, new_version)

    def init_weight_transfer_engine(self, request: Any) -> None:
        """Connect the engine with a trainer that sends weights itself.

        Args:
            request: a dict {"init_info": info} or an object with `init_info`, of which the
                backend (`weight_transfer_config`) says what it contains; see docs/rl.md.

        Raises:
            RequestError: the info is not valid, or the trainer does not answer in time.
            CallOrderError: an update is in progress.
        """
        self._weight_transfer.connect(init_info_of(request))

    def shutdown_weight_transfer_engine(self) -> None:
        """Disconnect the engine from the trainer, if it is connected.

        Raises:
            CallOrderError: an update is in progress.
        """
        self._weight_transfer.disconnect()

    def start_draft_weight_update(self) -> NoReturn:
        """Refused: the weights of a model that drafts are those of its files."""
        raise RequestError(
            "the weights of a draft model cannot be updated: with speculative_config, choose a "
            "method without a model, such as 'ngram', or start the engine again"
        )

    def compute_weight_checksums(self) -> dict[str, str]:
        """The SHA-256, in hexadecimal digits, of each weight's bytes in the model's dtype, by its
        name in the checkpoint: what `get_weight` returns. In a pool, those of the first engine.

        Raises:
            RequestError: the weights are asleep.
        """
        client = self._dispatcher.use_client
        sums: dict[str, str] = client(
            lambda engine: engine.run_on_worker(RpcCall("compute_weight_checksums"))
        )
        return sums

    def get_world_size(self, include_dp: bool = True) -> int:
        """The number of processes that compute: ranks times stages, times the engines of a pool.

        Args:
            include_dp: count all engines of a pool.
        """
        info = self.front_end.info
        return info.num_processes * (info.data_parallel_size if include_dp else 1)

    def _call_by_name(
        self, name: str, timeout_s: float | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a method of CALLED_BY_NAME for `collective_rpc`."""
        if not (key := CALLED_BY_NAME[name]):
            return getattr(self, name)(*args, **kwargs)
        given = dict(zip([key], args, strict=False)) | dict(kwargs)
        if [*given] != [key] or len(args) > 1:
            raise RequestError(f"{name} takes the argument {key!r}, got {[*given]}")
        if key == "init_info":
            return self._weight_transfer.connect(given[key], timeout_s)
        return self._receive_weights(given[key], timeout_s=timeout_s)


def _refuse_options(has_options: bool) -> None:
    if has_options:
        raise CallOrderError(
            "an update of several calls is in progress: version, mode and reset_prefix_cache "
            "are for finish_weight_update()"
        )
