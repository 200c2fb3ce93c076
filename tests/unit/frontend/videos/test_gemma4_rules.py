"""Which frames of a video Gemma 4 sees, and how large they are, compared with transformers."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.models.gemma4.processing_gemma4 import get_aspect_ratio_preserving_size
from transformers.video_utils import default_sample_indices_fn

from shmllm.errors import RequestError
from shmllm.formats.image_settings import settings_of
from shmllm.frontend.videos.rules.gemma4 import Gemma4VideoRules

KIND = "Gemma4VideoProcessor"


def rules(changes: dict[str, Any] | None = None, **fields: Any) -> Gemma4VideoRules:
    return Gemma4VideoRules.of(settings_of(fields, "file", KIND), changes or {})


def test_frames_are_those_of_transformers() -> None:
    """A video that is shorter, which transformers refuses, has all of its frames."""
    draw = random.Random(1)
    sample: Any = default_sample_indices_fn
    for _ in range(300):
        total, rate = draw.randint(1, 900), draw.choice([1, 5, 23.976, 30])
        metadata = SimpleNamespace(total_num_frames=total, fps=rate)
        count = draw.randint(1, total)
        expected = sample(metadata, num_frames=count).tolist()
        assert rules({"num_frames": count}).choose(total, rate) == expected
        fps = draw.uniform(0.1, rate)
        assert rules({"fps": fps}).choose(total, rate) == sample(metadata, fps=fps).tolist()
        usual = rules().choose(total, rate)
        assert usual == sample(metadata, num_frames=min(total, 32)).tolist()


def test_frames_have_the_size_of_transformers() -> None:
    draw = random.Random(2)
    for budget in (70, 140, 1120):
        for _ in range(100):
            width, height = draw.randint(1, 2000), draw.randint(1, 2000)
            found = rules(max_soft_tokens=budget).size_of(width, height, 9)
            expected = get_aspect_ratio_preserving_size(height, width, 16, 9 * budget, 3)
            assert found[::-1] == expected


def test_defaults_are_those_of_the_class() -> None:
    """Of transformers' `Gemma4VideoProcessor`, whose module needs torchvision."""
    found = rules()
    assert (found.count, found.samples, found.rate, found.of_frames.most) == (32, True, 24, 70)
    assert (found.of_frames.patch_size, found.of_frames.merge_size) == (16, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_frames": 4}, "'min_frames' is not supported for videos"),
        ({"max_soft_tokens": 100}, "must be one of 70, 140, 280, 560, 1120, not 100"),
        ({"fps": 1, "num_frames": 4}, "'fps' and 'num_frames' exclude each other"),
    ],
)
def test_wrong_changes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        rules(changes)
