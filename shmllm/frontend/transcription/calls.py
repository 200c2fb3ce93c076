"""The method of `LLM` that makes transcripts. This module owns what users see of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from shmllm.config.info import EngineInfo
from shmllm.errors import RequestError
from shmllm.frontend.front_end import FrontEnd
from shmllm.frontend.progress import Shown, shown_count
from shmllm.frontend.prompts import Prompt
from shmllm.frontend.transcription.alignment import AlignmentCalls
from shmllm.frontend.transcription.asker import MOST_SECONDS, Asker
from shmllm.frontend.transcription.questions import QUESTIONS, Question
from shmllm.frontend.transcription.rounds import OnDone, Part
from shmllm.frontend.transcription.sounds import Sound, as_list, open_sound, sound_name
from shmllm.frontend.transcription.transcriber import Transcriber
from shmllm.frontend.transcription.vocabulary import (
    Vocabulary,
    ids_of_tokens,
    suppressed_tokens,
)
from shmllm.frontend.transcription.windows import divide
from shmllm.outputs.request import RequestOutput
from shmllm.outputs.transcription import Segment, Transcript

_MODE = "raw_logprobs"
TASKS = ("transcribe", "translate")


class TranscriptionCalls(AlignmentCalls):
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
        """Write down what is said in sounds of any length, with a model like Whisper, or one that
        is asked for transcripts, such as Qwen3-ASR.

        Long sounds are cut where they are quiet, and all parts of all sounds run together. A part
        is transcribed again, at higher temperatures, if its text repeats itself or is unlikely, and
        has no text if nobody speaks in it, by the rules of Whisper's authors.

        Args:
            sounds: one or several: paths of files, their bytes, or (samples, rate).
            language: the code of the language that is spoken, such as "de"; None finds out that of
                each sound, by its first half minute; "" if it says nothing of that.
            task: "transcribe", or "translate" into English.
            timestamps: whether a model like Whisper divides the text into segments with times;
                otherwise each part of up to half a minute is one.
            use_tqdm: show a progress bar on stderr, or by a function such as `tqdm`.

        Returns:
            One Transcript for each sound, in their order.

        Raises:
            RequestError: the model writes no transcripts, an argument is wrong, or a sound cannot
                be read; nothing was queued.
        """
        info, tokenizer = self.front_end.info, self.front_end.tokenizer
        question = _question_of(info)
        if task not in TASKS:
            raise RequestError(
                f"task must be one of {', '.join(TASKS)}, not {task!r}", parameter="task"
            )
        most_seconds = self.front_end.items.most_seconds
        write: Callable[[list[_Sound], OnDone], None]
        if question is None:
            vocabulary = Vocabulary.of(tokenizer.added_tokens, Path(info.model_directory))
            _check(vocabulary, language, task)
            write = partial(self._write, vocabulary, language, task, timestamps)
        else:
            question.check(language, task)
            write = partial(self._ask, question, language, task)
            most_seconds = min(most_seconds, MOST_SECONDS)
        opened = self._opened(sounds, language, most_seconds)
        total = sum(len(each.parts) for each in opened)
        with shown_count(total, use_tqdm, label="transcribing", unit="parts") as on_done:
            write(opened, on_done)
        return [_joined(each) for each in opened]

    def _opened(
        self, sounds: Sound | Sequence[Sound], language: str | None, most_seconds: int
    ) -> list[_Sound]:
        """Decode sounds, and divide them into parts."""
        found = []
        for number, sound in enumerate(as_list(sounds)):
            opened = open_sound(self.front_end.items, sound_name(number, sound), sound)
            windows = divide(opened.samples, opened.rate, most_seconds)
            parts = [Part(window, language or "") for window in windows]
            found.append(_Sound(parts, opened.seconds, opened.rate))
        return found

    def _write(
        self,
        vocabulary: Vocabulary,
        language: str | None,
        task: str,
        timestamps: bool,
        sounds: list[_Sound],
        on_done: OnDone,
    ) -> None:
        """Transcribe sounds by the tokens of a model like Whisper."""
        if not sounds:
            return
        items = self.front_end.items
        decode = partial(self.front_end.tokenizer.decode, skip_special_tokens=True)
        step = items.most_seconds / self.front_end.info.items.most_embeds
        transcriber = Transcriber(
            vocabulary, decode, self._completed, sounds[0].rate, step, on_done
        )
        if language is None and vocabulary.languages:
            transcriber.find_languages([sound.parts[0] for sound in sounds])
            for sound in sounds:
                first, *others = sound.parts
                for part in others:
                    part.language, part.error = first.language, first.error
        transcriber.transcribe(_all_parts(sounds), task, timestamps)

    def _ask(
        self,
        question: Question,
        language: str | None,
        task: str,
        sounds: list[_Sound],
        on_done: OnDone,
    ) -> None:
        """Transcribe sounds by messages, or by what a decoder begins with."""
        if not sounds:
            return
        render, tokenizer = self.front_end.chat_prompt, self.front_end.tokenizer
        encode: Callable[[str], list[int]] = partial(tokenizer.encode, add_special_tokens=False)
        if not question.is_message:
            encode = partial(ids_of_tokens, tokenizer)
        rate = sounds[0].rate
        suppress = suppressed_tokens(Path(self.front_end.info.model_directory))
        asker = Asker(
            question, language, render, encode, self._completed, rate, on_done, task, suppress
        )
        asker.run(_all_parts(sounds))

    def _completed(self, prompts: list[Prompt], params: Any, done: OnDone) -> list[RequestOutput]:
        found: list[RequestOutput] = self.generate(
            prompts, params, use_tqdm=lambda **_: _Counter(done)
        )
        return found


class _Sound(NamedTuple):
    """A sound, which is divided.

    Attributes:
        parts: its parts, in order.
        seconds: its length.
        rate: samples in a second.
    """

    parts: list[Part]
    seconds: float
    rate: int


def _all_parts(sounds: list[_Sound]) -> list[Part]:
    return [part for sound in sounds for part in sound.parts]


def _question_of(info: EngineInfo) -> Question | None:
    """How a model is asked for transcripts; None: it is one like Whisper.

    Raises:
        RequestError: it writes none, or not so that they can be judged.
    """
    hears = "audio" in info.items.modalities
    question = QUESTIONS.get(info.model_type) if hears else None
    if not (hears and info.items.num_encoded) and question is None:
        raise RequestError(
            "the model writes no transcripts: pass one like Whisper, such as "
            "model='openai/whisper-small'"
        )
    if info.logprobs_mode != _MODE:
        raise RequestError(
            f"transcripts are judged by log-probabilities of the model: start the engine with "
            f"logprobs_mode={_MODE!r} instead of {info.logprobs_mode!r}"
        )
    return question


@dataclass(frozen=True)
class _Counter:
    """A bar, as `Shown` describes it, that shows nothing and counts the requests that ended."""

    update: OnDone

    def close(self) -> None:
        """Do nothing."""


def _joined(sound: _Sound) -> Transcript:
    parts = sound.parts
    segments: list[Segment] = [segment for part in parts for segment in part.segments]
    error = next((part.error for part in parts if part.error is not None), None)
    language = next((part.language for part in parts if part.language), "")
    return Transcript(language, round(sound.seconds, 3), segments, error)


def _check(vocabulary: Vocabulary, language: str | None, task: str) -> None:
    """Raises RequestError if the model does not know a language or a task."""
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
