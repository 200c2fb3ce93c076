"""Images and videos of Muse Glimmer are prepared as by transformers' processors, and prompts
expanded as there.

These need torchvision, which resizes pixels; here pillow takes its place.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.torchvision_modules import (
    import_without_torchvision,
    preprocessed,
    resize_with_pillow,
)
from support.video_processors import muse_module
from transformers import MuseGlimmerConfig
from transformers.video_utils import VideoMetadata

from shmllm.errors import EngineStartError, RequestError
from shmllm.formats.image_settings import pixel_table, settings_of
from shmllm.frontend.images.rules.registry import rules_of_model
from shmllm.frontend.items.registry import processors_of_model
from shmllm.frontend.placeholders.registry import placeholders_of_model
from shmllm.frontend.videos.rules.registry import FAMILIES

IMAGES = import_without_torchvision("muse_glimmer.image_processing_muse_glimmer")
PROCESSOR = import_without_torchvision("muse_glimmer.processing_muse_glimmer").MuseGlimmerProcessor
VIDEO = "MuseGlimmerVideoProcessor"
NAMES = {"architectures": ["MuseGlimmerForConditionalGeneration"]}
TOKENS = {"image_token_id": "<|patch|>", "video_token_id": "<|video|>"}
MARKS = [
    *TOKENS.values(),
    *("<|image_start|>", "<|image_end|>", "<|vid_start|>", "<|vid_end|>"),
    "<|vid_frame_separator|>",
]
RATE = 12.5
FRAMES = {(3, 60, 70): [0, 5, 9], (4, 100, 50): [3, 4, 50, 80]}


def test_images_are_those_of_transformers(
    random_image: Callable[..., Image.Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    resize_with_pillow(monkeypatch)
    changes = {"max_image_tokens": 12}
    read = settings_of(changes, "file", "MuseGlimmerImageProcessor")
    rules, theirs = rules_of_model(read), IMAGES.MuseGlimmerImageProcessor(**changes)
    draw, grids = random.Random(3), set()
    sides = [(draw.randint(1, 300), draw.randint(1, 300)) for _ in range(20)]
    for width, height in [*sides, (1, 1), (28, 28), (500, 3), (3, 500)]:
        image = random_image(width, height)
        found, wanted = rules.tiles(image), preprocessed(theirs, image)
        assert wanted["image_grid_thw"].tolist() == [list(found.grid)]
        ours = pixel_table(read)[np.arange(3)[:, None, None], np.moveaxis(found.pixels[0], -1, 0)]
        split = ours.reshape(3, found.grid[1], 14, found.grid[2], 14).transpose(1, 3, 0, 2, 4)
        patches = np.tile(split.reshape(found.grid[1] * found.grid[2], -1), 2)
        assert np.array_equal(patches, wanted["pixel_values"].numpy())
        grids.add(found.grid)
    assert len(grids) > 9


def test_sizes_are_those_of_transformers() -> None:
    draw = random.Random(5)
    for _ in range(500):
        width, height = draw.randint(1, 900), draw.randint(1, 900)
        fields = {
            "patch_size": draw.choice([7, 14]),
            "max_video_frame_tokens": draw.choice([9, 144]),
        }
        found = FAMILIES[VIDEO].of(settings_of(fields, "file", VIDEO), {}).size_of(width, height, 3)
        factor, most = 2 * fields["patch_size"], fields["max_video_frame_tokens"]
        assert found[::-1] == muse_module.smart_resize(height, width, factor, most)


def test_frames_are_those_of_transformers() -> None:
    """But for those where a product of float32 is less than the integer that it should be."""
    draw, lengths, num_others = random.Random(4), set(), 0
    for _ in range(400):
        fields = {"fps": draw.choice([0.3, 1, 2, 2.5, 30]), "num_frames": draw.choice([7, 16, 96])}
        total, rate = draw.randint(1, 900), draw.choice([1, 5, 10.0, 23.976, 29.97, 60])
        found = FAMILIES[VIDEO].of(settings_of(fields, "file", VIDEO), {}).choose(total, rate)
        own, metadata = SimpleNamespace(**fields), SimpleNamespace(total_num_frames=total, fps=rate)
        wanted = muse_module.MuseGlimmerVideoProcessor.sample_frames(own, metadata, 2).tolist()
        assert len(found) == len(wanted)
        for place, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
            is_integer = place * (total - 1) % max(len(found) - 1, 1) == 0
            assert ours - theirs in ((0, 1) if is_integer else (0,))
            num_others += ours != theirs
        lengths.add(len(found))
    assert len(lengths) > 15
    assert num_others < 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frame_timestamp_format": "{timestamp.__class__}"}, "must be a text with"),
        ({"frame_timestamp_format": 3}, "must be a text with"),
        ({"max_video_frame_tokens": 0}, "'max_video_frame_tokens' must be a positive integer"),
    ],
)
def test_other_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        FAMILIES[VIDEO].of(settings_of(changes, "file", VIDEO), {})


def test_prompts_are_expanded_as_transformers_expands_them(
    make_tokenizer: Callable[..., Any], tmp_path: Path, random_image: Callable[..., Image.Image]
) -> None:
    tokenizer = make_tokenizer(MARKS)
    ids = {field: tokenizer.convert_tokens_to_ids(text) for field, text in TOKENS.items()}
    settings = {
        "image_processor": {"image_processor_type": "MuseGlimmerImageProcessor"},
        "video_processor": {"video_processor_type": VIDEO, "max_video_frame_tokens": 9},
    }
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    tokenizer.save_pretrained(tmp_path)
    found = processors_of_model(tmp_path, MuseGlimmerConfig(**ids).to_dict() | NAMES)
    theirs: Any = PROCESSOR.__new__(PROCESSOR)
    theirs.image_token, theirs.video_token = TOKENS.values()
    theirs.image_start_token, theirs.image_end_token = MARKS[2:4]
    theirs.video_start_token, theirs.video_end_token, theirs.video_sep_token = MARKS[4:]
    theirs.image_processor = SimpleNamespace(merge_size=2)
    theirs.video_processor = muse_module.MuseGlimmerVideoProcessor
    videos = [
        found["video"].prepare(
            found["video"].open(
                "a video",
                (
                    np.zeros((*shape, 3), np.uint8),
                    {"fps": RATE, "frames_indices": indices, "do_sample_frames": False},
                ),
            )
        )
        for shape, indices in FRAMES.items()
    ]
    images = [found["image"].prepare(random_image(*size)) for size in ((60, 90), (9, 9))]
    inputs = {
        "image_grid_thw": np.array([each.grid for each in images]),
        "video_grid_thw": np.array([each.grid for each in videos]),
        "video_metadata": [
            VideoMetadata(total_num_frames=99, fps=RATE, frames_indices=list(indices))
            for indices in FRAMES.values()
        ],
    }
    video, image = found["video"].mark, found["image"].mark
    prompt = f"{video}a {image} b{image}\n{video}"
    of_images = found["image"].expand_text("prompt", prompt, images)
    text = found["video"].expand_text("prompt", of_images, videos)
    first, second = (theirs.replace_video_token(inputs, place) for place in (0, 1))
    one, two = (theirs.replace_image_token(inputs, place) for place in (0, 1))
    assert text == f"{first}a {one} b{two}\n{second}"
    assert "Time: 0.7s<|video|>" in first
    expected = tokenizer.encode(text, add_special_tokens=False)
    runs = found["video"].runs("prompt", expected, videos)
    assert [len(each) for each in runs] == [item.grid[0] for item in videos] == [2, 2]


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    whole = MuseGlimmerConfig().to_dict() | NAMES
    found = placeholders_of_model(tmp_path, whole)
    assert found["image"].token_id == whole["image_token_id"]
    assert found["video"].token_id == whole["video_token_id"]
    given = NAMES | {"vision_config": {"hidden_size": 1536}}
    assert placeholders_of_model(tmp_path, given) == found
    assert placeholders_of_model(tmp_path, NAMES) == {}
    with pytest.raises(EngineStartError, match="'video_token_id' must be an integer"):
        placeholders_of_model(tmp_path, given | {"video_token_id": "x"})
