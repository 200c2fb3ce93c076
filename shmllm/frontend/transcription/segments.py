"""Divides the tokens of a window into segments by their timestamps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shmllm.frontend.transcription.vocabulary import Vocabulary
from shmllm.outputs.transcription import Segment


def segments_of(
    tokens: Sequence[int],
    vocabulary: Vocabulary,
    decode: Callable[[Sequence[int]], str],
    start: float,
    duration: float,
    step: float,
) -> list[Segment]:
    """The segments of a window.

    Args:
        tokens: what the model wrote.
        vocabulary: the model's.
        decode: returns the text of tokens.
        start: where the window begins, in seconds.
        duration: its length. Text before the first timestamp begins with the window, and text
            behind the last one ends with it.
        step: the seconds from one timestamp to the next.
    """
    found: list[Segment] = []
    begin, text = 0.0, list[int]()

    def close(end: float) -> None:
        said = decode(text).strip()
        if said:
            end = min(max(end, begin), duration)
            found.append(Segment(round(start + begin, 3), round(start + end, 3), said))
        text.clear()

    for token in tokens:
        if token >= vocabulary.first_time:
            time = (token - vocabulary.first_time) * step
            close(time)
            begin = min(time, duration)
        elif token != vocabulary.end:
            text.append(token)
    close(duration)
    return found
