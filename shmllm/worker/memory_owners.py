"""The large allocations of a runner: how much memory each takes, and which can be given back.

This module owns the list of these allocations; all other memory of the process counts as "rest".
It must not know when the engine sleeps, why, or on which device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from torch import Tensor

from shmllm.errors import RequestError
from shmllm.models.model import Model
from shmllm.outputs.sleep_report import MIB, OwnedBytes, SleepState
from shmllm.worker.arena import Arena, Contents, Releasable
from shmllm.worker.memory import MemoryPool


class Workspace(Protocol):
    """An object that keeps buffers between steps, and allocates them again if it dropped them."""

    @property
    def workspace_bytes(self) -> int:
        """The memory of the buffers."""

    def drop_workspace(self) -> None:
        """Free the buffers. Called between steps, and only while no request holds blocks."""


class OwnedMemory(Protocol):
    """The memory of a runner, in all of its processes; see `MemoryOwners`."""

    @property
    def num_missing(self) -> int: ...

    def release(self, part: SleepState, keep: bool) -> None: ...

    def restore(self, part: SleepState) -> None: ...

    def tidy(self) -> None: ...

    def measure(self) -> OwnedBytes: ...


class MemoryOwners:
    """
    Args:
        model: the model.
        weights: the arena of the model's weights.
        kv_cache: the arena of the KV cache.
        workspaces: buffers that are freed with the KV cache, and allocated again by later steps.
        pool: the memory that the arenas were allocated in.
        buffers: arenas of buffers that only a step uses, and whose addresses must not change:
            they are released and restored with the KV cache.
        graph_bytes: the memory of captured CUDA graphs, which is never given back.
        further: the arenas of weights that are not the model's, and restore their contents.
    """

    def __init__(
        self,
        model: Model,
        weights: Arena,
        kv_cache: Arena,
        workspaces: Sequence[Workspace],
        pool: MemoryPool,
        buffers: Sequence[Arena] = (),
        graph_bytes: int = 0,
        further: Sequence[Releasable] = (),
    ) -> None:
        self._model = model
        self._arenas: dict[SleepState, list[Releasable]] = {
            SleepState.WEIGHTS: [weights, *further],
            SleepState.KV_CACHE: [kv_cache, *buffers],
        }
        self._workspaces = workspaces
        self._pool = pool
        self._graph_bytes = graph_bytes
        self._saved_buffers: dict[str, Tensor] = {}

    @property
    def num_missing(self) -> int:
        """The number of weights that were lost and have not been written since."""
        return len(self._model.missing)

    def has_lost(self, part: SleepState) -> bool:
        """Return whether `restore` does not bring the contents of a part back."""
        return any(arena.contents is Contents.LOST for arena in self._arenas[part])

    def release(self, part: SleepState, keep: bool) -> None:
        """Give back the memory of the weights, or that of the KV cache and the workspaces.

        Args:
            part: WEIGHTS or KV_CACHE.
            keep: whether `restore` brings the contents back.

        Raises:
            RequestError: there is no memory to keep the contents in; nothing changed.
        """
        if part is SleepState.WEIGHTS and not self._model.is_asleep:
            self._saved_buffers = self._model.save_buffers()
        awake = [each for each in self._arenas[part] if each.contents is Contents.PRESENT]
        try:
            for arena in self._arenas[part]:
                arena.release(keep)
        except MemoryError as problem:
            for arena in awake:
                arena.restore()
            raise RequestError(f"{' '.join(part.tags)} cannot be kept: {problem}") from problem
        if part is SleepState.WEIGHTS:
            self._model.is_asleep = True
            if not keep:
                self._model.weights_lost()
        else:
            for workspace in self._workspaces:
                workspace.drop_workspace()

    def restore(self, part: SleepState) -> None:
        """Take the memory of a part again, at the same addresses.

        Raises:
            RequestError: there is not enough memory; nothing changed.
        """
        asleep = [each for each in self._arenas[part] if each.contents is not Contents.PRESENT]
        self._check_free_memory(part, asleep)
        kept = [each for each in asleep if each.contents is Contents.KEPT]
        restored: list[Releasable] = []
        try:
            for arena in asleep:
                arena.restore()
                restored.append(arena)
        except MemoryError as problem:
            with suppress(MemoryError):  # what cannot be kept again stays restored
                for arena in restored:
                    arena.release(keep=arena in kept)
            raise RequestError(f"{' '.join(part.tags)} cannot wake up: {problem}") from problem
        if part is SleepState.WEIGHTS:
            self._model.is_asleep = False
            if self._model.missing:
                self._model.restore_buffers(self._saved_buffers)

    def tidy(self) -> None:
        """Give freed memory that allocators keep back to the system."""
        self._pool.trim()

    def measure(self) -> OwnedBytes:
        """Return the bytes that each owner takes now."""
        cache, *buffers = self._arenas[SleepState.KV_CACHE]
        weight_bytes = sum(arena.resident_bytes for arena in self._arenas[SleepState.WEIGHTS])
        workspaces = sum(arena.resident_bytes for arena in buffers)
        workspaces += sum(workspace.workspace_bytes for workspace in self._workspaces)
        held = weight_bytes, cache.resident_bytes, self._graph_bytes, workspaces
        return OwnedBytes(*held, rest=max(self._pool.used_bytes() - sum(held), 0))

    def _check_free_memory(self, part: SleepState, asleep: Sequence[Releasable]) -> None:
        """Raise RequestError if too little memory is free to restore these arenas. In a lazy pool
        only lost weights count: they are written at once, and the KV cache as requests use it."""
        if self._pool.is_lazy:
            lost = [arena for arena in asleep if arena.contents is Contents.LOST]
            asleep = lost if part is SleepState.WEIGHTS else []
        needed = sum(arena.num_bytes for arena in asleep)
        available = self._pool.free_bytes()
        if needed > available:
            raise RequestError(
                f"{' '.join(part.tags)} cannot wake up: they need {needed / MIB:,.0f} MiB and "
                f"{available / MIB:,.0f} MiB of {self._pool.kind} are free"
            )
