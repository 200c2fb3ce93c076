"""The live screen: what is shown when, and what keys do.

Owns the terminal while it runs. Must not know how engines are found or read, nor how their
figures look.
"""

from __future__ import annotations

import time

from rich.console import Console, RenderableType
from rich.live import Live

from shmllm.monitor.find import Identity
from shmllm.monitor.keys import Key, Keyboard
from shmllm.monitor.screen import engine_screen, list_screen
from shmllm.monitor.track import Track, Tracks

LOOK_AT_TERMINAL_S = 0.1
SHORTEST_S, LONGEST_S = 0.05, 60.0


class LiveScreen:
    """
    Args:
        console: a terminal.
        keyboard: of that terminal.
        tracks: all engines.
        interval_s: between two looks at them.
        only: the one engine to show; its end ends the screen. None: a list to choose from.
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
        """Show until a key ends it. Returns what is left to say, or ""."""
        with Live(console=self._console, screen=True, auto_refresh=False) as live:
            next_look = time.monotonic() + self._interval_s
            size = self._console.size
            while True:
                live.update(self._render(), refresh=True)
                keys: list[Key] = []
                # A terminal that changes its size says so to nobody who waits in select.
                while not keys and size == self._console.size:
                    left_s = next_look - time.monotonic()
                    if left_s <= 0:
                        break
                    keys = self._keyboard.wait(min(left_s, LOOK_AT_TERMINAL_S))
                size = self._console.size
                if Key.QUIT in keys:
                    return ""
                for key in keys:
                    self._take(key)
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + self._interval_s
                    if farewell := self._look():
                        return farewell

    def _look(self) -> str:
        """Returns the last line if there is nothing more to show."""
        ended = {track.engine.identity: track for track in self._tracks.update()}
        for identity, track in ended.items():
            self._notice = track.farewell()
            if identity == self._only:
                return self._notice
            if identity == self._shown:
                self._shown = None
        return ""

    def _take(self, key: Key) -> None:
        tracks = self._tracks.all
        match key:
            case Key.FASTER:
                self._interval_s = max(self._interval_s / 2, SHORTEST_S)
            case Key.SLOWER:
                self._interval_s = min(self._interval_s * 2, LONGEST_S)
            case Key.BACK:
                self._shown = self._only
            case Key.ENTER if tracks and self._shown is None:
                self._shown = tracks[self._place(tracks)].engine.identity
            case Key.UP | Key.DOWN if tracks:
                moved = self._place(tracks) + (1 if key is Key.DOWN else -1)
                place = min(max(moved, 0), len(tracks) - 1)
                self._selected = tracks[place].engine.identity

    def _place(self, tracks: list[Track]) -> int:
        """Of the marked engine, which stays marked when others come and go; 0 if it went."""
        places = (i for i, track in enumerate(tracks) if track.engine.identity == self._selected)
        return next(places, 0)

    def _render(self) -> RenderableType:
        tracks = self._tracks.all
        shown = next((t for t in tracks if t.engine.identity == self._shown), None)
        if shown is not None:
            keys = "q quit   + - faster, slower" + ("" if self._only else "   b back to the list")
            return engine_screen(shown.figures, shown.history, shown.engine.title, keys)
        keys = "q quit   ↑ ↓ choose   enter look at one   + - faster, slower"
        footer = f"{self._notice}\n{keys}" if self._notice else keys
        return list_screen([_line(track) for track in tracks], self._place(tracks), footer)


def _line(track: Track) -> tuple[str, dict[str, object]]:
    return track.engine.title, track.figures
