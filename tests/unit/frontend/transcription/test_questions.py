"""How models are asked for transcripts by messages, and how their replies are read."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers.models.audioflamingo3.processing_audioflamingo3 import AudioFlamingo3Processor
from transformers.models.canary import processing_canary
from transformers.models.cohere_asr import processing_cohere_asr
from transformers.models.glmasr.processing_glmasr import GlmAsrProcessor
from transformers.models.moss_transcribe_diarize.processing_moss_transcribe_diarize import (
    MossTranscribeDiarizeProcessor,
)
from transformers.models.omniasr import processing_omniasr
from transformers.models.qwen3_asr import processing_qwen3_asr

from shmllm.errors import RequestError
from shmllm.frontend.transcription.asker import Asker
from shmllm.frontend.transcription.questions import QUESTIONS, Question, _seconds_of
from shmllm.frontend.transcription.rounds import Part
from shmllm.frontend.transcription.windows import Window
from shmllm.outputs.logprobs import Logprob
from shmllm.outputs.request import CompletionOutput, RequestOutput
from shmllm.outputs.transcription import Segment

QWEN, GLM, FLAMINGO, MOSS, COHERE, CANARY = (
    QUESTIONS[f"{name}ForConditionalGeneration"]
    for name in (
        "Qwen3ASR",
        "GlmAsr",
        "AudioFlamingo3",
        "MossTranscribeDiarize",
        "CohereAsr",
        "Canary",
    )
)
RATE = 100


@pytest.mark.parametrize(
    "text",
    [
        "language English<asr_text>Hello there. ",
        "language None<asr_text>",
        "language Klingon<asr_text> words",
        "just words",
        "",
    ],
)
def test_replies_of_qwen_are_read_as_transformers_reads_them(text: str) -> None:
    parsed = processing_qwen3_asr._parse_single_output(text)
    names = {name: code for code, name in processing_qwen3_asr.LANGUAGE_CODE_TO_NAME.items()}
    assert QWEN.read(text, QWEN.languages) == (
        names.get(parsed["language"], ""),
        parsed["transcription"],
    )


@pytest.mark.parametrize(
    "text",
    [
        'The spoken content of the audio is "Hello."."',
        'The transcription of the audio is "Hello there".',
        "The content of the input audio is 'a'.",
        "Hello there",
        "The spoken content of the audio is Hello.",
    ],
)
def test_replies_of_audio_flamingo_lose_their_frame(text: str) -> None:
    processor: Any = object.__new__(AudioFlamingo3Processor)
    wanted = processor._strip_assistant_prefix_and_quotes(text)
    assert FLAMINGO.read(text, {}) == ("", wanted)


def test_questions_are_those_of_transformers() -> None:
    assert QWEN.languages == processing_qwen3_asr.LANGUAGE_CODE_TO_NAME
    for question, kind in ((GLM, GlmAsrProcessor), (FLAMINGO, AudioFlamingo3Processor)):
        default = inspect.signature(kind).parameters["default_transcription_prompt"].default
        assert question.text == default
    (message,) = GLM.message("sound")
    assert [part["type"] for part in message["content"]] == ["audio", "text"]
    (message,) = FLAMINGO.message("sound")
    assert [part["type"] for part in message["content"]] == ["text", "audio"]
    assert QWEN.message("sound") == [
        {"role": "user", "content": [{"type": "audio", "audio": "sound"}]}
    ]
    assert QWEN.begin_of("de") == "language German<asr_text>"
    assert QWEN.begin_of(None) == ""


def test_what_a_model_cannot_be_asked_for() -> None:
    with pytest.raises(RequestError, match="translates nothing"):
        QWEN.check(None, "translate")
    with pytest.raises(RequestError, match=r"knows no language 'xx'; its languages are ar cs da "):
        QWEN.check("xx", "transcribe")
    with pytest.raises(RequestError, match="cannot be told a language: it finds out"):
        GLM.check("en", "transcribe")
    QWEN.check("de", "transcribe")


def test_decoders_begin_as_processors_of_transformers_have_them() -> None:
    assert COHERE.languages.keys() == processing_cohere_asr.LANGUAGES
    assert CANARY.languages.keys() == processing_canary.LANGUAGE_CODE_TO_NAME.keys()
    processor: Any = object.__new__(processing_cohere_asr.CohereAsrProcessor)
    processor.tokenizer = SimpleNamespace(convert_tokens_to_ids=list)
    assert COHERE.begin_of("de").split() == processor.get_decoder_prompt_ids("de")
    assert CANARY.begin_of("de", "translate").split()[3:5] == ["<|de|>", "<|en|>"]
    CANARY.check("de", "translate")
    with pytest.raises(RequestError, match="translates nothing"):
        COHERE.check("de", "translate")
    with pytest.raises(RequestError, match="has to be told the language, one of ar de el"):
        COHERE.check(None, "transcribe")
    with pytest.raises(RequestError, match="knows no language 'xx'"):
        CANARY.check("xx", "transcribe")


class Model:
    """Writes the same for each prompt; what it writes next is worse or better."""

    def __init__(self, *texts: str, logprob: float = -0.1) -> None:
        self._texts, self._logprob = texts, logprob
        self.prompts: list[Any] = []
        self.params: list[Any] = []

    def __call__(self, prompts: list[Any], params: Any, on_done: Any) -> list[RequestOutput]:
        round_ = min(len({each.temperature for each in self.params}), len(self._texts) - 1)
        self.prompts += prompts
        self.params += params
        logprobs: Any = [{1: Logprob(self._logprob, 1, None)}]
        outputs = [
            CompletionOutput(0, self._texts[round_], [1], None, logprobs, finish_reason="stop")
            for _ in prompts
        ]
        on_done(len(prompts))
        return [RequestOutput("0", None, [], None, [output], True) for output in outputs]


def ask(
    question: Question, model: Model, language: str | None = None, suppress: Sequence[int] = ()
) -> list[Part]:
    parts = [
        Part(Window(start, np.full(5 * RATE, start, np.float32)), language or "")
        for start in (0.0, 5.0)
    ]
    done: list[int] = []
    asker = Asker(
        question,
        language,
        lambda messages, **template: {
            "prompt_token_ids": [7],
            "messages": messages,
            "template": template,
        },
        lambda text: [*text.encode()],
        model,
        RATE,
        done.append,
        suppress=suppress,
    )
    asker.run(parts)
    assert sum(done) == len(parts)
    return parts


def test_omniasr_begins_as_the_template_of_transformers() -> None:
    question = QUESTIONS["OmniASRForConditionalGeneration"]
    assert question.languages == processing_omniasr.ISO_639_1_TO_LANGUAGE
    begin = "<extra_id_1> <extra_id_0> <|lang:{}|> <s>"
    for language, name in ((None, processing_omniasr.LANGUAGE_AGNOSTIC), ("de", "deu_latn")):
        assert question.begin_of(language) == begin.format(name)


def test_suppressed_tokens_are_never_sampled() -> None:
    model = Model("Guten Tag.")
    ask(GLM, model)
    ask(GLM, model, suppress=(3, 5))
    forbidden = {3: -math.inf, 5: -math.inf}
    assert [each.logit_bias for each in model.params] == [None] * 2 + [forbidden] * 2


def test_nemotron_is_asked_not_to_reason() -> None:
    model = Model("Guten Tag.")
    ask(QUESTIONS["NemotronHOmniForConditionalGeneration"], model)
    assert [prompt["template"] for prompt in model.prompts] == [{"enable_thinking": False}] * 2


def test_each_window_is_a_segment_of_its_own() -> None:
    model = Model("language German<asr_text> Guten Tag. ")
    first, second = ask(QWEN, model)
    assert first.segments == [Segment(0.0, 5.0, "Guten Tag.")]
    assert second.segments == [Segment(5.0, 10.0, "Guten Tag.")]
    assert (first.language, second.language) == ("de", "de")
    assert [prompt["prompt_token_ids"] for prompt in model.prompts] == [[7], [7]]
    assert {each.max_tokens for each in model.params} == {32 + 16 * 5}
    ((message,), _) = (prompt["messages"] for prompt in model.prompts)
    samples, rate = message["content"][0]["audio"]
    assert (rate, len(samples)) == (RATE, 5 * RATE)


def test_a_given_language_begins_the_reply() -> None:
    model = Model("Guten Tag.")
    first, _ = ask(QWEN, model, "de")
    assert (first.language, first.segments[0].text) == ("de", "Guten Tag.")
    assert bytes(model.prompts[0]["prompt_token_ids"][1:]) == b"language German<asr_text>"


def test_a_text_that_repeats_itself_is_transcribed_again() -> None:
    model = Model("again and " * 40, "Once.")
    parts = ask(GLM, model)
    assert [part.segments[0].text for part in parts] == ["Once.", "Once."]
    assert [each.temperature for each in model.params] == [0.0, 0.0, 0.2, 0.2]


def test_an_unlikely_text_is_kept_in_the_end() -> None:
    model = Model("Words.", logprob=-2.0)
    parts = ask(GLM, model)
    assert len(model.params) == 12
    assert parts[0].segments[0].text == "Words."


def test_a_window_without_words_has_no_segment() -> None:
    assert [part.segments for part in ask(QWEN, Model("language None<asr_text>"))] == [[], []]


def test_replies_with_times_are_several_segments() -> None:
    text = "[0.50][S01]Hello there.[1.25] [1.25][S02] [2.00][0:02.5][S01]Again[0:70][x][S01]No[2]"
    parts = ask(MOSS, Model(text))
    assert parts[1].segments == [Segment(5.5, 6.25, "Hello there."), Segment(7.5, 10.0, "Again")]
    processor: Any = object.__new__(MossTranscribeDiarizeProcessor)
    assert [processor.parse_timestamp(each) for each in ("7.56", "1:23", "01:02:03")] == [
        _seconds_of(each) for each in ("7.56", "1:23", "01:02:03")
    ]
    assert ask(MOSS, Model("no times"))[0].segments == [Segment(0.0, 5.0, "no times")]
