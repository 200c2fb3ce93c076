"""Whisper: transformers' tokens, the same bits in all settings, and transcripts of long sounds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import soundfile
import tokenizers
import torch
import transformers
from support.audio_models import make_audio_model
from support.commands import command
from support.determinism import said
from support.one_thread import one_thread
from support.variants import slow
from support.whisper_models import (
    PROMPT,
    RATE,
    SECONDS,
    features,
    make_sound,
    make_whisper,
    reference_tokens,
)

from shmllm import LLM, RequestError, SamplingParams
from shmllm.frontend.transcription import quality
from shmllm.frontend.transcription.questions import QUESTIONS
from shmllm.frontend.transcription.vocabulary import Vocabulary

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

BASE: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "multiprocess": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"max_num_batched_tokens": 8, "max_num_seqs": 2},
    "few blocks": {
        "num_gpu_blocks_override": 19,
        "max_num_seqs": 3,
        "scheduler_reserve_full_isl": False,
    },
    "no cache": {"enable_prefix_caching": False},
    "two threads": {"num_threads": 2},
}
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=1)
SOUNDS = [make_sound(seconds, seed) for seed, seconds in enumerate((1.0, 0.4, 0.7))]


class Subject(NamedTuple):
    """A model, and its directory."""

    model: Any
    directory: Path


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    directory = tmp_path_factory.mktemp("whisper")
    return Subject(make_whisper(directory), directory)


@pytest.fixture(scope="module")
def llm(subject: Subject) -> Iterator[LLM]:
    with LLM(str(subject.directory), **BASE) as llm:
        yield llm


def prompt_of(sound: Any, text: str = PROMPT) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"audio": (sound, RATE)}}


def ids_of(subject: Subject, text: str) -> list[int]:
    tokenizer = tokenizers.Tokenizer.from_file(str(subject.directory / "tokenizer.json"))
    found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return found


def test_greedy_tokens_equal_those_of_transformers(subject: Subject, llm: LLM) -> None:
    texts = [PROMPT, f"{PROMPT}some words", PROMPT]
    prompts = [prompt_of(*pair) for pair in zip(SOUNDS, texts, strict=True)]
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    for output, sound, text in zip(outputs, SOUNDS, texts, strict=True):
        ids = ids_of(subject, text)
        assert output.prompt_token_ids == ids
        wanted = reference_tokens(subject.model, ids, sound, 10)
        assert output.outputs[0].token_ids == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"scale_embedding": True},  # which transformers' model does not read
        {"tie_word_embeddings": True},
        {"encoder_layers": 4, "decoder_layers": 2},
        {"encoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 80},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_greedy_tokens_of_variants(tmp_path: Path, fields: dict[str, Any]) -> None:
    variant = Subject(make_whisper(tmp_path, **fields), tmp_path)
    with LLM(str(tmp_path), **BASE) as llm:
        (output,) = llm.generate(prompt_of(SOUNDS[0]), PARAMS, use_tqdm=False)
    wanted = reference_tokens(variant.model, ids_of(variant, PROMPT), SOUNDS[0], 10)
    assert output.outputs[0].token_ids == wanted


def test_forms_of_prompts(subject: Subject, llm: LLM) -> None:
    """vLLM's prompt in two parts is one with an item."""
    item = {"multi_modal_data": {"audio": (SOUNDS[0], RATE)}}
    ids = ids_of(subject, PROMPT)
    outputs = llm.generate(
        [
            prompt_of(SOUNDS[0]),
            {"prompt_token_ids": ids, **item},
            {"encoder_prompt": {"prompt": "", **item}, "decoder_prompt": PROMPT},
            {"encoder_prompt": item, "decoder_prompt": {"prompt_token_ids": ids}},
            {"encoder_prompt": item, "decoder_prompt": ids},
        ],
        PARAMS,
        use_tqdm=False,
    )
    first, *others = map(said, outputs)
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (PROMPT, "has no audio"),
        ({"prompt": PROMPT, "multi_modal_data": {"audio": [(SOUNDS[0], RATE)] * 2}}, "2 items"),
        ({"prompt": "", "multi_modal_data": {"audio": (SOUNDS[0], RATE)}}, "is empty"),
        (prompt_of(np.zeros(RATE * SECONDS + 1, np.float32)), "hears 1 at once"),
        ({"encoder_prompt": {"prompt": "text"}, "decoder_prompt": PROMPT}, "has a text"),
        ({"encoder_prompt": PROMPT, "decoder_prompt": PROMPT}, "has none that reads text"),
        ({"encoder_prompt": {}, "decoder_prompt": PROMPT}, "neither a text nor 'multi_modal_data'"),
        ({"encoder_prompt": {}, "prompt": PROMPT}, "has 'encoder_prompt' and the keys"),
        (prompt_of(SOUNDS[0], PROMPT + "a" * 48), "max_model_len is 48"),
    ],
)
def test_prompts_that_are_refused(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, PARAMS, use_tqdm=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", [{}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}, {"quantization": "int8"}]
)
def test_bits_do_not_depend_on_settings(subject: Subject, variant: dict[str, Any]) -> None:
    prompts = [prompt_of(sound, PROMPT + "word " * n) for n, sound in enumerate(SOUNDS * 3)]
    found = {}
    for name, setting in SETTINGS.items():
        with LLM(str(subject.directory), **BASE | setting | variant) as llm:
            together = [*map(said, llm.generate(prompts, PARAMS, use_tqdm=False))]
            alone = [said(llm.generate(each, PARAMS, use_tqdm=False)[0]) for each in prompts]
            assert together == alone, name
            found[name] = together
    assert all(each == found["whole"] for each in found.values())


@pytest.mark.parametrize("sound", [0, slow(1), slow(2)])
@one_thread()
def test_timestamps_equal_those_of_transformers(subject: Subject, llm: LLM, sound: int) -> None:
    """transformers' `generate` has the same rules. It adds the prompt by itself, and drops what may
    not be complete at the end."""
    samples = SOUNDS[sound]
    config = transformers.GenerationConfig.from_pretrained(subject.directory)
    with torch.inference_mode():
        output = subject.model.generate(
            features([samples]), config, language="en", task="transcribe", return_timestamps=True,
            max_new_tokens=12, do_sample=False,
        )  # fmt: skip
    vocabulary = Vocabulary.of(llm.front_end.tokenizer.added_tokens, subject.directory)
    rules = vocabulary.rules(timestamps=True) | {"suppress_first": []}
    params = SamplingParams(
        temperature=0, max_tokens=12, extra_args={"transcription": rules}, ignore_eos=False
    )
    ids = vocabulary.prompt("en", "transcribe", timestamps=True)
    (own,) = llm.generate(
        {"prompt_token_ids": ids, "multi_modal_data": {"audio": (samples, RATE)}},
        params,
        use_tqdm=False,
    )
    wanted = [token for token in output[0].tolist() if token != vocabulary.end]
    tokens = [token for token in own.outputs[0].token_ids if token != vocabulary.end]
    assert len(wanted) >= 4
    assert tokens[: len(wanted)] == wanted


def test_a_long_sound_has_one_transcript(llm: LLM) -> None:
    """Its segments are in order and inside of it, and an array is what its file is."""
    whole = np.concatenate(SOUNDS * 2)
    long, short = llm.transcribe([(whole, RATE), (SOUNDS[1], RATE)], use_tqdm=False)
    assert long.duration == round(len(whole) / RATE, 3)
    assert long.language in ("en", "de")
    assert len({int(segment.start) for segment in long.segments}) >= 3
    assert all(0 <= s.start <= s.end <= long.duration for s in long.segments)
    (alone,) = llm.transcribe((SOUNDS[1], RATE), use_tqdm=False)
    assert alone == short
    (given,) = llm.transcribe((SOUNDS[1], RATE), language="de", use_tqdm=False, timestamps=False)
    assert given.language == "de"
    assert [(s.start, s.end) for s in given.segments] in ([], [(0.0, 0.4)])


def test_arguments_that_are_refused(subject: Subject, llm: LLM) -> None:
    sound = SOUNDS[0], RATE
    with pytest.raises(RequestError, match="its languages are de en"):
        llm.transcribe(sound, language="xx")
    with pytest.raises(RequestError, match="task must be one of transcribe, translate"):
        llm.transcribe(sound, task="summarise")
    with pytest.raises(RequestError, match=r"sound 1 \(nowhere.wav\): cannot read"):
        llm.transcribe([sound, "nowhere.wav"])
    with pytest.raises(RequestError, match="unknown format"):
        llm.transcribe(b"text")
    for wrong in (None, np.zeros(RATE)):
        with pytest.raises(RequestError, match="one or several of: a path"):
            llm.transcribe(wrong)  # type: ignore[arg-type]
    assert llm.transcribe((SOUNDS[0], np.int64(RATE)))[0].duration == 1  # type: ignore[arg-type]
    with (
        LLM(str(subject.directory), **BASE, logprobs_mode="raw_logits") as logits,
        pytest.raises(RequestError, match="logprobs_mode='raw_logprobs' instead of 'raw_logits'"),
    ):
        logits.transcribe(sound)
    with LLM("tiny") as other, pytest.raises(RequestError, match="writes no transcripts"):
        other.transcribe(sound)


def test_command(subject: Subject, tmp_path: Path) -> None:
    """Two sounds become two files, and a second run replaces nothing."""
    paths = [tmp_path / "a.wav", tmp_path / "b.flac"]
    for path, samples in zip(paths, SOUNDS, strict=False):
        soundfile.write(path, samples, RATE)
    engine = "-m", str(subject.directory), "--dtype", "float32"
    target = tmp_path / "out"
    arguments = [*map(str, paths), "-o", str(target), "--format", "json", "--language", "de"]
    done = command("transcribe", *engine, *arguments)
    assert done.returncode == 0, done.stderr
    records = [json.loads((target / name).read_text()) for name in ("a.json", "b.json")]
    assert [record["file"] for record in records] == [*map(str, paths)]
    assert [record["duration"] for record in records] == [1.0, 0.4]
    assert all(record["language"] == "de" for record in records)
    again = command("transcribe", *engine, *arguments)
    assert again.returncode == 2
    assert b"pass --overwrite" in again.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "begin"), [("txt", b""), ("srt", b"1\n00:00:0"), ("vtt", b"WEBVTT\n\n00:00:0")]
)
def test_formats(subject: Subject, tmp_path: Path, form: str, begin: bytes) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, SOUNDS[0], RATE)
    engine = "-m", str(subject.directory), "--dtype", "float32"
    done = command("transcribe", *engine, str(path), "--format", form)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(begin)
    file = tmp_path / f"out.{form}"
    done = command("transcribe", *engine, str(path), "-o", str(file))
    assert done.returncode == 0, done.stderr
    assert file.read_bytes().startswith(begin)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.wav"], b"there is no file nowhere.wav"),
        (["{sound}", "-o", "a.foo"], b"name it with an ending"),
        (["{sound}", "-o", "{sound}", "--format", "txt"], b"is the sound itself"),
        (["{sound}", "{sound}", "-o", "folder"], b"two files would be"),
        (["{sound}", "--num-speculative-tokens", "2"], b""),
    ],
)
def test_usage(tmp_path: Path, arguments: list[str], message: bytes) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(b"RIFF")
    done = command("transcribe", *(each.format(sound=path) for each in arguments))
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.slow
def test_the_language_stands_behind_the_sound_of_a_decoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Omnilingual ASR has no messages; generation_config.json names tokens that it never writes."""
    monkeypatch.setattr(quality, "LEAST_LOGPROB", -1e9)  # random weights are never sure
    monkeypatch.setattr(quality, "MOST_COMPRESSION", 1e9)
    make_audio_model(tmp_path, "omniasr")
    sound, options = (make_sound(2.5, 5), RATE), BASE | {"max_model_len": 1024}
    params = SamplingParams(temperature=0, max_tokens=72)
    written: list[str] = []
    suppressed: list[int] = []
    for _ in range(2):
        path = tmp_path / "generation_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"suppress_tokens": suppressed}))
        params.logit_bias = dict.fromkeys(suppressed, -math.inf) or None
        with LLM(str(tmp_path), **options) as llm:
            for language, name in ((None, "auto"), ("de", "deu_latn")):
                (found,) = llm.transcribe(sound, language=language, use_tqdm=False)
                text = f"<extra_id_1><extra_id_0><|lang:{name}|><s>"
                prompt = {"prompt": text, "multi_modal_data": {"audio": sound}}
                (wanted,) = llm.generate(prompt, params, use_tqdm=False)
                assert found.text == wanted.outputs[0].text.strip()
                assert found.language == (language or "")
                written.append(found.text)
            with pytest.raises(RequestError, match="knows no language 'tlh'"):
                llm.transcribe(sound, language="tlh", use_tqdm=False)
        suppressed = list(wanted.outputs[0].token_ids[:2])
    assert len({*written}) == 4


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("glmasr", 9.0),
        slow("audioflamingo3", 9.0),
        slow("qwen3_asr", 31.0),
        slow("granite_speech", 31.0),
        slow("fun_asr_nano", 9.0),
        slow("nemotron_h_omni", 9.0),
        slow("moss_transcribe_diarize", 9.0),
    ],
)
def test_models_that_are_asked_answer_for_each_window(
    name: str, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transcript of a window is the reply to a message with it."""
    make_audio_model(tmp_path, name)
    sounds = [(make_sound(seconds, 5), RATE) for seconds in (2.5, seconds)]
    with LLM(str(tmp_path), **BASE | {"max_model_len": 1024}) as llm:
        found = llm.transcribe(sounds, use_tqdm=False)
        assert [each.error for each in found] == [None, None]
        assert [each.duration for each in found] == [2.5, seconds]
        starts = [segment.start for segment in found[1].segments]
        assert starts == sorted(starts)
        assert llm.transcribe(sounds[0], use_tqdm=False) == found[:1]
        monkeypatch.setattr(quality, "LEAST_LOGPROB", -1e9)  # random weights are never sure
        monkeypatch.setattr(quality, "MOST_COMPRESSION", 1e9)
        (transcript,) = llm.transcribe(sounds[0], use_tqdm=False)
        question = QUESTIONS[llm.front_end.info.model_type]
        (reply,) = llm.chat(
            question.message(sounds[0]),
            SamplingParams(temperature=0, max_tokens=72),
            chat_template_kwargs=question.template,
        )
        assert transcript.text == question.read(reply.outputs[0].text, question.languages)[1]
        with pytest.raises(RequestError, match="the model translates nothing"):
            llm.transcribe([], task="translate")
