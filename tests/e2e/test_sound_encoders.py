"""Encoder-decoders of sounds of any length: prompts, transcripts, the same bits in all settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.determinism import said
from support.sound_encoders import FIRST, RECIPES, make_sound_encoder, reference_tokens
from support.variants import slow
from support.whisper_models import RATE, make_sound

from shmllm import LLM, RequestError, SamplingParams
from shmllm.frontend.transcription import quality

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

BASE: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "multiprocess": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"max_num_batched_tokens": 8, "max_num_seqs": 2},
    "few blocks": {
        "num_gpu_blocks_override": 180,
        "max_num_seqs": 3,
        "scheduler_reserve_full_isl": False,
    },
    "no cache": {"enable_prefix_caching": False},
    "two threads": {"num_threads": 2},
}
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=1)
SOUNDS = [make_sound(seconds, seed) for seed, seconds in enumerate((1.0, 0.4, 2.3))]


def prompt_of(sound: Any, text: str) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"audio": (sound, RATE)}}


@pytest.mark.parametrize("name", [name if name in FIRST else slow(name) for name in RECIPES])
def test_prompts_and_transcripts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, recipe = make_sound_encoder(tmp_path, name), RECIPES[name]
    item = {"multi_modal_data": {"audio": (SOUNDS[0], RATE)}}
    with LLM(str(tmp_path), **BASE) as llm:
        forms = [
            prompt_of(SOUNDS[0], recipe.text),
            {"encoder_prompt": {"prompt": "", **item}, "decoder_prompt": recipe.text},
            prompt_of(SOUNDS[2], f"{recipe.text}some words"),
        ]
        outputs = llm.generate(forms, PARAMS, use_tqdm=False)
        for output, sound in zip(outputs, (SOUNDS[0], SOUNDS[0], SOUNDS[2]), strict=True):
            ids = output.prompt_token_ids
            wanted = reference_tokens(model, name, ids, sound, 10)
            assert output.outputs[0].token_ids == wanted
        for wrong, message in (
            (recipe.text, "has no audio"),
            (prompt_of(SOUNDS[0][:50], recipe.text), "is too short"),
            (prompt_of(make_sound(recipe.most_seconds + 1, 0), recipe.text), "at once"),
        ):
            with pytest.raises(RequestError, match=message):
                llm.generate(wrong, PARAMS, use_tqdm=False)
        monkeypatch.setattr(quality, "LEAST_LOGPROB", -1e9)  # random weights are never sure
        monkeypatch.setattr(quality, "MOST_COMPRESSION", 1e9)
        asked = {"language": recipe.language, "use_tqdm": False}
        (transcript,) = llm.transcribe((SOUNDS[0], RATE), **asked)
        params = SamplingParams(temperature=0, max_tokens=48)
        (reply,) = llm.generate(forms[0], params, use_tqdm=False)
        assert transcript.text == reply.outputs[0].text.strip()
        (long,) = llm.transcribe((make_sound(70, 3), RATE), **asked)
        assert long.error is None
        assert [segment.start for segment in long.segments] == sorted(
            segment.start for segment in long.segments
        )
        assert len(long.segments) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FIRST))
@pytest.mark.parametrize(
    "variant", [{}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}, {"quantization": "int8"}]
)
def test_bits_do_not_depend_on_settings(name: str, tmp_path: Path, variant: dict[str, Any]) -> None:
    make_sound_encoder(tmp_path, name)
    begin = RECIPES[name].text
    prompts = [prompt_of(sound, begin + "word " * n) for n, sound in enumerate(SOUNDS * 3)]
    found = {}
    for setting, options in SETTINGS.items():
        with LLM(str(tmp_path), **BASE | options | variant) as llm:
            together = [*map(said, llm.generate(prompts, PARAMS, use_tqdm=False))]
            alone = [said(llm.generate(each, PARAMS, use_tqdm=False)[0]) for each in prompts]
            assert together == alone, setting
            found[setting] = together
    assert all(each == found["whole"] for each in found.values())


def test_generation_config_has_what_a_decoder_begins_with(tmp_path: Path) -> None:
    make_sound_encoder(tmp_path, "cohere_asr")
    with LLM(str(tmp_path), **BASE) as llm, pytest.raises(RequestError, match="is empty"):
        llm.generate(prompt_of(SOUNDS[0], ""), PARAMS, use_tqdm=False)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"decoder_start_token_id": 300}))
    with LLM(str(tmp_path), **BASE) as llm:
        prompts = [prompt_of(SOUNDS[0], text) for text in ("", "<|startofcontext|>")]
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[300], [300, 301]]


def test_an_empty_prompt_is_the_models_own(tmp_path: Path) -> None:
    make_sound_encoder(tmp_path, "moonshine")
    item = {"multi_modal_data": {"audio": (SOUNDS[0], RATE)}}
    with LLM(str(tmp_path), **BASE) as llm:
        forms: list[Any] = [
            prompt_of(SOUNDS[0], ""),
            {"prompt_token_ids": [300], **item},
            {"encoder_prompt": item, "decoder_prompt": None},
            {"encoder_prompt": item, "decoder_prompt": ""},
        ]
        outputs = llm.generate(forms, PARAMS, use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == [[300]] * 4
        assert len({str(said(output)) for output in outputs}) == 1
        (words,) = llm.generate(prompt_of(SOUNDS[0], "ab"), PARAMS, use_tqdm=False)
        assert words.prompt_token_ids[0] == 300
        assert len(words.prompt_token_ids) > 1
        with pytest.raises(RequestError, match="translates nothing"):
            llm.transcribe([], task="translate")
        with pytest.raises(RequestError, match="cannot be told a language"):
            llm.transcribe([], language="de")
