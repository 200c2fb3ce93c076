"""The method of `LLM` that makes transcripts. This module owns what users see of that."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmllm.errors import RequestError
from shmllm.frontend.front_end import FrontEnd
from shmllm.frontend.progress import PartProgress, Shown
from shmllm.frontend.prompt_items import PromptItems
from shmllm.frontend.prompts import Prompt
from shmllm.frontend.transcription.transcriber import OnDone, Part, Transcriber
from shmllm.frontend.transcription.vocabulary import Vocabulary
from shmllm.frontend.transcription.windows import divide
from shmllm.outputs.request import RequestOutput
from shmllm.outputs.transcription import Segment, Transcript

if TYPE_CHECKING:
    from shmllm.frontend.audio.sound import Sound as OpenedSound

_MODE = "raw_logprobs"
TASKS = ("transcribe", "translate")
Sound = str | os.PathLike[str] | bytes | tuple[Any, int]


class TranscriptionCalls:
    """
    Attributes:
        front_end: the parts that do the work.
        generate: completes prompts.
    """

    front_end: FrontEnd
    generate: Any

    def transcribe(
        self,
        sounds: Sound | Sequence[Sound],
        *,
        language: str | None = None,
        task: str = "transcribe",
        timestamps: bool = True,
        use_tqdm: Shown = True,
    ) -> list[Transcript]:
        """Write down what is said in sounds of any length, with a model like Whisper.

        Long sounds are cut where they are quiet, and all parts of all sounds run together. A part
        is transcribed again, at higher temperatures, if its text repeats itself or is unlikely, and
        has no text if nobody speaks in it, by the rules of Whisper's authors.

        Args:
            sounds: one or several: paths of files, their bytes, or (samples, rate).
            language: the code of the language that is spoken, such as "de"; None finds out that of
                each sound by its first half minute.
            task: "transcribe", or "translate" into English.
            timestamps: whether the model divides the text into segments with times; otherwise each
                part of up to half a minute is one.
            use_tqdm: show a progress bar on stderr, or by a function such as `tqdm`.

        Returns:
            One Transcript for each sound, in their order.

        Raises:
            RequestError: the model writes no transcripts, an argument is wrong, or a sound cannot
                be read; nothing was queued.
        """
        info = self.front_end.info
        if not info.items.num_encoded:
            raise RequestError(
                "the model writes no transcripts: pass one like Whisper, such as "
                "model='openai/whisper-small'"
            )
        if info.logprobs_mode != _MODE:
            raise RequestError(
                f"transcripts are judged by log-probabilities of the model: start the engine with "
                f"logprobs_mode={_MODE!r} instead of {info.logprobs_mode!r}"
            )
        tokenizer = self.front_end.tokenizer
        vocabulary = Vocabulary.of(tokenizer.added_tokens, Path(info.model_directory))
        _check(vocabulary, language, task)
        items, rate = self.front_end.items, 0
        wholes: list[list[Part]] = []
        lengths: list[float] = []
        for number, sound in enumerate(_as_list(sounds)):
            opened = open_sound(items, _name(number, sound), sound)
            rate, most_seconds = opened.rate, items.most_seconds
            windows = divide(opened.samples, rate, most_seconds)
            wholes.append([Part(window, language or "") for window in windows])
            lengths.append(opened.seconds)

        def run(prompts: list[Prompt], params: Any, on_done: OnDone) -> list[RequestOutput]:
            found: list[RequestOutput] = self.generate(
                prompts, params, use_tqdm=lambda **_: _Counter(on_done)
            )
            return found

        every = [part for parts in wholes for part in parts]
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        step = items.most_seconds / info.items.most_embeds
        with _shown(len(every), use_tqdm) as on_done:
            transcriber = Transcriber(vocabulary, decode, run, rate, step, on_done)
            if language is None and vocabulary.languages:
                transcriber.find_languages([parts[0] for parts in wholes])
                for first, *others in wholes:
                    for part in others:
                        part.language, part.error = first.language, first.error
            transcriber.transcribe(every, task, timestamps)
        return [_joined(parts, length) for parts, length in zip(wholes, lengths, strict=True)]


@dataclass(frozen=True)
class _Counter:
    """A bar, as `Shown` describes it, that shows nothing and counts the requests that ended."""

    update: OnDone

    def close(self) -> None:
        """Do nothing."""


@contextmanager
def _shown(total: int, shown: Shown) -> Iterator[OnDone]:
    """Show a bar of so many parts; yields what adds to it."""
    if callable(shown):
        bar = shown(total=total, desc="transcribing")
        try:
            yield bar.update
        finally:
            bar.close()
        return
    with PartProgress(total, bool(shown and total)) as progress:
        yield progress.add


def _joined(parts: Sequence[Part], duration: float) -> Transcript:
    segments: list[Segment] = [segment for part in parts for segment in part.segments]
    error = next((part.error for part in parts if part.error is not None), None)
    return Transcript(parts[0].language, round(duration, 3), segments, error)


def _as_list(sounds: Sound | Sequence[Sound]) -> Sequence[Sound]:
    if isinstance(sounds, str | bytes | os.PathLike) or _is_pair(sounds):
        return [sounds]  # type: ignore[list-item]
    if not isinstance(sounds, Iterable) or hasattr(sounds, "shape"):
        raise RequestError(
            "sounds must be one or several of: a path, encoded bytes, (samples, rate); not "
            f"{type(sounds).__name__}",
            parameter="sounds",
        )
    return sounds  # type: ignore[return-value]


def _is_pair(sounds: object) -> bool:
    """Whether it is (samples, rate), and not two sounds."""
    return isinstance(sounds, tuple) and len(sounds) == 2 and isinstance(sounds[1], Real)


def _name(number: int, sound: Sound) -> str:
    """What errors call a sound."""
    if isinstance(sound, str | os.PathLike):
        return f"sound {number} ({os.fspath(sound)})"
    return f"sound {number}"


def open_sound(items: PromptItems, name: str, sound: Sound) -> OpenedSound:
    """Decode a sound, with the sampling rate of the model.

    Args:
        items: the front end's.
        name: what errors call it.
        sound: a path, encoded bytes, or (samples, rate).

    Raises:
        RequestError: it cannot be read, or the model takes no sounds.
    """
    content: Any = sound
    if isinstance(sound, str | os.PathLike):
        from shmllm.frontend.items.files import item_of_path

        content = item_of_path("audio", name, sound)
    opened: OpenedSound = items.open("audio", name, content)
    return opened


def _check(vocabulary: Vocabulary, language: str | None, task: str) -> None:
    """Raises RequestError if the model does not know a language or a task."""
    if task not in TASKS:
        raise RequestError(
            f"task must be one of {', '.join(TASKS)}, not {task!r}", parameter="task"
        )
    if task not in vocabulary.tasks and task != TASKS[0]:
        raise RequestError("the model knows one language and translates nothing", parameter="task")
    if language is None:
        return
    if not vocabulary.languages and language != "en":
        raise RequestError(f"the model knows English alone, not {language!r}", parameter="language")
    if vocabulary.languages and language not in vocabulary.languages:
        known = " ".join(sorted(vocabulary.languages))
        raise RequestError(
            f"the model knows no language {language!r}; its languages are {known}",
            parameter="language",
        )
