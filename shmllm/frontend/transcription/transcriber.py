"""Transcribes the windows of sounds by the tokens of Whisper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shmllm.frontend.prompts import Prompt
from shmllm.frontend.transcription import quality
from shmllm.frontend.transcription.rounds import ABORTED, AT_ONCE, Generate, OnDone, Part, Rounds
from shmllm.frontend.transcription.segments import segments_of
from shmllm.frontend.transcription.vocabulary import Vocabulary
from shmllm.outputs.request import CompletionOutput
from shmllm.params.sampling import SamplingParams


class Transcriber(Rounds):
    """
    Args:
        vocabulary: the model's special tokens.
        decode: returns the text of tokens.
        generate: completes prompts, and calls a function with the number of those that ended.
        rate: samples in a second.
        step: the seconds from one timestamp to the next.
        on_done: called with the number of parts that have transcripts now, and with a negative one
            for those that are transcribed again.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        decode: Callable[[Sequence[int]], str],
        generate: Generate,
        rate: int,
        step: float,
        on_done: OnDone,
    ) -> None:
        super().__init__(generate, on_done)
        self._vocabulary = vocabulary
        self._decode = decode
        self._rate = rate
        self._step = step
        self._language_of = {token: name for name, token in vocabulary.languages.items()}
        self._task, self._timestamps = "", True

    def find_languages(self, parts: Sequence[Part]) -> None:
        """Set the languages that parts are most likely to have."""
        for first in range(0, len(parts), AT_ONCE):
            some = parts[first : first + AT_ONCE]
            outputs = self._ask_first(some, allowed_token_ids=[*self._language_of])
            for part, output in zip(some, outputs, strict=True):
                if output.token_ids:
                    part.language = self._language_of[output.token_ids[0]]
                else:
                    part.error = ABORTED

    def transcribe(self, parts: Sequence[Part], task: str, timestamps: bool) -> None:
        """Set the segments of parts, whose languages are known.

        Args:
            parts: the parts.
            task: "transcribe" or "translate".
            timestamps: whether the model divides a part into segments.
        """
        self._task, self._timestamps = task, timestamps
        self.run(parts)

    def _prompts(self, parts: Sequence[Part]) -> list[Prompt]:
        task, timestamps = self._task, self._timestamps
        return [
            self._prompt(part, self._vocabulary.prompt(part.language, task, timestamps))
            for part in parts
        ]

    def _params(self, part: Part, temperature: float) -> SamplingParams:
        return SamplingParams(
            temperature=temperature,
            seed=0,
            max_tokens=None,
            logprobs=0,
            detokenize=False,
            extra_args={"transcription": self._vocabulary.rules(self._timestamps)},
        )

    def _read(self, part: Part, output: CompletionOutput) -> None:
        vocabulary, samples = self._vocabulary, part.window.samples
        tokens = output.token_ids
        if not self._timestamps:
            tokens = [token for token in tokens if token < vocabulary.first_time]
        part.segments = segments_of(
            tokens, vocabulary, self._decode, part.window.start,
            len(samples) / self._rate, self._step,
        )  # fmt: skip
        part.logprob = quality.mean_logprob(output, vocabulary.first_time)

    def _without_silent(self, parts: list[Part]) -> list[Part]:
        """The parts in which somebody speaks. The others, of whose text the model is not sure, lose
        it."""
        token = self._vocabulary.no_speech
        unsure = [part for part in parts if part.logprob < quality.LEAST_LOGPROB]
        if token is None or not unsure:
            return parts
        outputs = self._ask_first(unsure, logprob_token_ids=[token])
        silent = [
            part
            for part, output in zip(unsure, outputs, strict=True)
            if output.logprobs and quality.is_silent(output.logprobs[0][token].logprob)
        ]
        for part in silent:
            part.segments = []
        return [part for part in parts if not any(part is each for each in silent)]

    def _ask_first(self, parts: Sequence[Part], **options: Any) -> list[CompletionOutput]:
        """What the model writes first, or thinks of it."""
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, **options)
        prompts = [self._prompt(part, [self._vocabulary.begin]) for part in parts]
        outputs = self._generate(prompts, [params] * len(prompts), _ignore)
        return [output.outputs[0] for output in outputs]

    def _prompt(self, part: Part, ids: list[int]) -> Prompt:
        sound = part.window.samples, self._rate
        return {"prompt_token_ids": ids, "multi_modal_data": {"audio": sound}}


def _ignore(count: int) -> None:
    """Count nothing: these requests are no transcripts."""
