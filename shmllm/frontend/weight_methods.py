"""The methods of LLM that change the model's weights.

Names are those of vLLM's class, which transports weights in other ways: there `update_weights`
takes a description of where they are, here the tensors.
"""

from __future__ import annotations

from typing import Literal

from shmllm.errors import CallOrderError, RequestError
from shmllm.frontend.dispatcher import Dispatcher
from shmllm.frontend.weight_push import NamedTensors, WeightPush
from shmllm.wire.messages import Method

UpdateMode = Literal["keep", "abort"]
Version = int | str


class WeightMethods:
    """What LLM inherits."""

    _dispatcher: Dispatcher
    _weight_push: WeightPush

    def update_weights(
        self,
        weights: NamedTensors,
        *,
        version: Version | None = None,
        mode: UpdateMode = "keep",
        reset_prefix_cache: bool = True,
    ) -> None:
        """Give the engine's model other weights, between two steps: all of them or none.

        Between `start_weight_update` and `finish_weight_update` this sends a part of the
        update, and can be called any number of times; options are then `finish`'s.

        Args:
            weights: (name as in the Hugging Face checkpoint, tensor) pairs, or a dict: torch
                tensors on any device or numpy arrays, of the checkpoint's shapes and any
                floating dtype. A generator may make them one by one, in the same memory.
                Names that are left out keep their weights, unless those were lost with their
                memory (sleep at level 2): then all have to be there. Tied weights go once,
                under the embedding's name.
            version: what `get_weight_version` and outputs say from now on. None counts up
                from 0, or takes the number of updates if the last version was a text.
            mode: "keep": requests that run go on with the keys and values that they have;
                their outputs have a span in `weight_versions` for each version. "abort":
                they end, with reason "abort". To let them end by themselves,
                `pause_generation("wait")` first.
            reset_prefix_cache: forget cached prefixes, which the weights before made.

        Raises:
            RequestError: unknown names, other shapes, no floating numbers, not finite, or
                missing: lists them. Nothing has changed, and the update is over.
            CallOrderError: another update is under way; also a RuntimeError.
        """
        if not self._weight_push.is_open:
            options = _options(version, mode, reset_prefix_cache)
            self._weight_push.update(weights, **options)
            return
        if version is not None or mode != "keep" or not reset_prefix_cache:
            raise CallOrderError(
                "an update of several calls is under way: version, mode and reset_prefix_cache "
                "are for finish_weight_update()"
            )
        self._weight_push.add(weights)

    def start_weight_update(self) -> None:
        """Begin an update of several calls of `update_weights`. The engine has one at a time.

        Raises:
            CallOrderError: one is under way, of this front end or of another one; also a
                RuntimeError.
        """
        self._weight_push.start()

    def finish_weight_update(
        self,
        version: Version | None = None,
        *,
        mode: UpdateMode = "keep",
        reset_prefix_cache: bool = True,
    ) -> None:
        """Put what was sent since `start_weight_update` in force; see `update_weights`.

        Raises:
            RequestError: as for `update_weights`.
            CallOrderError: no update is under way.
        """
        self._weight_push.finish(**_options(version, mode, reset_prefix_cache))

    def abandon_weight_update(self) -> None:
        """Drop what was sent since `start_weight_update`, if anything."""
        self._weight_push.abandon()

    def get_weight_version(self) -> Version:
        """The version of the weights in force; 0 until the first update."""
        version: Version = self._dispatcher.call(Method.GET_WEIGHT_VERSION)
        return version

    def load_weights(self, weights: NamedTensors) -> set[str]:
        """What the end of `llm_engine`'s attribute chain calls. Internal."""
        return self._weight_push.update(weights, partial=True)


def _options(version: Version | None, mode: str, reset_prefix_cache: bool) -> dict[str, object]:
    if mode not in ("keep", "abort"):
        raise RequestError(f"the mode of an update is 'keep' or 'abort', got {mode!r}")
    return {"version": version, "abort": mode == "abort", "reset_prefix_cache": reset_prefix_cache}
