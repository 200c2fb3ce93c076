"""`media_io_kwargs`: which frames of encoded videos are used."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fakes import info
from support.vision_models import make_vision_model

from shmllm.config.items import ItemInfo
from shmllm.errors import EngineStartError
from shmllm.frontend.given_items import GivenItem, GivenItems
from shmllm.frontend.prompt_items import ItemOptions, PromptItems
from shmllm.frontend.videos.chosen_frames import ChosenFrames, read_media_options


@pytest.mark.parametrize(
    ("most", "rate", "expected"),
    [
        (-1, -1, list(range(10))),
        (20, -1, list(range(10))),
        (4, -1, [0, 3, 6, 9]),
        (3, -1, [0, 4, 9]),
        (1, -1, [0]),
        (-1, 2, [0, 4, 9]),  # 1.5 seconds
        (2, 2, [0, 9]),
        (-1, 0.1, [0]),
        (-1, 100, list(range(10))),
    ],
)
def test_frames_are_at_equal_distances(most: int, rate: float, expected: list[int]) -> None:
    assert ChosenFrames(most, rate).choose(10, 10 / 1.5) == expected


def test_what_the_option_says() -> None:
    def read(**video: Any) -> ChosenFrames | None:
        return read_media_options({"video": video})

    assert read(num_frames=4, fps=2) == ChosenFrames(4, 2)
    assert read(fps=2) == ChosenFrames(32, 2)
    assert read(num_frames=-1) == ChosenFrames(-1, -1)
    assert read() is read_media_options({}) is read_media_options(None) is None
    white = {"image_mode": "RGB", "rgba_background_color": [255, 255, 255]}
    assert read_media_options({"image": white, "audio": {}}) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"videos": {}}, "with the keys video, image and audio; got {'videos'"),
        ({"video": 3}, "media_io_kwargs must be a dict such as"),
        ({"video": {"backend": "opencv"}}, "video has ['backend']; num_frames and fps are sup"),
        ({"video": {"num_frames": 0}}, "num_frames must be -1 or at least 1, got 0"),
        ({"video": {"num_frames": True}}, "num_frames must be -1 or at least 1, got True"),
        ({"video": {"fps": 0}}, "fps must be -1 or above 0, got 0"),
        ({"video": {"fps": "2"}}, "fps must be -1 or above 0, got '2'"),
        ({"image": {"rgba_background_color": [0, 0, 0]}}, "can only be (255, 255, 255), got [0"),
        ({"image": {"size": 3}}, "image has 'size', which is not supported"),
        ({"audio": {"rate": 3}}, "audio has 'rate', which is not supported"),
    ],
)
def test_what_is_not_supported_is_refused(given: Any, message: str) -> None:
    with pytest.raises(EngineStartError, match=re.escape(message)):
        read_media_options(given)


def test_an_encoded_video_has_the_chosen_frames(
    encoded: Callable[..., bytes], tmp_path: Path
) -> None:
    make_vision_model("qwen2_vl", tmp_path)
    items = ItemInfo(modalities=("image", "video"), most_embeds=99, cache_bytes=2**20)
    facts = replace(info(), items=items, model_directory=str(tmp_path))

    def prepared(value: Any, frames: ChosenFrames | None) -> Any:
        given = GivenItems([GivenItem("video", value)])
        found = PromptItems(facts, ItemOptions(frames=frames)).ready("the prompt", given)[0]
        return found.identity, found.prepared

    data = encoded(12)
    own, by_model = prepared(data, None)
    chosen, by_option = prepared(data, ChosenFrames(3))
    assert own != chosen
    assert by_option.grid[0] == 2  # of two frames each; the last one is repeated
    assert not np.array_equal(by_model.data, by_option.data)
    levels = [int(frame.mean()) for frame in by_option.data]
    assert np.allclose(levels, [0, 5 * 40, 11 * 40 % 256, 11 * 40 % 256], atol=4)
    frames = np.zeros((6, 32, 48, 3), np.uint8)
    same = [prepared(frames, each)[1].grid for each in (None, ChosenFrames(2))]
    assert same[0] == same[1]  # frames that the user gives are all used
