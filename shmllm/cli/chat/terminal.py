"""Reads the lines of a chat from a terminal: editing, history, messages of several lines.

This module must not know what a line means. It loads prompt_toolkit, so import it only where a user
has a terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth, Output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.utils import is_dumb_terminal

from shmllm.cli.interrupts import Interrupted

PROMPT = "> "
CONTINUATION = "  "
HISTORY_FILE = "chat_history"


class _PrivateHistory(FileHistory):
    """What was entered, in a file that only its user may read. A chat goes on without it."""

    def load_history_strings(self) -> list[str]:
        try:
            return list(super().load_history_strings())
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            path = Path(os.fsdecode(self.filename))
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
            super().store_string(string)


def history() -> History:
    """The history of all chats of this user; one that lasts for this chat if there is no home."""
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:
        return InMemoryHistory()
    return _PrivateHistory(str(Path(state) / "shmllm" / HISTORY_FILE))


def terminal_lines(hint: Callable[[], object]) -> Generator[str, None, None]:
    """Yield what the user enters, until Ctrl-D in an empty line or the end of the terminal.

    Ctrl-C discards what is being entered.

    Args:
        hint: called at a Ctrl-C with nothing to discard.
    """
    session: PromptSession[str] = PromptSession(
        PROMPT,
        multiline=True,
        prompt_continuation=CONTINUATION,
        key_bindings=_keys(),
        history=history(),
        enable_suspend=True,
        output=None if is_dumb_terminal() else _output(),
    )
    while True:
        try:
            entered = session.prompt(handle_sigint=False)  # StopKey handles it
        except Interrupted:
            raise
        except KeyboardInterrupt:
            if not session.default_buffer.text:
                hint()
            continue
        except EOFError:
            return
        yield _clean(entered)


def _keys() -> KeyBindings:
    """Enter enters the message, however many lines it has; Alt-Enter begins another line."""
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline()

    return keys


def _output() -> Output:
    """The terminal on stdout. It is not asked for the place of its cursor: where the answer to that
    question comes late, it would become part of what the user enters."""
    output = Vt100_Output.from_pty(sys.stdout, default_color_depth=ColorDepth.from_env())
    output.enable_cpr = False
    return output


def _clean(text: str) -> str:
    """The text without surrogates: prompt_toolkit reads bytes that are not UTF-8 as such."""
    return text.encode(errors="replace").decode()
