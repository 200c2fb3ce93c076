"""The part of a runner that is the same on every device if other processes compute with it.

This module owns what a runner asks of the other ranks between steps. It must not know how a step is
computed.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shmllm.config.engine import EngineConfig
from shmllm.worker.loaded_runner import LoadedRunner
from shmllm.worker.loading import LoadedModel
from shmllm.worker.ranks import Ranks

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RankedRunner(LoadedRunner, ABC):
    """A runner whose model other ranks may have parts of.

    Args:
        config, loaded, embeds_scale: see `LoadedRunner`.
        ranks: the other ranks.
    """

    def __init__(
        self, config: EngineConfig, loaded: LoadedModel, ranks: Ranks, embeds_scale: float = 1.0
    ) -> None:
        super().__init__(config, loaded, embeds_scale)
        self._ranks = ranks
        if ranks.memory.size > 1:
            loaded.model.followers = ranks

    def check(self) -> None:
        """Raise if another rank has ended."""
        self._ranks.check()

    def watch(self, report: Callable[[int], None]) -> None:
        """See `Ranks.watch`."""
        self._ranks.watch(report)

    def everywhere(self, own: Callable[[], Any], pickled: Callable[[], bytes]) -> list[Any]:
        """See `LoadedRunner.everywhere`. Each rank's function sees its part of the model."""
        followers, self.model.followers = self.model.followers, None
        try:
            return self._ranks.call(own, pickled)
        finally:
            self.model.followers = followers

    def read_weight(self, name: str) -> torch.Tensor:
        """See `LoadedRunner.read_weight`. Each rank has zeros where others have their parts."""
        own = super().read_weight
        found = self._ranks.everywhere(lambda: own(name), "read_weight", name)
        if len(found) == 1:
            return found[0]
        kind = found[0].dtype
        bits, *others = (each.cpu().view(_BITS[kind.itemsize]) for each in found)
        for each in others:
            bits |= each
        return bits.view(kind)

    def reload_weights(self, directory: str | None) -> str:
        """See `LoadedModel.reload`."""
        model, loaded = self.model, self._loaded
        try:
            own = self._ranks.everywhere(lambda: loaded.reload(directory), "reload", directory)
        except Exception:
            # Weights that only some of the ranks have read are of no use.
            versions = self._ranks.everywhere(lambda: model.weights_version, "weights_version")
            if len(set(versions)) > 1:
                self._ranks.everywhere(model.weights_damaged, "damage_weights")
            raise
        return own[0]

    def trace(self, directory: Path) -> None:
        """See `LoadedRunner.trace`."""
        self._ranks.everywhere(_nothing, "begin_trace", directory)

    def begin_recording(self) -> None:
        self._ranks.everywhere(_nothing, "begin_recording")

    def end_recording(self) -> None:
        self._ranks.everywhere(_nothing, "end_recording")

    def write_recording(self, path: Path) -> None:
        self._ranks.everywhere(_nothing, "write_recording", path.absolute())

    def close(self) -> None:
        """End the other ranks."""
        self._ranks.close()


def _nothing() -> None:
    pass
