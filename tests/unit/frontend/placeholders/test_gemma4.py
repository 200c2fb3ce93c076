"""Prompts of Gemma 4 with sounds and videos are expanded as transformers' processor expands them,
and a model takes what its config.json has towers for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import Gemma4Config
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.video_utils import VideoMetadata

from shmllm.errors import RequestError
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.registry import placeholders_of_model
from shmllm.frontend.videos.rules.gemma4 import Gemma4VideoRules

ARCHITECTURE = {"architectures": ["Gemma4ForConditionalGeneration"]}
TEXTS = {"boa_token": "<|audio>", "audio_token": "<|audio|>", "eoa_token": "<audio|>"}


def placeholders(directory: Path, **fields: Any) -> Any:
    return placeholders_of_model(directory, ARCHITECTURE | fields)


@pytest.mark.parametrize("padding", [0, 1, 5])
def test_a_sound_has_the_text_of_transformers(padding: int, tmp_path: Path) -> None:
    ours = placeholders(tmp_path, audio_config={"a": 1})["audio"]
    replace: Any = Gemma4Processor.replace_audio_token
    for frames in (1, 2, 3, 4, 5, 99, 2999):
        mask = np.arange(frames + padding) < frames
        expected = replace(SimpleNamespace(**TEXTS), {"input_features_mask": [mask]}, 0)
        grid = (frames, 1, 1)
        item = PreparedItem(np.zeros((frames, 128), np.float32), grid, ours.count(grid))
        assert ours.expansion(item) == expected
    assert (ours.mark, ours.num_mels, ours.most_frames) == ("<|audio|>", 128, 2999)


def test_a_model_takes_what_it_has_towers_for(tmp_path: Path) -> None:
    both = {"vision_config": {"a": 1}, "audio_config": {"a": 1}}
    assert placeholders(tmp_path) == {}
    assert set(placeholders(tmp_path, **both)) == {"image", "video", "audio"}
    assert set(placeholders(tmp_path, **both | {"audio_config": None})) == {"image", "video"}
    assert set(placeholders(tmp_path, **both | {"vision_config": None})) == {"audio"}
    large = {"text_config": {"use_bidirectional_attention": "vision"}}
    assert set(placeholders(tmp_path, **both, **large)) == {"image", "video"}


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    found = placeholders(tmp_path, vision_config={"a": 1}, audio_config={"a": 1})
    config = Gemma4Config(vision_config={}, audio_config={})
    assert found["image"].token_id == config.image_token_id
    assert found["audio"].token_id == config.audio_token_id
    assert found["image"].patch_size == config.vision_config.patch_size
    assert found["image"].merge_size == config.vision_config.pooling_kernel_size
    assert found["image"].longest_side == config.vision_config.position_embedding_size


def test_an_image_has_no_more_patches_in_a_row_than_positions(tmp_path: Path) -> None:
    vision = {"patch_size": 16, "position_embedding_size": 30}
    image = placeholders(tmp_path, vision_config=vision)["image"]
    image.check_sides(480, 480)
    with pytest.raises(RequestError, match="528x48 pixels, but the model takes at most 480"):
        image.check_sides(48, 528)


@pytest.mark.parametrize(
    ("indices", "rate"), [([0, 1, 2], 24.0), ([0, 30, 1799, 90_000], 29.97), ([7], 0.01)]
)
def test_a_video_has_the_text_of_transformers(
    indices: list[int], rate: float, tmp_path: Path
) -> None:
    ours = placeholders(tmp_path, vision_config={"a": 1})["video"]
    grid = (len(indices), 6, 9)
    metadata = VideoMetadata(total_num_frames=99, fps=rate, frames_indices=indices)
    theirs: Any = SimpleNamespace(boi_token="<|image>", video_token="<|video|>")
    theirs.eoi_token = "<image|>"
    inputs = {"num_soft_tokens_per_video": [6], "video_metadata": [metadata]}
    rules: Any = Gemma4VideoRules  # the text depends on no field
    times = tuple(rules.time_text(None, index / rate, index / rate) for index in indices)
    item = PreparedItem(np.zeros((1,), np.uint8), grid, ours.count(grid), 1 / rate, times)
    replace: Any = Gemma4Processor.replace_video_token
    assert ours.expansion(item) == replace(theirs, inputs, 0)
    assert (ours.mark, ours.token_id) == ("<|video|>", Gemma4Config().video_token_id)
