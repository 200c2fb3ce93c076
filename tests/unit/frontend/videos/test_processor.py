"""What becomes of videos: pixels, grids, times, identities."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.programs import run_source
from support.variants import slow
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from shmllm.errors import EngineStartError, RequestError
from shmllm.frontend.items.registry import processors_of_model
from shmllm.frontend.videos.processor import VideoProcessor

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": {"architectures": ["Qwen2VLForConditionalGeneration"]},
    "qwen2.5": {"architectures": ["Qwen2_5_VLForConditionalGeneration"]},
    "qwen3": {"architectures": ["Qwen3VLForConditionalGeneration"]},
}
BOUNDS = {"shortest_edge": 3136, "longest_edge": 40000}
FRAMES = np.random.default_rng(1).integers(0, 256, (24, 50, 70, 3), dtype=np.uint8)
NAME = "prompt 3: video 1"


def processors(directory: Path, family: str, **fields: Any) -> dict[Any, Any]:
    patch = 16 if family == "qwen3" else 14
    image = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": patch, "size": BOUNDS}
    (directory / "preprocessor_config.json").write_text(json.dumps(image))
    own = {"size": BOUNDS, "patch_size": patch} | fields
    (directory / "video_preprocessor_config.json").write_text(json.dumps(own))
    return processors_of_model(directory, CONFIGS[family])


def model(directory: Path, family: str, **fields: Any) -> VideoProcessor:
    found = processors(directory, family, **fields)["video"]
    assert isinstance(found, VideoProcessor)
    return found


@pytest.fixture(params=[slow("qwen2"), "qwen2.5", "qwen3"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def videos(family: str, tmp_path: Path) -> VideoProcessor:
    return model(tmp_path, family)


def prepare(processor: VideoProcessor, value: Any, **overrides: Any) -> Any:
    return processor.prepare(processor.open(NAME, value), overrides, NAME)


def identity(processor: VideoProcessor, value: Any, **overrides: Any) -> bytes:
    return processor.identity(processor.open(NAME, value), overrides, NAME)


def test_frames_have_the_pixels_of_images_of_that_size(family: str, tmp_path: Path) -> None:
    size = {"shortest_edge": 14000, "longest_edge": 15000}
    if family == "qwen3":  # the bounds of all frames
        size = {name: 4 * value for name, value in size.items()}
    found = processors(tmp_path, family, size=size)
    item = prepare(found["video"], FRAMES[:4])
    assert item.data.flags.c_contiguous
    assert not item.data.flags.writeable
    height, width = item.data.shape[1:3]
    assert (height, width) != (50, 70)
    expected = [
        np.asarray(Image.fromarray(each).resize((width, height), Image.Resampling.BICUBIC))
        for each in FRAMES[:4]
    ]
    assert item.data.tolist() == np.stack(expected).tolist()
    bounds = {"min_pixels": 14000, "max_pixels": 15000}
    image = found["image"].prepare(Image.fromarray(FRAMES[2]), bounds, NAME)
    assert image.data[0].tolist() == item.data[2].tolist()


def test_the_last_of_an_odd_number_of_frames_is_repeated(videos: VideoProcessor) -> None:
    for count in (1, 2, 3, 5):
        item = prepare(videos, FRAMES[:count])
        grid = item.grid
        assert grid[0] == (count + 1) // 2
        assert len(item.data) == 2 * grid[0]
        assert item.num_tokens == grid[0] * grid[1] * grid[2] // 4
        if count % 2:
            assert item.data[-1].tolist() == item.data[-2].tolist()
        else:
            assert item.data[-1].tolist() != item.data[-2].tolist()


METADATA: list[dict[str, Any]] = [
    {"fps": 24, "do_sample_frames": False},
    {"fps": 0.5, "do_sample_frames": False},
    {"fps": 29.97, "total_num_frames": 300},
    {"fps": 30.0, "total_num_frames": 300, "frames_indices": [0, 7, 100, 101, 180, 250, 299]},
]


@pytest.mark.parametrize("metadata", METADATA)
def test_times_are_those_of_transformers(videos: VideoProcessor, metadata: dict[str, Any]) -> None:
    for count in (4, 7):
        indices = metadata.get("frames_indices") or list(range(count))
        count = len(indices)
        item = prepare(videos, (FRAMES[:count], metadata))
        expected = Qwen3VLProcessor._calculate_timestamps(
            SimpleNamespace(), list(indices), metadata["fps"], 2
        )
        assert list(item.times) == [f"<{time:.1f} seconds>" for time in expected]
        total = metadata.get("total_num_frames") or count
        theirs = VideoMetadata(total_num_frames=total, fps=metadata["fps"], frames_indices=indices)
        assert item.frame_seconds == 2 / theirs.sampled_fps


def test_frames_that_are_chosen_keep_their_times(videos: VideoProcessor) -> None:
    item = prepare(videos, (FRAMES, {"fps": 6}), do_sample_frames=True, fps=1.5)
    indices = [0, 4, 8, 12, 16, 20] if len(item.data) == 6 else []
    if "Qwen3" in repr(videos._rules):
        indices = [0, 5, 9, 14, 18, 23]
    every = prepare(videos, (FRAMES, {"fps": 6, "do_sample_frames": False}))
    assert len(item.data) == len(indices)
    pairs = zip(indices[::2], indices[1::2], strict=True)
    assert list(item.times) == [f"<{(first + last) / 12:.1f} seconds>" for first, last in pairs]
    assert item.frame_seconds == 2 / (6 / 24 * 6)
    same = prepare(
        videos, (FRAMES[indices], {"fps": 6, "total_num_frames": 24, "frames_indices": indices})
    )
    assert same.data.tolist() == item.data.tolist()
    assert (same.times, same.frame_seconds) == (item.times, item.frame_seconds)
    assert len(every.data) == 24


def test_frames_without_a_rate_are_all_used(videos: VideoProcessor) -> None:
    for overrides in ({}, {"do_sample_frames": True}, {"num_frames": 4}):
        item = prepare(videos, FRAMES, **overrides)
        assert len(item.data) == 24
    assert prepare(videos, (FRAMES, {"fps": 2}), do_sample_frames=False).grid[0] == 12


def test_families_choose_of_frames_with_a_rate_as_their_classes_do(tmp_path: Path) -> None:
    given = FRAMES, {"fps": 6}
    assert prepare(model(tmp_path, "qwen2.5"), given).grid[0] == 12
    assert prepare(model(tmp_path, "qwen3"), given).grid[0] == 4  # 2 a second


def test_an_encoded_video_is_chosen_from(
    videos: VideoProcessor, encoded: Callable[..., bytes]
) -> None:
    data = encoded(16, 8, step=12)
    item = prepare(videos, data)  # two seconds of which two frames each are used
    assert item.grid[0] == 2
    assert item.frame_seconds == 1.0
    assert item.times[0] > "<0.0 seconds>"
    values = item.data[:, 10, 10, 0].astype(int)
    assert np.diff(values).min() > 20
    assert len(prepare(videos, data, num_frames=8).data) == 8
    assert len(prepare(videos, data, fps=4, max_frames=6).data) == 6
    with pytest.raises(RequestError, match=f"^{NAME}: mm_processor_kwargs: 'fps' and 'num_frames'"):
        prepare(videos, data, num_frames=8, fps=4)


def test_an_identity_is_that_of_everything_that_decides_the_item(
    family: str, tmp_path: Path, encoded: Callable[..., bytes]
) -> None:
    videos = model(tmp_path, family)
    frames = FRAMES[:4]
    changed = frames.copy()
    changed[2, 3, 4, 1] ^= 1
    data = encoded(4)
    given: list[Any] = [
        frames,
        changed,
        frames[[1, 0, 2, 3]],
        frames[:3],
        frames.reshape(4, 70, 50, 3),
        (frames, {"fps": 2}),
        (frames, {"fps": 3}),
        (frames, {"fps": 3, "do_sample_frames": False}),
        (frames, {"fps": 3, "total_num_frames": 9}),
        (frames, {"fps": 3, "total_num_frames": 9, "frames_indices": [0, 1, 2, 4]}),
        data,
        encoded(5),
    ]
    found = [identity(videos, each) for each in given]
    assert len(set(found)) == len(given)
    assert {len(each) for each in found} == {32}
    assert identity(videos, list(frames)) == found[0]
    assert identity(videos, (frames, {"fps": 2.0})) == found[5]
    fields: list[dict[str, Any]] = [
        {"fps": 3},
        {"resample": 2},
        {"do_rescale": False},
        {"image_std": [1, 1, 1]},
        {"size": {"shortest_edge": 3136, "longest_edge": 50000}},
    ]
    for value, own in ((frames, found[0]), (data, found[10])):
        others = [identity(model(tmp_path, family, **each), value) for each in fields]
        assert len({own, *others}) == 1 + len(fields)
        assert identity(videos, value, fps=3) == others[0]
        assert identity(videos, value, fps=2, max_frames=768) == own


def test_sizes_tell_videos_of_a_name_apart(
    videos: VideoProcessor, encoded: Callable[..., bytes]
) -> None:
    assert videos.size(videos.open(NAME, FRAMES)) == (24, 70, 50)
    data = encoded(3)
    assert videos.size(videos.open(NAME, data)) == (len(data),)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"fpss": 3}, "mm_processor_kwargs: 'fpss' is not supported for videos; did you mean 'fp"),
        ({"max_pixels": -3}, "mm_processor_kwargs: .*must be a positive integer, not -3"),
        ({"do_resize": False}, "without 'do_resize' both sides must be multiples of (28|32) pix"),
        (
            {"use_audio_in_video": True},
            "mm_processor_kwargs: 'use_audio_in_video' is not supp",
        ),
    ],
)
def test_errors_have_the_videos_name(
    videos: VideoProcessor, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=f"^{NAME}: {message}"):
        prepare(videos, FRAMES[:2], **overrides)


def test_the_sound_of_a_video_may_be_left_out_by_name(videos: VideoProcessor) -> None:
    assert "use_audio_in_video" in videos.known_overrides
    plain, named = identity(videos, FRAMES), identity(videos, FRAMES, use_audio_in_video=False)
    assert named == plain
    assert prepare(videos, FRAMES[:2], use_audio_in_video=False).num_tokens


def test_frames_that_are_not_resized_stay(videos: VideoProcessor) -> None:
    frames = np.ascontiguousarray(np.resize(FRAMES, (2, 224, 448, 3)))
    item = prepare(videos, frames, do_resize=False)
    assert item.data.tobytes() == frames.tobytes()


@pytest.mark.parametrize("family", ["qwen3"])
def test_frames_are_not_enlarged_beyond_what_an_engine_takes(videos: VideoProcessor) -> None:
    size = {"shortest_edge": 2**31 - 1, "longest_edge": 2**31 - 1}
    with pytest.raises(RequestError, match=rf"{NAME}: 24 frames of .* more than 268,435,456: use"):
        prepare(videos, FRAMES, size=size)


def test_narrow_frames_are_refused_with_the_name(videos: VideoProcessor) -> None:
    with pytest.raises(RequestError, match=f"^{NAME}: .*8000x32 pixels (is|are) too narrow"):
        prepare(videos, np.zeros((2, 32, 8000, 3), np.uint8))


def test_settings_that_do_not_suit_the_tower_are_refused(family: str, tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="the image processor has 15 and 2"):
        model(tmp_path, family, patch_size=15)
    with pytest.raises(EngineStartError, match=r"one of 2 frames, .* temporal_patch_size is 3"):
        model(tmp_path, family, temporal_patch_size=3)


def test_libraries_are_imported_with_the_first_video(tmp_path: Path) -> None:
    processors(tmp_path, "qwen3")
    source = f"""
import sys
from pathlib import Path
import shmllm.frontend.videos.opening, shmllm.frontend.items.files
from shmllm.frontend.items.registry import processors_of_model
found = processors_of_model(Path({str(tmp_path)!r}), {CONFIGS["qwen3"]!r})["video"]
assert found.expand_text("prompt", "no video", []) == "no video"
assert {{"PIL", "torch", "transformers", "av"}}.isdisjoint(sys.modules), "imported"
"""
    assert run_source(source).returncode == 0
