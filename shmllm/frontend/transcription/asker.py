"""Transcribes the windows of sounds by messages: each asks a model for the transcript of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from shmllm.frontend.prompts import Prompt
from shmllm.frontend.transcription import quality
from shmllm.frontend.transcription.questions import Question, Timed
from shmllm.frontend.transcription.rounds import Generate, OnDone, Part, Rounds
from shmllm.outputs.request import CompletionOutput
from shmllm.outputs.transcription import Segment
from shmllm.params.sampling import SamplingParams

MOST_SECONDS = 30
"""The longest window, also of models that hear longer ones: a segment is a window, or a part."""
_FEWEST_TOKENS, _TOKENS_OF_SECOND = 32, 16
"""A reply has at most so many tokens, whatever its window is, and for each second of it."""


class Asker(Rounds):
    """
    Args:
        question: how the model is asked.
        language: the code of the language that is spoken; None: the model finds out.
        render: makes a prompt of a conversation, and of variables for its template.
        encode: returns the tokens of a text.
        generate: completes prompts, and calls a function with the number of those that ended.
        rate: samples in a second.
        on_done: see `Rounds`.
        task: "transcribe" or "translate".
        suppress: tokens that are never sampled.
    """

    def __init__(
        self,
        question: Question,
        language: str | None,
        render: Callable[..., Any],
        encode: Callable[[str], list[int]],
        generate: Generate,
        rate: int,
        on_done: OnDone,
        task: str = "transcribe",
        suppress: Sequence[int] = (),
    ) -> None:
        super().__init__(generate, on_done)
        self._question = question
        self._language = language
        self._render = render
        self._begin = encode(begin) if (begin := question.begin_of(language, task)) else []
        self._rate = rate
        self._bias = dict.fromkeys(suppress, -math.inf) or None

    def _prompts(self, parts: Sequence[Part]) -> list[Prompt]:
        return [self._prompt(self._sound(part)) for part in parts]

    def _prompt(self, sound: tuple[Any, int]) -> Any:
        if not self._question.is_message:
            return {"prompt_token_ids": self._begin, "multi_modal_data": {"audio": sound}}
        prompt = self._render(self._question.message(sound), **self._question.template)
        prompt["prompt_token_ids"] = [*prompt["prompt_token_ids"], *self._begin]
        return prompt

    def _params(self, part: Part, temperature: float) -> SamplingParams:
        most = _FEWEST_TOKENS + round(_TOKENS_OF_SECOND * self._seconds(part))
        return SamplingParams(
            temperature=temperature, seed=0, max_tokens=most, logprobs=0, logit_bias=self._bias
        )

    def _read(self, part: Part, output: CompletionOutput) -> None:
        found, words = self._question.read(output.text, self._question.languages)
        part.language = self._language or found
        start, length = part.window.start, self._seconds(part)
        read_times = self._question.read_times
        timed = [] if read_times is None else read_times(output.text)
        if not timed and words:
            timed = [Timed(0.0, length, words)]
        part.segments = [
            Segment(
                round(start + min(begin, length), 3),
                round(start + min(max(begin, end), length), 3),
                said,
            )
            for begin, end, said in timed
        ]
        part.logprob = quality.mean_logprob(output)

    def _sound(self, part: Part) -> tuple[Any, int]:
        return part.window.samples, self._rate

    def _seconds(self, part: Part) -> float:
        return len(part.window.samples) / self._rate
