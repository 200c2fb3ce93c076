"""The live screen of `shmllm top`: it shows engines and handles keys.

This module owns the terminal while it runs. It must not know how engines are found and read, nor
how figures are drawn.
"""

from __future__ import annotations

import time

from rich.console import Console, RenderableType
from rich.live import Live

from shmllm.monitor.find import Identity
from shmllm.monitor.keys import Key, Keyboard
from shmllm.monitor.screen import engine_screen, list_screen
from shmllm.monitor.track import Track, Tracks

SIZE_CHECK_PERIOD_S = 0.1
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.05, 60.0


class LiveScreen:
    """Shows one engine, or a list of engines from which keys choose one.

    Args:
        console: the terminal.
        keyboard: the keyboard of that terminal.
        tracks: all engines.
        interval_s: the time between two samples.
        only: the engine to show, whose end also ends the screen; None for the list.
    """

    def __init__(
        self,
        console: Console,
        keyboard: Keyboard,
        tracks: Tracks,
        interval_s: float,
        only: Identity | None,
    ) -> None:
        self._console = console
        self._keyboard = keyboard
        self._tracks = tracks
        self._interval_s = interval_s
        self._only = only
        self._shown = only
        self._selected: Identity | None = None
        self._notice = ""

    def run(self) -> str:
        """Show the screen until a key or the end of the only engine ends it.

        Returns:
            The message about the end of that engine, or "".
        """
        with Live(console=self._console, screen=True, auto_refresh=False) as live:
            next_update = time.monotonic() + self._interval_s
            size = self._console.size
            while True:
                live.update(self._render(), refresh=True)
                # A change of the terminal's size does not end `select`, so the loop polls it. It
                # reads the keys at least once: an update may take longer than the interval.
                while True:
                    left_s = next_update - time.monotonic()
                    keys = self._keyboard.wait(min(left_s, SIZE_CHECK_PERIOD_S))
                    if keys or left_s <= 0 or size != self._console.size:
                        break
                size = self._console.size
                if Key.QUIT in keys:
                    return ""
                for key in keys:
                    self._handle(key)
                if time.monotonic() >= next_update:
                    next_update = time.monotonic() + self._interval_s
                    if end_message := self._update():
                        return end_message

    def _update(self) -> str:
        """Sample all engines. Returns a message if the only engine has ended, otherwise ""."""
        ended = {track.engine.identity: track for track in self._tracks.update()}
        for identity, track in ended.items():
            self._notice = track.end_message()
            if identity == self._only:
                return self._notice
            if identity == self._shown:
                self._shown = None
        return ""

    def _handle(self, key: Key) -> None:
        tracks = self._tracks.all
        match key:
            case Key.FASTER:
                self._interval_s = max(self._interval_s / 2, MIN_INTERVAL_S)
            case Key.SLOWER:
                self._interval_s = min(self._interval_s * 2, MAX_INTERVAL_S)
            case Key.BACK:
                self._shown = self._only
            case Key.ENTER if tracks and self._shown is None:
                self._shown = tracks[self._selected_index(tracks)].engine.identity
            case Key.UP | Key.DOWN if tracks:
                moved = self._selected_index(tracks) + (1 if key is Key.DOWN else -1)
                index = min(max(moved, 0), len(tracks) - 1)
                self._selected = tracks[index].engine.identity

    def _selected_index(self, tracks: list[Track]) -> int:
        """The index of the selected engine, which stays selected while others start and end; 0
        if it has ended."""
        found = (i for i, track in enumerate(tracks) if track.engine.identity == self._selected)
        return next(found, 0)

    def _render(self) -> RenderableType:
        tracks = self._tracks.all
        shown = next((t for t in tracks if t.engine.identity == self._shown), None)
        if shown is not None:
            keys = "q quit   + - faster, slower" + ("" if self._only else "   b back to the list")
            return engine_screen(shown.figures, shown.history, shown.engine.title, keys)
        keys = "q quit   ↑ ↓ choose   enter look at one   + - faster, slower"
        footer = f"{self._notice}\n{keys}" if self._notice else keys
        index = self._selected_index(tracks)
        return list_screen([_line(track) for track in tracks], index, footer)


def _line(track: Track) -> tuple[str, dict[str, object]]:
    return track.engine.title, track.figures
