"""Who of a runner holds how much memory, and what of it can be given back.

Owns the list of owners: whatever a runner keeps that is large is in here or counts as rest.
Must not know when the engine sleeps, or why.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from shmllm.errors import RequestError
from shmllm.models.decoder import DecoderModel
from shmllm.sleep_report import MIB, Asleep, OwnedBytes
from shmllm.worker.arena import Arena, Contents
from shmllm.worker.memory import available_memory_bytes


class Workspace(Protocol):
    """What keeps buffers between steps that any step makes again if they are gone."""

    @property
    def workspace_bytes(self) -> int:
        """Memory of the buffers."""

    def drop_workspace(self) -> None:
        """Let go of them; not during a step, and while no request holds blocks."""


class MemoryOwners:
    """
    Args:
        model: whose weights lie in the arena `weights`.
        weights: see above.
        kv_cache: holds keys and values.
        workspaces: all others.
    """

    def __init__(
        self,
        model: DecoderModel,
        weights: Arena,
        kv_cache: Arena,
        workspaces: Sequence[Workspace],
    ) -> None:
        self._model = model
        self._arenas = {Asleep.WEIGHTS: weights, Asleep.KV_CACHE: kv_cache}
        self._workspaces = workspaces

    @property
    def num_missing(self) -> int:
        """Weights that were lost and not written since."""
        return len(self._model.missing)

    def release(self, part: Asleep, keep: bool) -> None:
        """Give the pages of weights or KV cache back, and with these the workspaces."""
        if part is Asleep.WEIGHTS:
            self._model.is_asleep = True
            if not keep:
                self._model.weights_lost()
        else:
            for workspace in self._workspaces:
                workspace.drop_workspace()
        self._arenas[part].release(keep)

    def restore(self, part: Asleep) -> None:
        """Have them again, at the same addresses.

        Raises:
            RequestError: there is not enough memory; nothing changed.
        """
        arena = self._arenas[part]
        self._check_room(part, arena)
        try:
            arena.restore()
        except MemoryError as problem:
            raise RequestError(f"{' '.join(part.tags)} cannot wake up: {problem}") from problem
        if part is Asleep.WEIGHTS:
            self._model.is_asleep = False

    def tidy(self) -> None:
        """Have the C library give back what was freed: it keeps it otherwise."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def measure(self) -> OwnedBytes:
        """Bytes by owner, now."""
        weights = self._arenas[Asleep.WEIGHTS].resident_bytes
        kv_cache = self._arenas[Asleep.KV_CACHE].resident_bytes
        workspaces = sum(workspace.workspace_bytes for workspace in self._workspaces)
        known = weights + kv_cache + workspaces
        rest = max(resident_bytes() - known, 0)
        return OwnedBytes(weights, kv_cache, 0, workspaces, rest)

    def _check_room(self, part: Asleep, arena: Arena) -> None:
        """All of the weights will be written; of the cache what requests use."""
        if part is not Asleep.WEIGHTS or arena.contents is not Contents.LOST:
            return
        available = available_memory_bytes()
        if arena.num_bytes > available:
            raise RequestError(
                f"the weights cannot wake up: they need {arena.num_bytes / MIB:,.0f} MiB and "
                f"{available / MIB:,.0f} MiB of memory are free"
            )


def resident_bytes() -> int:
    """Memory that this process has in RAM. Older kernels are off by some pages a core here;
    smaps_rollup is exact everywhere, and takes 10 ms per GiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
