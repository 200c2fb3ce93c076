"""Which parts are transcribed again, and which have no text, by Whisper's rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shmllm.frontend.transcription import quality
from shmllm.frontend.transcription.rounds import ABORTED, OnDone, Part
from shmllm.frontend.transcription.transcriber import Transcriber
from shmllm.frontend.transcription.vocabulary import Vocabulary
from shmllm.frontend.transcription.windows import Window
from shmllm.outputs.logprobs import Logprob
from shmllm.outputs.request import CompletionOutput, RequestOutput
from shmllm.params.sampling import SamplingParams

END, NO_SPEECH, FIRST_TIME = 50, 56, 58
VOCABULARY = Vocabulary(
    begin=51, end=END, languages={"en": 52, "de": 53}, tasks={"transcribe": 55}, no_timestamps=57,
    first_time=FIRST_TIME, no_speech=NO_SPEECH, suppress=(), suppress_first=(), latest_first=50,
)  # fmt: skip
RATE = 100
SURE, UNSURE = -0.1, -1.5

Answer = Callable[[SamplingParams], tuple[list[int], float]]
"""The tokens that a model writes, and the log-probability of each."""


def output_of(
    tokens: Sequence[int], logprob: float, reason: str = "stop", error: str | None = None
) -> RequestOutput:
    logprobs: Any = [{token: Logprob(logprob, 1, None) for token in (*tokens, NO_SPEECH)}]
    logprobs *= len(tokens)
    completion = CompletionOutput(0, "", [*tokens], None, logprobs, finish_reason=reason)
    return RequestOutput("0", None, [], None, [completion], True, error=error)


class Model:
    """Answers prompts, and keeps the temperatures of the transcripts that it is asked for.

    Args:
        answer: what it writes.
        silence: how likely nobody speaks.
    """

    def __init__(self, answer: Answer, silence: float = 0.0) -> None:
        self._answer, self._silence = answer, silence
        self.temperatures: list[float] = []

    def __call__(
        self, prompts: list[Any], params: list[SamplingParams], on_done: OnDone
    ) -> list[RequestOutput]:
        outputs = []
        for prompt, each in zip(prompts, params, strict=True):
            outputs.append(self._one(prompt, each))
            on_done(1)
        return outputs

    def _one(self, prompt: Any, params: SamplingParams) -> RequestOutput:
        if params.logprob_token_ids is not None:
            assert prompt["prompt_token_ids"] == [51]
            return output_of([1], math.log(self._silence) if self._silence else -50.0)
        self.temperatures.append(params.temperature)
        return output_of(*self._answer(params))


def transcribe(generate: Any, num_parts: int = 1) -> tuple[list[Part], int]:
    """Returns the parts, and how many were reported in all."""
    parts, done = transcribe_with_progress(generate, num_parts)
    return parts, sum(done)


def transcribe_with_progress(generate: Any, num_parts: int) -> tuple[list[Part], list[int]]:
    """Returns the parts, and what was reported of them."""
    window = Window(0.0, np.zeros(10 * RATE, np.float32))
    parts = [Part(window, "en") for _ in range(num_parts)]
    done: list[int] = []
    decode = " ".join
    Transcriber(
        VOCABULARY, lambda ids: decode(map(str, ids)), generate, RATE, 0.02, done.append
    ).transcribe(parts, "transcribe", timestamps=True)
    return parts, done


def texts_of(parts: Sequence[Part]) -> list[str]:
    return [" ".join(segment.text for segment in part.segments) for part in parts]


def test_a_good_transcript_is_taken() -> None:
    model = Model(lambda params: ([58, 1, 2, 60, END], SURE))
    assert texts_of(transcribe(model)[0]) == ["1 2"]
    assert model.temperatures == [0.0]


def test_an_unlikely_transcript_is_drawn_again() -> None:
    model = Model(lambda params: ([3, END], SURE if params.temperature >= 0.4 else UNSURE))
    parts, num_done = transcribe(model, num_parts=2)
    assert (texts_of(parts), num_done) == (["3", "3"], 2)
    assert model.temperatures == [0.0, 0.0, 0.2, 0.2, 0.4, 0.4]


def test_each_part_is_reported_as_it_ends_and_taken_back_if_it_is_drawn_again() -> None:
    model = Model(lambda params: ([3, END], SURE if params.temperature else UNSURE))
    reported = transcribe_with_progress(model, 2)[1]
    assert [count for count in reported if count] == [1, 1, -2, 1, 1]


def test_a_text_that_repeats_itself_is_drawn_to_the_end() -> None:
    model = Model(lambda params: ([7] * 200, SURE))
    parts, num_done = transcribe(model)
    assert (texts_of(parts), num_done) == ([" ".join(["7"] * 200)], 1)
    assert model.temperatures == [*quality.TEMPERATURES]


def test_a_silent_part_has_no_text_and_is_not_drawn_again() -> None:
    model = Model(lambda params: ([3, END], UNSURE), silence=0.7)
    parts, num_done = transcribe(model)
    assert (texts_of(parts), num_done, model.temperatures) == ([""], 1, [0.0])


def test_a_likely_text_is_not_silence() -> None:
    model = Model(lambda params: ([3, END], SURE), silence=0.9)
    assert texts_of(transcribe(model)[0]) == ["3"]


def test_a_part_of_which_no_text_is_likely_is_drawn_again() -> None:
    """Somebody speaks in it, and the model has ended the transcript at once."""
    model = Model(lambda params: ([3, END], SURE) if params.temperature else ([END], UNSURE))
    assert texts_of(transcribe(model)[0]) == ["3"]
    assert model.temperatures == [0.0, 0.2]


def test_why_a_part_is_missing() -> None:
    def run(**output: Any) -> str | None:
        def generate(prompts: Any, params: Any, on_done: OnDone) -> list[RequestOutput]:
            on_done(1)
            return [output_of([1], SURE, **output)]

        parts, num_done = transcribe(generate)
        assert num_done == 1
        return parts[0].error

    assert run(reason="abort") == ABORTED
    assert run(reason="error", error="a processor failed") == "a processor failed"


def test_parts_without_an_answer_have_no_language() -> None:
    answers = [output_of([53], SURE), output_of([], SURE, "abort")]
    parts = [Part(Window(0.0, np.zeros(9, np.float32))) for _ in answers]
    transcriber = Transcriber(VOCABULARY, str, lambda *given: answers, RATE, 0.02, print)
    transcriber.find_languages(parts)
    assert [(part.language, part.error) for part in parts] == [("de", None), ("", ABORTED)]
