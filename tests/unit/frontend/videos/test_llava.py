"""Videos of LLaVA-OneVision and LLaVA-NeXT-Video: frames have the pixels that transformers' image
processors make, and prompts as many tokens as its processors write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import LlavaNextVideoConfig, LlavaOnevisionConfig
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava_next_video.processing_llava_next_video import LlavaNextVideoProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from shmllm.errors import EngineStartError, RequestError
from shmllm.formats.image_settings import pixel_table, settings_of
from shmllm.frontend.items.registry import processors_of_model
from shmllm.frontend.placeholders.registry import placeholders_of_model
from shmllm.frontend.videos.processor import VideoProcessor

SIDE, PATCH = 70, 14
FIXED = {"height": SIDE, "width": SIDE}
FRAMES = np.random.default_rng(1).integers(0, 256, (12, 50, 90, 3), dtype=np.uint8)
SIZES: dict[str, dict[str, Any]] = {
    "LlavaOnevision": {"size": FIXED},
    "LlavaNextVideo": {"size": {"shortest_edge": SIDE}, "crop_size": FIXED},
}
CONFIGS: dict[str, Any] = {
    "LlavaOnevision": LlavaOnevisionConfig,
    "LlavaNextVideo": LlavaNextVideoConfig,
}
NAMES = [*SIZES]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def processor(
    name: str, tokenizer: Any, directory: Path, side: int = SIDE, **fields: Any
) -> VideoProcessor:
    tiles = "LlavaOnevision" if name == "LlavaOnevision" else "LlavaNext"
    pinpoints = [[side, 2 * side], [2 * side, side]]
    image = {"image_processor_type": f"{tiles}ImageProcessor", "image_grid_pinpoints": pinpoints}
    image |= {"size": {"height": side, "width": side}, "do_center_crop": True, "do_pad": True}
    if name == "LlavaNextVideo":
        image |= {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    video = {"video_processor_type": f"{name}VideoProcessor", **SIZES[name], **fields}
    files = {"preprocessor": image, "video_preprocessor": video}
    for file, content in files.items():
        (directory / f"{file}_config.json").write_text(json.dumps(content))
    tokenizer.save_pretrained(directory)
    config = {
        "architectures": [f"{name}ForConditionalGeneration"],
        "video_token_index": tokenizer.convert_tokens_to_ids("<video>"),
        "vision_config": {"image_size": side, "patch_size": PATCH},
        "image_grid_pinpoints": pinpoints,
    }
    found = processors_of_model(directory, config)["video"]
    assert isinstance(found, VideoProcessor)
    return found


@pytest.fixture
def videos(name: str, make_tokenizer: Callable[..., Any], tmp_path: Path) -> VideoProcessor:
    return processor(name, make_tokenizer(["<image>", "<video>"]), tmp_path)


def test_frames_have_the_pixels_of_transformers(name: str, videos: VideoProcessor) -> None:
    item = videos.prepare(videos.open("a video", FRAMES[:3]))
    read = settings_of(SIZES[name], "file", f"{name}VideoProcessor")
    kind: Any = SiglipImageProcessorPil if name == "LlavaOnevision" else CLIPImageProcessorPil
    means = {"image_mean": list(read.mean), "image_std": list(read.std), "resample": 3}
    theirs = kind(**SIZES[name], **means)([Image.fromarray(each) for each in FRAMES[:3]])
    planes = np.moveaxis(item.data, -1, 1)
    ours = pixel_table(read)[np.arange(3)[:, None, None], planes]
    assert np.array_equal(ours, np.stack(theirs["pixel_values"]))
    assert item.grid == (3, 1, 1)


def test_prompts_are_expanded_as_transformers_expands_them(
    name: str, videos: VideoProcessor
) -> None:
    kind: Any = {"LlavaOnevision": LlavaOnevisionProcessor}.get(name, LlavaNextVideoProcessor)
    theirs = kind.__new__(kind)
    theirs.video_token, theirs.patch_size, theirs.num_image_tokens = "<video>", PATCH, 25
    for count in (1, 5):
        item = videos.prepare(videos.open("a video", FRAMES[:count]))
        pixels = {"pixel_values_videos": [np.zeros((count, 3, SIDE, SIDE))]}
        if name == "LlavaOnevision":
            expected = theirs.replace_video_token(pixels, 0)
        else:  # which counts squares that the edge cuts, too, and refuses them then
            expected = "<video>" * (count * (SIDE // PATCH // 2) ** 2)
            even = {"pixel_values_videos": [np.zeros((count, 3, 56, 56))]}
            assert theirs.replace_video_token(even, 0) == "<video>" * count * 4
        assert videos.expand_text("prompt", "a <video>b", [item]) == f"a {expected}b"
        assert item.num_tokens == len(expected) // len("<video>")


def test_of_an_encoded_video_some_frames_are_used(
    name: str, videos: VideoProcessor, encoded: Callable[..., bytes]
) -> None:
    data = videos.open("a video", encoded(40, 8))
    usual = {"LlavaOnevision": 32}.get(name, 8)
    assert len(videos.prepare(data).data) == usual
    assert len(videos.prepare(data, {"num_frames": 5}).data) == 5
    assert len(videos.prepare(data, {"fps": 2}).data) == 10
    given = videos.open("a video", (FRAMES, {"fps": 4.0}))
    assert len(videos.prepare(given).data) == len(FRAMES)
    assert len(videos.prepare(given, {"do_sample_frames": True, "num_frames": 4}).data) == 4


def test_frames_of_other_sizes_are_refused(
    name: str, make_tokenizer: Callable[..., Any], tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(["<image>", "<video>"])
    with pytest.raises(EngineStartError, match="takes frames of 42x42 pixels, and the video proc"):
        processor(name, tokenizer, tmp_path, side=42)
    with pytest.raises(EngineStartError, match="and the video processor makes frames of"):
        processor(name, tokenizer, tmp_path, do_resize=False, do_center_crop=False)
    many = np.broadcast_to(FRAMES[0], (20_000, *FRAMES[0].shape))
    found = processor(name, tokenizer, tmp_path)
    opened = SimpleNamespace(
        pictures=[Image.fromarray(FRAMES[0])] * len(many), is_chosen=True, rate=None
    )
    with pytest.raises(RequestError, match="20,000 frames of 70x70 pixels are 294,000,000 bytes"):
        found.prepare(opened)  # type: ignore[arg-type]


def test_defaults_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    names = {"architectures": [f"{name}ForConditionalGeneration"]}
    whole = CONFIGS[name]().to_dict() | names
    found = placeholders_of_model(tmp_path, whole)
    for kind, placeholder in found.items():
        assert placeholder.token_id == whole[f"{kind}_token_index"]
    given = names | {"vision_config": whole["vision_config"]}
    assert placeholders_of_model(tmp_path, given) == found
