"""Who of a runner holds how much memory, and what of it can be given back.

Owns the list of owners: whatever a runner keeps that is large is in here or counts as rest.
Must not know when the engine sleeps, or why, nor whether the memory is a GPU's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shmllm.errors import RequestError
from shmllm.models.decoder import DecoderModel
from shmllm.outputs.sleep_report import MIB, OwnedBytes, SleepState
from shmllm.worker.arena import Arena, Contents
from shmllm.worker.memory import MemoryPool


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
        workspaces: others that can be dropped.
        pool: whose memory it is.
        buffers: arenas of what only a step uses, at addresses that must stay: they come and go
            with the KV cache.
        graph_bytes: what captured graphs hold; they are kept.
    """

    def __init__(
        self,
        model: DecoderModel,
        weights: Arena,
        kv_cache: Arena,
        workspaces: Sequence[Workspace],
        pool: MemoryPool,
        buffers: Sequence[Arena] = (),
        graph_bytes: int = 0,
    ) -> None:
        self._model = model
        self._arenas = {SleepState.WEIGHTS: [weights], SleepState.KV_CACHE: [kv_cache, *buffers]}
        self._workspaces = workspaces
        self._pool = pool
        self._graph_bytes = graph_bytes

    @property
    def num_missing(self) -> int:
        """Weights that were lost and not written since."""
        return len(self._model.missing)

    def release(self, part: SleepState, keep: bool) -> None:
        """Give the pages of weights or KV cache back, and with these the workspaces.

        Raises:
            RequestError: there is no room to keep the contents in; nothing changed.
        """
        try:
            for arena in self._arenas[part]:
                arena.release(keep)
        except MemoryError as problem:
            raise RequestError(f"{' '.join(part.tags)} cannot be kept: {problem}") from problem
        if part is SleepState.WEIGHTS:
            self._model.is_asleep = True
            if not keep:
                self._model.weights_lost()
        else:
            for workspace in self._workspaces:
                workspace.drop_workspace()

    def restore(self, part: SleepState) -> None:
        """Have them again, at the same addresses.

        Raises:
            RequestError: there is not enough memory; nothing changed.
        """
        asleep = [each for each in self._arenas[part] if each.contents is not Contents.HERE]
        self._check_room(part, asleep)
        restored: list[Arena] = []
        try:
            for arena in asleep:
                arena.restore()
                restored.append(arena)
        except MemoryError as problem:
            for arena in restored:
                arena.release()
            raise RequestError(f"{' '.join(part.tags)} cannot wake up: {problem}") from problem
        if part is SleepState.WEIGHTS:
            self._model.is_asleep = False

    def tidy(self) -> None:
        """Have what was freed given back: allocators keep it otherwise."""
        self._pool.trim()

    def measure(self) -> OwnedBytes:
        """Bytes by owner, now."""
        weights, (cache, *buffers) = (
            self._arenas[SleepState.WEIGHTS][0],
            self._arenas[SleepState.KV_CACHE],
        )
        workspaces = sum(arena.resident_bytes for arena in buffers)
        workspaces += sum(workspace.workspace_bytes for workspace in self._workspaces)
        held = weights.resident_bytes, cache.resident_bytes, self._graph_bytes, workspaces
        return OwnedBytes(*held, rest=max(self._pool.used_bytes() - sum(held), 0))

    def _check_room(self, part: SleepState, asleep: Sequence[Arena]) -> None:
        """Where memory is taken when it is written, that is what requests use of the cache, and
        all of the weights if they were lost."""
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
