"""Transcript: the result of `LLM.transcribe`."""

from __future__ import annotations

from dataclasses import dataclass, field


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
        """The texts of the segments, with a blank between them."""
        return " ".join(segment.text for segment in self.segments)
