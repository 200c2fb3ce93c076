"""Transcribes the windows of sounds in rounds: those whose transcripts are doubtful once more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shmllm.frontend.prompts import Prompt
from shmllm.frontend.transcription import quality
from shmllm.frontend.transcription.windows import Window
from shmllm.outputs.request import CompletionOutput, RequestOutput
from shmllm.outputs.transcription import Segment, joined_text
from shmllm.params.sampling import SamplingParams

OnDone = Callable[[int], object]
Generate = Callable[[list[Prompt], list[SamplingParams], OnDone], list[RequestOutput]]
ABORTED = "the engine aborted a request"
AT_ONCE = 256
"""How many parts are prepared at a time: the features of one take about a megabyte."""


@dataclass(slots=True)
class Part:
    """A window of a sound, and what becomes of it.

    Attributes:
        window: the window.
        language: the code of the sound's language.
        segments: what is said in it.
        logprob: the mean log-probability of the text.
        error: why there is no transcript; None: there is, or it is not here yet.
    """

    window: Window
    language: str = ""
    segments: list[Segment] = field(default_factory=list)
    logprob: float = 0.0
    error: str | None = None


class Rounds(ABC):
    """
    Args:
        generate: completes prompts, and calls a function with the number of those that ended.
        on_done: called with the number of parts that have transcripts now, and with a negative one
            for those that are transcribed again.
    """

    def __init__(self, generate: Generate, on_done: OnDone) -> None:
        self._generate = generate
        self._on_done = on_done

    def run(self, parts: Sequence[Part]) -> None:
        """Set the segments of parts."""
        for first in range(0, len(parts), AT_ONCE):
            some = parts[first : first + AT_ONCE]
            left = [part for part in some if part.error is None]
            self._on_done(len(some) - len(left))
            for temperature in quality.TEMPERATURES:
                left = self._round(left, temperature)
                self._on_done(-len(left))

    @abstractmethod
    def _prompts(self, parts: Sequence[Part]) -> list[Prompt]:
        """What the model completes by transcripts."""

    @abstractmethod
    def _params(self, part: Part, temperature: float) -> SamplingParams:
        """How; log-probabilities are needed."""

    @abstractmethod
    def _read(self, part: Part, output: CompletionOutput) -> None:
        """Set the segments of a part and the log-probability of its text."""

    def _without_silent(self, parts: list[Part]) -> list[Part]:
        """The parts in which somebody speaks. The others lose their text."""
        return parts

    def _round(self, parts: list[Part], temperature: float) -> list[Part]:
        """Transcribe parts at a temperature. Returns those that are to be transcribed again."""
        if not parts:
            return []
        params = [self._params(part, temperature) for part in parts]
        outputs = self._generate(self._prompts(parts), params, self._on_done)
        is_last = temperature == quality.TEMPERATURES[-1]
        doubtful = [
            part
            for part, output in zip(parts, outputs, strict=True)
            if not self._take(part, output, is_last)
        ]
        is_first = temperature == quality.TEMPERATURES[0]
        return self._without_silent(doubtful) if is_first else doubtful

    def _take(self, part: Part, request: RequestOutput, is_last: bool) -> bool:
        """Read an output. Returns whether its transcript is good enough."""
        (output,) = request.outputs
        if output.finish_reason in ("abort", "error"):
            part.error = request.error or ABORTED
            return True
        self._read(part, output)
        return is_last or quality.is_good(part.logprob, joined_text(part.segments))
