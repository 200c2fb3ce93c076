"""Prompts with sounds and videos: transformers' greedy tokens, the same bits in all settings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support import audio_models, video_models
from support.determinism import said
from support.variants import slow
from support.vision_models import make_vision_model

from shmllm import LLM, RequestOutput, SamplingParams
from shmllm.params.items import MODALITIES
from shmllm.worker import loading

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

MAX_TOKENS = 12
BASE: dict[str, Any] = {
    "max_model_len": 512,
    "num_threads": 1,
    "multiprocess": False,
    "mamba_block_size": 16,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"max_num_batched_tokens": 130, "long_prefill_token_threshold": 7},
    "few blocks": {"max_model_len": 224},
    "no cache": {"enable_prefix_caching": False, "max_num_seqs": 2},
    "two threads": {"num_threads": 2},
}
FEW_BLOCKS = {"exaone4_5": 31, "gemma4": 31, "gemma4, videos": 55}
"""The size of a pool that has room for about two prompts."""
HEARING = (
    *("qwen3_asr", "audioflamingo3", "glmasr", "granite_speech", "fun_asr_nano"),
    *("moss_transcribe_diarize", "musicflamingo", "nemotron_h_omni", "omniasr"),
)
"""Further models that hear and do not see."""
NAMES = [
    *("qwen2_audio", "voxtral", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
    *map(
        slow,
        ("exaone4_5", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe", "glm46v"),
    ),
    *map(slow, ("gemma4_unified", "gemma4_unified, videos")),
    *map(slow, ("glm_ocr", "muse_glimmer", "llava_onevision", "llava_next_video", "lfm3_vl")),
    *map(slow, ("gemma4", "gemma4, videos", "qwen2_5_omni", "qwen2_5_omni, videos")),
    *map(slow, ("qwen3_omni_moe", "qwen3_omni_moe, videos", *HEARING)),
]
RANDOM = np.random.default_rng(5)
SOUNDS = [
    (RANDOM.standard_normal(16_000) * 0.1).astype(np.float32),
    (np.sin(np.arange(20_001) * 0.05) / 2).astype(np.float32),
    (RANDOM.standard_normal(48_000) * 0.3).astype(np.float32),
]
MAKERS: dict[str, Callable[[Path], Any]] = {
    "qwen2_audio": audio_models.make_audio_model,
    "voxtral": partial(audio_models.make_audio_model, name="voxtral"),
    **{name: partial(audio_models.make_audio_model, name=name) for name in HEARING},
    "gemma4": audio_models.make_gemma4,
    "gemma4_unified": partial(audio_models.make_gemma4, name="gemma4_unified"),
    "qwen2_5_omni": audio_models.make_omni,
    "qwen3_omni_moe": partial(audio_models.make_omni, name="qwen3_omni_moe"),
}
IN_PARTS = ("Voxtral", "AudioFlamingo3", "GlmAsr", "MossTranscribeDiarize", "MusicFlamingo")
"""The beginnings of the architectures of models that hear sounds of any length."""
VIDEOS = [
    RANDOM.integers(0, 256, (8, 80, 100, 3), dtype=np.uint8),
    RANDOM.integers(0, 256, (5, 70, 60, 3), dtype=np.uint8),
]
IMAGE = RANDOM.integers(0, 256, (90, 130, 3), dtype=np.uint8)


class Subject(NamedTuple):
    """
    Attributes:
        directory: of the model.
        prompts: makes prompts for an LLM of it.
        expected: transformers' tokens, for a prompt, and the output that has its token ids.
    """

    directory: Path
    prompts: Callable[[LLM], list[Any]]
    expected: Callable[[LLM, Any, RequestOutput], list[int]]


def make(name: str, directory: Path) -> Subject:
    if name in MAKERS:
        model = MAKERS[name](directory)
        return Subject(
            directory,
            prompts_with_sounds,
            lambda llm, prompt, output: audio_models.reference_tokens(
                model, output.prompt_token_ids, sounds_of(prompt), MAX_TOKENS
            ),
        )
    model = make_vision_model(name.partition(",")[0], directory)

    def expected(llm: LLM, prompt: Any, output: RequestOutput) -> list[int]:
        (prepared,) = llm.front_end.prepare([prompt], SamplingParams(max_tokens=2))
        items = prepared.submitted.items
        return video_models.reference_tokens(model, output.prompt_token_ids, items, MAX_TOKENS)

    is_long = name.startswith("gemma4")  # in embeddings
    prompts = prompts_with_short_videos if is_long else prompts_with_videos
    return Subject(directory, prompts, expected)


def sounds_of(prompt: Any) -> list[Any]:
    given = prompt["multi_modal_data"]["audio"] if isinstance(prompt, dict) else []
    return [sound for sound, _ in (given if isinstance(given, list) else [given])]


def prompts_with_sounds(llm: LLM) -> list[Any]:
    mark = llm.front_end.items.mark("audio")

    def hear(text: str, *sounds: Any) -> dict[str, Any]:
        data = [(sound, audio_models.RATE) for sound in sounds]
        return {"prompt": text.replace("#", mark), "multi_modal_data": {"audio": data}}

    noise, tone, long = SOUNDS
    architecture = llm.front_end.info.model_type
    several = np.concatenate([long, noise, tone, long])
    longer = [hear("A # b", several)] if architecture.startswith(IN_PARTS) else []
    return [
        *longer,
        hear("Hear # now?", noise),
        hear("Both # and # here", noise, tone),
        hear("Both # and # here", tone, noise),
        hear("##", tone, tone),
        "only text, and some more of it",
        hear(f"{'a long beginning ' * 4}# end", long),
        hear("Hear # now!", tone),
    ]


def prompts_with_videos(llm: LLM) -> list[Any]:
    video, image = (llm.front_end.items.mark(kind) for kind in ("video", "image"))

    def see(text: str, **data: Any) -> dict[str, Any]:
        text = text.replace("#", video).replace("@", image)
        return {"prompt": text, "multi_modal_data": data}

    whole, short = VIDEOS
    slow_one = (short, {"fps": 0.5, "do_sample_frames": False})
    return [
        see("See # now and some more text", video=whole),
        see("See # now", video=slow_one),
        see("See # and @ then # ok", video=[short, whole], image=IMAGE),
        see("@# what", video=(whole, {"fps": 4.0}), image=IMAGE),
        "only text, and some more of it",
        see("##", video=[short, short]),
        see("A picture @", image=IMAGE),
    ]


def prompts_with_short_videos(llm: LLM) -> list[Any]:
    """Of one and two frames, each of which has 60 embeddings or more."""
    video, image = (llm.front_end.items.mark(kind) for kind in ("video", "image"))

    def see(text: str, **data: Any) -> dict[str, Any]:
        text = text.replace("#", video).replace("@", image)
        return {"prompt": text, "multi_modal_data": data}

    whole, short = VIDEOS[0][:2], VIDEOS[1][:1]
    return [
        see("See # now", video=whole),
        see("See # now", video=(whole, {"fps": 0.01, "do_sample_frames": False})),
        see("See # and @ then ok", video=[short], image=IMAGE),
        see("@# what", video=(short, {"fps": 4.0}), image=IMAGE),
        "only text, and some more of it",
        see("##", video=[short, whole[1:]]),
        see("A picture @", image=IMAGE),
    ]


@pytest.fixture(scope="module", params=NAMES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Subject:
    return make(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(
    scope="module",
    params=[
        *("qwen2_audio", "qwen3_vl"),
        *map(slow, ("voxtral", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "glm4v")),
        *map(slow, ("gemma4", "gemma4, videos", "qwen2_5_omni", "qwen2_5_omni, videos")),
        *map(slow, ("qwen3_omni_moe", "qwen3_omni_moe, videos", *HEARING)),
        slow("llava_onevision"),
    ],
)
def some_subject(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Subject:
    return make(request.param, tmp_path_factory.mktemp("models") / request.param)


def generate(llm: LLM, prompts: list[Any]) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=3)
    return llm.generate(prompts, params, use_tqdm=False)


def test_greedy_tokens_are_those_of_transformers(subject: Subject) -> None:
    with LLM(str(subject.directory), **BASE) as llm:
        prompts = subject.prompts(llm)
        outputs = generate(llm, prompts)
        for prompt, output in zip(prompts, outputs, strict=True):
            found = list(output.outputs[0].token_ids)
            assert found == subject.expected(llm, prompt, output)
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) > 3


def test_no_bit_depends_on_chunks_caches_preemption_and_threads(
    some_subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "MOST_EMBEDS", 0)  # the smallest encoder cache
    first: list[Any] | None = None
    few = {
        "num_gpu_blocks_override": FEW_BLOCKS.get(some_subject.directory.name, 15),
        "scheduler_reserve_full_isl": False,
    }
    for name, options in SETTINGS.items():
        options = options | (few if name == "few blocks" else {})
        with LLM(str(some_subject.directory), **BASE | {"dtype": "float32"} | options) as llm:
            prompts = some_subject.prompts(llm)
            found = [said(output) for output in generate(llm, prompts)]
            assert first is None or found == first, name
            first = found
            again = generate(llm, prompts)
            assert [said(output) for output in again] == first, f"{name}, from the prefix cache"
            alone = [said(generate(llm, [prompt])[0]) for prompt in reversed(prompts)]
            assert alone[::-1] == first, f"{name}, one at a time"
            if name == "few blocks":
                assert llm.get_metrics()["preemptions"] > 0


def test_an_engine_process_and_coroutines_give_the_same(some_subject: Subject) -> None:
    with LLM(str(some_subject.directory), **BASE) as llm:
        prompts = some_subject.prompts(llm)
        expected = [said(output) for output in generate(llm, prompts)]
    with LLM(str(some_subject.directory), **BASE | {"multiprocess": True}) as llm:
        assert [said(output) for output in generate(llm, prompts)] == expected
        before = llm.get_metrics()["item_hits"]
        llm.reset_prefix_cache()
        assert [said(output) for output in generate(llm, prompts)] == expected
        assert llm.get_metrics()["item_hits"] > before


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 130}], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", ["gemma4", "qwen2_5_omni", "qwen3_omni_moe"])
def test_images_sounds_and_videos_share_a_prompt(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = MAKERS[name](tmp_path)
    data = {"image": IMAGE, "audio": SOUNDS[1], "video": VIDEOS[0][:2]}
    with LLM(str(tmp_path), **BASE | options) as llm:
        image, audio, video = (llm.front_end.items.mark(kind) for kind in MODALITIES)
        text = f"See {image} and hear {audio} then {video} so"
        prompt = {"prompt": text, "multi_modal_data": data}
        (output,) = generate(llm, [prompt])
        (prepared,) = llm.front_end.prepare([prompt], SamplingParams(max_tokens=2))
    items = [each for each in prepared.submitted.items if each.modality != "audio"]
    sounds = audio_models.audio_inputs([SOUNDS[1]], name)
    expected = video_models.reference_tokens(
        model, output.prompt_token_ids, items, MAX_TOKENS, **sounds
    )
    assert list(output.outputs[0].token_ids) == expected
