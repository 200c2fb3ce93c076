"""Embeddings in place of images, sounds and videos (`enable_mm_embeds`): transformers makes them of
the items, and its greedy tokens are those of the items themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import audio_models, video_models
from support.determinism import said
from support.variants import slow
from support.vision_models import (
    TWO_SIZES,
    make_vision_model,
    reference_embeddings,
    reference_tokens,
)

from shmllm import LLM, RequestError, RequestOutput, SamplingParams
from shmllm.frontend.given_items import GivenItem, GivenItems

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

MAX_TOKENS = 8
BASE: dict[str, Any] = {
    "max_model_len": 1024,
    "num_threads": 1,
    "multiprocess": False,
    "mamba_block_size": 16,
    "enable_mm_embeds": True,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 100, "long_prefill_token_threshold": 7},
    "no cache": {"enable_prefix_caching": False, "max_num_seqs": 2},
    "another process": {"multiprocess": True},
}
WITHOUT_GRID = (
    *("internvl", "qianfan_ocr", "llava", "vipllava", "llava_next", "llava_onevision"),
    *("llava_next_video", "granite4_vision", "janus", "deepseek_vl", "deepseek_vl2"),
    *("deepseek_ocr", "deepseek_ocr2", "kimi_k25", "got_ocr2", "lighton_ocr"),
)
WITH_GRID = (
    *("qwen3_vl", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen2_5_omni", "qwen3_omni_moe"),
    *("glm4v", "glm46v", "glm_ocr", "exaone4_5", "hyperclovax_vision_v2", "dots_ocr"),
    *("paddleocr_vl", "lfm3_vl", "video_llama_3", "ernie4_5_vl_moe"),
)
FAST = "internvl", "qwen3_vl"
RANDOM = np.random.default_rng(5)
PICTURES = [RANDOM.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((90, 130), (60, 40))]
VIDEO = RANDOM.integers(0, 256, (8, 80, 100, 3), dtype=np.uint8)
SOUNDS = [(RANDOM.standard_normal(n) * 0.1).astype(np.float32) for n in (16_000, 20_001)]


def generate(llm: LLM, *prompts: Any) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2)
    return llm.generate(list(prompts), params, use_tqdm=False)


def prompt_of(llm: LLM, modality: str, data: Any) -> dict[str, Any]:
    mark = llm.front_end.items.mark(modality)  # type: ignore[arg-type]
    return {"prompt": f"Both {mark} and {mark} here", "multi_modal_data": {modality: data}}


def check_same_bits(directory: Path, prompt: Any, expected: RequestOutput) -> None:
    """Checks that other settings have the same tokens and log-probabilities."""
    for options in SETTINGS.values():
        with LLM(str(directory), **BASE | options) as llm:
            assert said(generate(llm, prompt)[0]) == said(expected)


@pytest.mark.parametrize(
    "name", [each if each in FAST else slow(each) for each in (*WITHOUT_GRID, *WITH_GRID)]
)
def test_embeddings_take_the_place_of_images(name: str, tmp_path: Path) -> None:
    model = make_vision_model(name, tmp_path)
    length = {"max_model_len": 2048} if name in TWO_SIZES else {}
    with LLM(str(tmp_path), **BASE | length) as llm:
        given = GivenItems([GivenItem("image", each) for each in PICTURES])
        parts = [each.prepared.parts for each in llm.front_end.items.ready("a prompt", given)]
        rows = [
            torch.cat([reference_embeddings(model, part.data, part.grid) for part in own])
            for own in parts
        ]
        data: Any = rows
        if name in WITH_GRID:
            grids = torch.tensor([part.grid for own in parts for part in own])
            data = {"image_embeds": torch.cat(rows), "image_grid_thw": grids}
        prompt = prompt_of(llm, "image", data)
        seen, output = generate(llm, prompt_of(llm, "image", PICTURES), prompt)
        assert output.prompt_token_ids == seen.prompt_token_ids
        images = [part for own in parts for part in own]
        tokens = reference_tokens(model, output.prompt_token_ids, images, MAX_TOKENS)
        assert list(output.outputs[0].token_ids) == tokens
        again = generate(llm, prompt)[0]
        assert said(again) == said(output)
        assert again.num_cached_tokens
        other = generate(llm, prompt_of(llm, "image", _negated(data)))[0]
        assert list(other.outputs[0].token_ids) != tokens
    if name in FAST:
        check_same_bits(tmp_path, prompt, output)


def _negated(data: Any) -> Any:
    if isinstance(data, dict):
        return data | {"image_embeds": -data["image_embeds"]}
    return [-each for each in data]


@pytest.mark.parametrize(
    "name", ["granite_speech", *map(slow, ("voxtral", "audioflamingo3", "fun_asr_nano", "glmasr"))]
)
def test_embeddings_take_the_place_of_sounds(name: str, tmp_path: Path) -> None:
    model = audio_models.make_audio_model(tmp_path, name)
    kind = model.config.model_type
    with LLM(str(tmp_path), **BASE) as llm:
        with_sounds = prompt_of(llm, "audio", [(each, audio_models.RATE) for each in SOUNDS])
        seen = generate(llm, with_sounds)[0]
        with torch.inference_mode():
            found = [
                model.get_audio_features(**audio_models.audio_inputs([each], kind))
                for each in SOUNDS
            ]
        width = model.config.text_config.hidden_size
        rows = [each.pooler_output.reshape(-1, width) for each in found]
        given = generate(llm, prompt_of(llm, "audio", rows))[0]
        assert given.prompt_token_ids == seen.prompt_token_ids
        ids = given.prompt_token_ids
        tokens = audio_models.reference_tokens(model, ids, SOUNDS, MAX_TOKENS)
        assert list(given.outputs[0].token_ids) == tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "exaone4_5"])
def test_embeddings_take_the_place_of_videos(name: str, tmp_path: Path) -> None:
    model = make_vision_model(name, tmp_path)
    with LLM(str(tmp_path), **BASE) as llm:
        with_videos = prompt_of(llm, "video", [(VIDEO, {"fps": 4.0})] * 2)
        (prepared,) = llm.front_end.prepare([with_videos], SamplingParams(max_tokens=2))
        items = prepared.submitted.items
        pairs = [video_models.patches_of_frames(model, item.data) for item in items]
        grids = torch.tensor([grid for _, grid in pairs])
        with torch.inference_mode():
            patches = torch.cat([patches for patches, _ in pairs])
            found = model.model.get_video_features(patches, grids).pooler_output
        data = {"video_embeds": torch.cat(list(found)), "video_grid_thw": grids}
        if name == "qwen2_5_vl":
            data["second_per_grid_ts"] = torch.tensor([item.frame_seconds for item in items])
        given = generate(llm, prompt_of(llm, "video", data))[0]
        tokens = video_models.reference_tokens(model, given.prompt_token_ids, items, MAX_TOKENS)
        assert list(given.outputs[0].token_ids) == tokens


def _prompts(llm: LLM, rows: Any) -> dict[str, Callable[[], Any]]:
    part = {"type": "image_embeds", "image_embeds": rows}
    chat = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]
    return {
        "list": lambda: generate(llm, prompt_of(llm, "image", [rows, rows])),
        "array": lambda: generate(llm, prompt_of(llm, "image", np.stack([rows.numpy()] * 2))),
        "dict": lambda: generate(llm, prompt_of(llm, "image", {"image_embeds": [rows, rows]})),
        "chat": lambda: llm.chat(chat, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False),
    }


def test_embeddings_have_several_forms_and_need_the_option(tmp_path: Path) -> None:
    make_vision_model("llava", tmp_path)
    with LLM(str(tmp_path), **BASE, limit_mm_per_prompt={"image": 0}) as llm:
        rows = torch.randn(9, 64)
        outputs = {name: call()[0] for name, call in _prompts(llm, rows).items()}
        assert said(outputs["list"]) == said(outputs["array"]) == said(outputs["dict"])
        with pytest.raises(RequestError, match="has 1 image; limit_mm_per_prompt allows 0"):
            generate(llm, prompt_of(llm, "image", PICTURES[0]))
        mark = llm.front_end.items.mark("image")
        named = {
            "prompt": mark,
            "multi_modal_data": {"image": [rows]},
            "multi_modal_uuids": {"image": ["a"]},
        }
        first = generate(llm, named)[0]
        assert said(generate(llm, named | {"multi_modal_data": {"image": [None]}})[0]) == said(
            first
        )
    with LLM(str(tmp_path), **BASE | {"enable_mm_embeds": False}) as llm:
        for call in _prompts(llm, rows).values():
            with pytest.raises(RequestError, match="'image_embeds' need an engine with enable_mm"):
                call()
