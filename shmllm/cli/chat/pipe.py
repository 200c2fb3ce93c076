"""Reads the lines of a chat where the user has no terminal to edit them in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

PROMPT = "> "


def plain_lines(source: IO[bytes], prompts: IO[str] | None) -> Iterator[str]:
    """Yield each line of a pipe or file, without its end; bytes that are not UTF-8 become U+FFFD.

    Args:
        source: where the bytes come from.
        prompts: where a prompt is written before each line; None for nowhere.
    """
    while True:
        if prompts is not None:
            prompts.write(PROMPT)
            prompts.flush()
        line = source.readline()
        if not line:
            return
        yield line.decode("utf-8-sig", errors="replace").rstrip("\r\n")
