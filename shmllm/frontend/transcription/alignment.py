"""The method of `LLM` that says when the words of sounds are said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shmllm.errors import RequestError
from shmllm.formats.processor_files import read_object
from shmllm.formats.qwen3_aligner import ARCHITECTURE
from shmllm.frontend.front_end import FrontEnd
from shmllm.frontend.progress import Shown
from shmllm.frontend.transcription.sounds import Sound, as_list, open_sound, sound_name
from shmllm.frontend.transcription.word_times import MARK, in_order, words_of
from shmllm.outputs.transcription import Segment, Transcript
from shmllm.params.pooling import PoolingParams

if TYPE_CHECKING:
    from shmllm.frontend.audio.sound import Sound as OpenedSound

ALIGNERS = (ARCHITECTURE, "Qwen3ASRForTokenClassification")
_SOUND = "<|audio_start|><|audio_pad|><|audio_end|>"
_STEP_MS = 80.0
"""How long a class of times is, where files do not say it."""


class AlignmentCalls:
    """
    Attributes:
        front_end: the parts that do the work.
        encode: computes the classes of tokens.
    """

    front_end: FrontEnd
    encode: Any

    def align(
        self,
        sounds: Sound | Sequence[Sound],
        texts: str | Sequence[str | Sequence[str]],
        *,
        use_tqdm: Shown = True,
    ) -> list[Transcript]:
        """Find out when each word of known texts is said, with a forced aligner such as
        Qwen/Qwen3-ForcedAligner-0.6B.

        Args:
            sounds: one or several: paths of files, their bytes, or (samples, rate). None may be
                longer than the model's longest sound.
            texts: what is said in each: a text, or the list of its words; for one sound also just
                its text. Punctuation is left out. A Chinese character is a word; Japanese texts
                have to be lists.
            use_tqdm: show a progress bar on stderr, or by a function such as `tqdm`.

        Returns:
            One Transcript for each sound, in their order, with a segment for each word.

        Raises:
            RequestError: the model is no aligner, an argument is wrong, or a sound cannot be read;
                nothing was queued.
        """
        mark = self._timestamp_mark()
        step_ms = _step_ms(Path(self.front_end.info.model_directory))
        every = list(as_list(sounds))
        words = _words_of_each(every, texts)
        last_s = len(self.front_end.info.pooling.labels) * step_ms / 1000
        opened = self._opened_for_words(every, last_s)
        prompts = [
            {
                "prompt": _SOUND + "".join(f"{word}{MARK}{MARK}" for word in own),
                "multi_modal_data": {"audio": (sound.samples, sound.rate)},
            }
            for sound, own in zip(opened, words, strict=True)
        ]
        asked = [index for index, own in enumerate(words) if own]
        params = PoolingParams(pooling_type="STEP", step_tag_id=mark, use_activation=False)
        outputs = self.encode(
            [prompts[index] for index in asked],
            params,
            use_tqdm=use_tqdm,
            pooling_task="token_classify",
        )
        found = dict(zip(asked, outputs, strict=True))
        return [
            _transcript(sound, own, found.get(index), step_ms)
            for index, (sound, own) in enumerate(zip(opened, words, strict=True))
        ]

    def _timestamp_mark(self) -> int:
        """The token behind which the model says times.

        Raises:
            RequestError: it is no aligner.
        """
        if self.front_end.info.model_type not in ALIGNERS:
            raise RequestError(
                "the model does not align words: pass a forced aligner, such as "
                "model='Qwen/Qwen3-ForcedAligner-0.6B'"
            )
        mark = self.front_end.tokenizer.token_to_id(MARK)
        if mark is None:
            raise RequestError(f"the model's tokenizer lacks {MARK}, so it aligns no words")
        return mark

    def _opened_for_words(self, sounds: Sequence[Sound], last_s: float) -> list[OpenedSound]:
        """Decode sounds of at most so many seconds."""
        found = []
        for number, sound in enumerate(sounds):
            name = sound_name(number, sound)
            opened = open_sound(self.front_end.items, name, sound)
            if opened.seconds > last_s:
                raise RequestError(
                    f"{name} is longer than the {last_s:g} seconds of which the model knows times: "
                    "cut it, and its text"
                )
            found.append(opened)
        return found


def _words_of_each(sounds: Sequence[Sound], texts: Any) -> list[list[str]]:
    """The words of each sound's text."""
    if not isinstance(texts, Iterable) or isinstance(texts, bytes):
        raise RequestError(f"texts must be a text for each sound, not {texts!r:.100}")
    given = [texts] if isinstance(texts, str) else list(texts)
    if len(given) != len(sounds):
        raise RequestError(f"there are {len(sounds)} sounds and {len(given)} texts")
    return [
        words_of(text, f"the text of {sound_name(number, sound)}")
        for number, (sound, text) in enumerate(zip(sounds, given, strict=True))
    ]


def _transcript(sound: OpenedSound, words: list[str], output: Any, step_ms: float) -> Transcript:
    if output is None or output.error is not None:
        error = None if output is None else output.error
        return Transcript("", round(sound.seconds, 3), [], error)
    classes = output.outputs.array.argmax(axis=1)
    times = [time / 1000 for time in in_order(classes.astype(np.float32) * np.float32(step_ms))]
    segments = [
        Segment(begin, end, word)
        for word, begin, end in zip(words, times[::2], times[1::2], strict=True)
    ]
    return Transcript("", round(sound.seconds, 3), segments)


def _step_ms(directory: Path) -> float:
    """How long a class of times is, as transformers' processor or the authors' config.json says."""
    for name in ("processor_config.json", "config.json"):
        value = (read_object(directory / name) or {}).get("timestamp_segment_time")
        if isinstance(value, int | float) and value > 0:
            return float(value)
    return _STEP_MS
