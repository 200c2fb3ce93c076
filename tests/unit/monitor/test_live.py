"""The live screen handles keys however long an update takes."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from shmllm.monitor.keys import Key
from shmllm.monitor.live import LiveScreen


def test_a_key_is_read_even_if_each_update_takes_longer_than_the_interval() -> None:
    updates: list[int] = []

    def update() -> list[Any]:
        updates.append(len(updates))
        assert len(updates) < 10, "the key was never read"
        return []

    tracks: Any = SimpleNamespace(all=[], update=update)
    keyboard: Any = SimpleNamespace(wait=lambda timeout_s: [Key.QUIT])
    console = Console(file=io.StringIO(), force_terminal=True)
    assert LiveScreen(console, keyboard, tracks, 0.0, None).run() == ""
