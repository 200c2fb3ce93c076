"""Prompts with images, videos and sounds of Qwen 2.5 Omni are expanded as transformers' processor
does it, whose video processor needs torchvision and stays out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor

from shmllm.errors import EngineStartError
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.items.registry import processors_of_model
from shmllm.frontend.placeholders.registry import placeholders_of_model

TOKENS = {
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
IDS = ("image_token_index", "video_token_index", "audio_token_index")
PREPROCESSOR: dict[str, Any] = {
    "chunk_length": 300,
    "dither": 0.0,
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "hop_length": 160,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "max_pixels": 12845056,
    "merge_size": 2,
    "min_pixels": 3136,
    "n_fft": 400,
    "n_samples": 4800000,
    "nb_max_frames": 30000,
    "padding_side": "right",
    "padding_value": 0.0,
    "patch_size": 14,
    "processor_class": "Qwen2_5OmniProcessor",
    "return_attention_mask": True,
    "sampling_rate": 16000,
    "temporal_patch_size": 2,
}
"""The file of the model's authors."""
ARCHITECTURE = {"architectures": ["Qwen2_5OmniModel"]}
RANDOM = np.random.default_rng(4)
SOUNDS = [(RANDOM.standard_normal(n) * 0.1).astype(np.float32) for n in (7000, 48001)]
IMAGE = RANDOM.integers(0, 256, (60, 90, 3), dtype=np.uint8)
FRAMES = RANDOM.integers(0, 256, (4, 70, 56, 3), dtype=np.uint8)


class Model:
    """A processor of transformers, and what we make of its files."""

    def __init__(self, tokenizer: Any, directory: Path, **settings: Any) -> None:
        self.tokenizer = tokenizer
        self.theirs: Any = object.__new__(Qwen2_5OmniProcessor)
        for name, text in TOKENS.items():
            setattr(self.theirs, name, text)
        self.theirs.image_processor = self.theirs.video_processor = SimpleNamespace(merge_size=2)
        self.theirs.feature_extractor = WhisperFeatureExtractor(feature_size=128)
        content = json.dumps(PREPROCESSOR | {"chunk_length": 30} | settings)
        (directory / "preprocessor_config.json").write_text(content)
        tokenizer.save_pretrained(directory)
        ids = dict(zip(IDS, tokenizer.convert_tokens_to_ids([*TOKENS.values()][:3]), strict=True))
        self.ours = processors_of_model(directory, ARCHITECTURE | {"thinker_config": ids})

    def encode(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return found

    def expanded(self, prompt: str, items: dict[str, PreparedItem], sound: Any) -> str:
        grids = {name: [np.array(item.grid)] for name, item in items.items()}
        given = {"load_audio_from_video": False}
        kwargs = {"sampling_rate": 16000, "return_attention_mask": True}
        _, (heard,) = self.theirs._process_audio([sound], **kwargs)
        seen = self.theirs.replace_image_token({"image_grid_thw": grids["image"]}, 0)
        watched = self.theirs.replace_video_token({"video_grid_thw": grids["video"]}, 0, **given)
        for name, text in (("image", seen), ("video", watched), ("audio", heard)):
            prompt = prompt.replace(TOKENS[f"{name}_token"], text)
        return prompt


@pytest.fixture(params=["usual names", "other names"])
def model(
    request: pytest.FixtureRequest,
    make_tokenizer: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Model:
    if request.param == "other names":
        for name in TOKENS:
            monkeypatch.setitem(TOKENS, name, f"<{name}>")
    return Model(make_tokenizer([*TOKENS.values()], **TOKENS), tmp_path)


@pytest.mark.parametrize(
    ("form", "sound"), [("See {} and {}, hear {}", 0), ("{}{}{}", 1), ("{}\n\n{}\n{} ", 0)]
)
def test_prompts_are_expanded_as_transformers_expands_them(
    model: Model, form: str, sound: int
) -> None:
    given = {"image": IMAGE, "video": FRAMES, "audio": (SOUNDS[sound], 16000)}
    items = {
        name: processor.prepare(processor.open(name, given[name]))
        for name, processor in model.ours.items()
    }
    prompt = form.format(*(model.ours[name].mark for name in ("image", "video", "audio")))
    text, ids = prompt, model.encode(prompt)
    for name, processor in model.ours.items():
        text = processor.expand_text("prompt", text, [items[name]])
        ids = processor.expand_ids("prompt", ids, [items[name]], model.encode)
    assert text == model.expanded(prompt, items, SOUNDS[sound])
    assert ids == model.encode(text)
    for name, processor in model.ours.items():
        (((begin, end),),) = processor.runs("prompt", ids, [items[name]])
        assert end - begin == items[name].num_tokens
    assert items["audio"].grid == (-(-len(SOUNDS[sound]) // 160), 1, 1)
    assert items["audio"].data.shape == (items["audio"].grid[0], 128)
    assert items["video"].frame_seconds == 1.0
    assert items["image"].grid == (1, 4, 6)  # its bounds are 3136 and 12845056 pixels
    assert items["video"].grid == (2, 26, 22)  # those of frames 128 and 768 squares


def test_features_are_those_of_transformers_without_frames_behind(model: Model) -> None:
    extractor, audio = model.theirs.feature_extractor, model.ours["audio"]
    for sound in SOUNDS:
        whole = np.pad(sound, (0, extractor.n_samples - len(sound)))
        (found,) = extractor._np_extract_fbank_features(whole[None], "cpu")
        ours = audio.prepare(audio.open("a sound", (sound, 16000))).data
        np.testing.assert_allclose(ours, found.T[: len(ours)], rtol=0, atol=2e-7)


def test_defaults_are_those_of_real_files(tmp_path: Path) -> None:
    found: Any = placeholders_of_model(tmp_path, ARCHITECTURE | {"thinker_config": {}})
    assert [each.mark for each in found.values()] == [
        "<|vision_bos|><|IMAGE|><|vision_eos|>",
        "<|vision_bos|><|VIDEO|><|vision_eos|>",
        "<|audio_bos|><|AUDIO|><|audio_eos|>",
    ]
    assert [each.token_id for each in found.values()] == [151655, 151656, 151646]
    assert (found["audio"].num_mels, found["image"].patch_size) == (128, 14)


@pytest.mark.parametrize("seconds", [30, 300])
def test_the_feature_extractor_says_how_long_a_sound_is(
    seconds: int, make_tokenizer: Callable[..., Any], tmp_path: Path
) -> None:
    tokenizer = make_tokenizer([*TOKENS.values()], **TOKENS)
    audio: Any = Model(tokenizer, tmp_path, chunk_length=seconds).ours["audio"]
    assert audio.most_seconds == seconds


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk_length": 301}, "of up to 30000 frames, the feature extractor makes 128 of 30100"),
        ({"feature_size": 80}, "takes 128 features of up to 3000 frames, .* makes 80 of 3000"),
    ],
)
def test_settings_that_do_not_suit_the_tower_are_refused(
    settings: dict[str, Any],
    message: str,
    make_tokenizer: Callable[..., Any],
    tmp_path: Path,
) -> None:
    tokenizer = make_tokenizer([*TOKENS.values()], **TOKENS)
    with pytest.raises(EngineStartError, match=message):
        Model(tokenizer, tmp_path, **settings)
