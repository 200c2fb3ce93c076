"""The weights of a draft model come back after a sleep, or take no memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shmllm.errors import EngineStartError
from shmllm.worker.arena import Contents
from shmllm.worker.cpu.arena import HostArena
from shmllm.worker.draft_loading import ReloadedArena


class FakeLoaded:
    """A model whose weights are one tensor, and can be read while `is_readable`."""

    def __init__(self) -> None:
        self.weights = HostArena(4096, "weights")
        self.weight = self.weights.allocate((8,), torch.float32)
        self.is_readable = True

    def reload(self, directory: str | None) -> str:
        self.weight.fill_(7)
        if not self.is_readable:
            raise EngineStartError("the file is cut off")
        return "the weights"


def test_lost_weights_are_read_again() -> None:
    loaded: Any = FakeLoaded()
    arena = ReloadedArena(loaded)
    arena.release()
    arena.restore()
    assert loaded.weight.tolist() == [7.0] * 8


def test_weights_that_cannot_be_read_take_no_memory() -> None:
    loaded: Any = FakeLoaded()
    arena = ReloadedArena(loaded)
    arena.release()
    loaded.is_readable = False
    with pytest.raises(MemoryError, match="the draft model: the file is cut off"):
        arena.restore()
    assert (arena.contents, arena.resident_bytes) == (Contents.LOST, 0)
    loaded.is_readable = True
    arena.restore()
    assert loaded.weight.tolist() == [7.0] * 8
