"""Prompts with images, videos and sounds of Qwen Omni are expanded as transformers' processor
does it, whose video processor needs torchvision and stays out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor

from shmllm.errors import EngineStartError, RequestError
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.items.registry import processors_of_model
from shmllm.frontend.placeholders.registry import placeholders_of_model

NAMES = (
    *("image_token", "video_token", "audio_token", "vision_bos_token", "vision_eos_token"),
    *("audio_bos_token", "audio_eos_token"),
)
"""The names of special tokens in a tokenizer."""


class Kind(NamedTuple):
    """
    Attributes:
        processor: transformers' class.
        architecture: the first of ``architectures``.
        texts: of the tokens in NAMES.
        ids: the fields of ``thinker_config`` that name the first three.
        settings: what preprocessor_config.json has beside PREPROCESSOR.
        image, video: the grids of IMAGE and of FRAMES.
        heard: arguments of the feature extractor.
    """

    processor: Any
    architecture: str
    texts: tuple[str, ...]
    ids: tuple[str, ...]
    settings: dict[str, Any]
    image: tuple[int, int, int]
    video: tuple[int, int, int]
    heard: dict[str, Any]


QWEN_2_5 = Kind(
    Qwen2_5OmniProcessor,
    "Qwen2_5OmniModel",
    (
        *("<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>", "<|vision_bos|>", "<|vision_eos|>"),
        *("<|audio_bos|>", "<|audio_eos|>"),
    ),
    ("image_token_index", "video_token_index", "audio_token_index"),
    {},
    (1, 4, 6),
    (2, 26, 22),
    {},
)
QWEN_3 = Kind(
    Qwen3OmniMoeProcessor,
    "Qwen3OmniMoeForConditionalGeneration",
    (
        *("<|image_pad|>", "<|video_pad|>", "<|audio_pad|>", "<|vision_start|>"),
        *("<|vision_end|>", "<|audio_start|>", "<|audio_end|>"),
    ),
    ("image_token_id", "video_token_id", "audio_token_id"),
    {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16},
    (1, 4, 6),
    (2, 26, 22),
    {"padding": True, "truncation": False},
)
KINDS = {
    "Qwen 2.5": QWEN_2_5,
    "other names": QWEN_2_5._replace(texts=tuple(f"<{name}>" for name in NAMES)),
    "Qwen 3": QWEN_3,
}
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
RANDOM = np.random.default_rng(4)
SOUNDS = [(RANDOM.standard_normal(n) * 0.1).astype(np.float32) for n in (7000, 48001)]
IMAGE = RANDOM.integers(0, 256, (60, 90, 3), dtype=np.uint8)
FRAMES = RANDOM.integers(0, 256, (4, 70, 56, 3), dtype=np.uint8)


class Model:
    """A processor of transformers, and what we make of its files."""

    def __init__(self, kind: Kind, make: Any, directory: Path, **settings: Any) -> None:
        self.kind, self.texts = kind, dict(zip(NAMES, kind.texts, strict=True))
        self.tokenizer = tokenizer = make([*kind.texts], **self.texts)
        self.theirs: Any = object.__new__(kind.processor)
        for name, text in self.texts.items():
            setattr(self.theirs, name, text)
        self.theirs.image_processor = self.theirs.video_processor = SimpleNamespace(merge_size=2)
        self.theirs.feature_extractor = WhisperFeatureExtractor(feature_size=128)
        content = json.dumps(PREPROCESSOR | {"chunk_length": 30} | kind.settings | settings)
        (directory / "preprocessor_config.json").write_text(content)
        tokenizer.save_pretrained(directory)
        ids = zip(kind.ids, tokenizer.convert_tokens_to_ids([*kind.texts][:3]), strict=True)
        config = {"architectures": [kind.architecture], "thinker_config": dict(ids)}
        self.ours = processors_of_model(directory, config)

    def encode(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return found

    def expanded(self, prompt: str, items: dict[str, PreparedItem], sound: Any) -> str:
        grids = {name: [np.array(item.grid)] for name, item in items.items()}
        given = {"load_audio_from_video": False}
        kwargs = {"sampling_rate": 16000, "return_attention_mask": True} | self.kind.heard
        _, (heard,) = self.theirs._process_audio([sound], **kwargs)
        seen = self.theirs.replace_image_token({"image_grid_thw": grids["image"]}, 0)
        watched = self.theirs.replace_video_token({"video_grid_thw": grids["video"]}, 0, **given)
        for name, text in (("image", seen), ("video", watched), ("audio", heard)):
            prompt = prompt.replace(self.texts[f"{name}_token"], text)
        return prompt


@pytest.fixture(params=[*KINDS])
def model(
    request: pytest.FixtureRequest, make_tokenizer: Callable[..., Any], tmp_path: Path
) -> Model:
    return Model(KINDS[request.param], make_tokenizer, tmp_path)


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
    behind = 0 if model.kind.heard else 159
    assert items["audio"].grid == ((len(SOUNDS[sound]) + behind) // 160, 1, 1)
    assert items["audio"].data.shape == (items["audio"].grid[0], 128)
    assert items["video"].frame_seconds == 1.0
    assert items["image"].grid == model.kind.image  # its bounds are 3136 and 12845056 pixels
    assert items["video"].grid == model.kind.video  # those of frames 128 and 768 squares


def test_features_are_those_of_transformers_without_frames_behind(model: Model) -> None:
    extractor, audio = model.theirs.feature_extractor, model.ours["audio"]
    for sound in SOUNDS:
        silence = 0 if model.kind.heard else extractor.n_samples - len(sound)
        whole = np.pad(sound, (0, silence))
        (found,) = extractor._np_extract_fbank_features(whole[None], "cpu")
        ours = audio.prepare(audio.open("a sound", (sound, 16000))).data
        np.testing.assert_allclose(ours, found.T[: len(ours)], rtol=0, atol=2e-7)
        assert not model.kind.heard or ours.shape == found.T.shape


@pytest.mark.parametrize(("kind", "audio"), [(QWEN_2_5, 151646), (QWEN_3, 151646)])
def test_defaults_are_those_of_real_files(kind: Kind, audio: int, tmp_path: Path) -> None:
    config = {"architectures": [kind.architecture], "thinker_config": {}}
    found: Any = placeholders_of_model(tmp_path, config)
    image, video, sound, begin, end, *around = kind.texts
    marks = [f"{begin}{image}{end}", f"{begin}{video}{end}", f"{around[0]}{sound}{around[1]}"]
    assert [each.mark for each in found.values()] == marks
    assert [each.token_id for each in found.values()] == [151655, 151656, audio]
    assert found["audio"].num_mels == 128
    assert found["image"].patch_size == kind.settings.get("patch_size", 14)


@pytest.mark.parametrize("seconds", [30, 300])
def test_the_feature_extractor_says_how_long_a_sound_is(
    seconds: int, make_tokenizer: Callable[..., Any], tmp_path: Path
) -> None:
    audio: Any = Model(QWEN_2_5, make_tokenizer, tmp_path, chunk_length=seconds).ours["audio"]
    assert audio.most_seconds == seconds


def test_qwen_3_hears_longer_sounds(make_tokenizer: Callable[..., Any], tmp_path: Path) -> None:
    audio: Any = Model(QWEN_3, make_tokenizer, tmp_path).ours["audio"]
    assert audio.most_seconds == 40 * 60
    long = audio.prepare(audio.open("a sound", np.tile(SOUNDS[1], 11)))
    assert (long.grid, long.num_tokens) == ((3300, 1, 1), 33 * 13)
    with pytest.raises(RequestError, match="is too short: it has 159 samples"):
        audio.prepare(audio.open("a sound", SOUNDS[0][:159]), name="a sound")


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (QWEN_2_5, {"chunk_length": 301}, "of up to 30000 frames, .* makes 128 of 30100"),
        (QWEN_2_5, {"feature_size": 80}, "takes 128 features .* makes 80 of 3000"),
        (QWEN_3, {"feature_size": 80}, "takes 128 features .* makes 80 of 240000"),
        (QWEN_3, {"feature_extractor_type": "Gemma4AudioFeatureExtractor"}, "needs Whisper's"),
    ],
)
def test_settings_that_do_not_suit_the_tower_are_refused(
    kind: Kind,
    settings: dict[str, Any],
    message: str,
    make_tokenizer: Callable[..., Any],
    tmp_path: Path,
) -> None:
    with pytest.raises(EngineStartError, match=message):
        Model(kind, make_tokenizer, tmp_path, **settings)
