"""Transcript: the result of `LLM.transcribe`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_WITHOUT_BLANKS = re.compile(
    "[\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u2e80-\u312f\u31a0-\u31ff\u3400-\u9fff"
    "\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffef\U0001b000-\U0001b16f\U00020000-\U0003ffff]"
)
"""Characters of scripts without blanks between words: Thai, Lao, Tibetan, Burmese, Khmer, kana and
Chinese characters, with their punctuation. Korean has blanks."""


@dataclass(frozen=True)
class Segment:
    """A part of a transcript.

    Attributes:
        start, end: in seconds from the beginning of the sound.
        text: what is said in it, without blanks around it.
    """

    start: float
    end: float
    text: str


@dataclass(frozen=True)
class Transcript:
    """What is said in a sound.

    Attributes:
        language: the code of its language, such as "en"; empty if the model knows one alone.
        duration: its length in seconds.
        segments: its parts, in order; stretches in which nobody speaks have none.
        error: why there is no whole transcript: the engine aborted a request; None: there is.
    """

    language: str
    duration: float
    segments: list[Segment] = field(default_factory=list)
    error: str | None = None

    @property
    def text(self) -> str:
        """The texts of the segments, with a blank between them unless both are of scripts without
        blanks, such as Chinese and Japanese."""
        return joined_text(self.segments)


def joined_text(segments: Sequence[Segment]) -> str:
    """See `Transcript.text`."""
    text = ""
    for segment in segments:
        needs_blank = not (_WITHOUT_BLANKS.match(text[-1:]) and _WITHOUT_BLANKS.match(segment.text))
        text += " " + segment.text if text and needs_blank else segment.text
    return text
