"""Prompts with videos are expanded as transformers' processors do it, and with images too.

The processors run without their video processor, which needs torchvision.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import (
    Lfm3VlConfig,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
)
from transformers.models.lfm3_vl.processing_lfm3_vl import Lfm3VlProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from shmllm.errors import EngineStartError, RequestError
from shmllm.frontend.items.registry import processors_of_model
from shmllm.frontend.placeholders.registry import placeholders_of_model

TOKENS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
SIZE = {"shortest_edge": 3136, "longest_edge": 20000}
TEXTS = ["{}", "See {} and\n{}\n\nplease.", "{}{}", " {} <1.0 seconds>{} "]
SIDES = [(4, 60, 70), (3, 100, 50)]
INDICES = [[0, 5, 9, 20], [3, 4, 50]]
RATE = 12.5
KINDS: dict[str, tuple[Any, Any, str]] = {
    "qwen2": (Qwen2VLProcessor, Qwen2VLConfig, "Qwen2VL"),
    "qwen2.5": (Qwen2_5_VLProcessor, Qwen2_5_VLConfig, "Qwen2_5_VL"),
    "qwen3": (Qwen3VLProcessor, Qwen3VLConfig, "Qwen3VL"),
    "lfm3": (Lfm3VlProcessor, Lfm3VlConfig, "Lfm3Vl"),
}


class Model:
    """
    Attributes:
        theirs: what transformers' processor needs to replace marks.
        is_3: whether it is Qwen 3, or LFM3, which has its processor.
    """

    def __init__(self, name: str, tokenizer: Any, directory: Path) -> None:
        self.is_3 = name in ("qwen3", "lfm3")
        self.tokenizer = tokenizer
        self.theirs = SimpleNamespace(
            video_token="<|video_pad|>",
            vision_start_token="<|vision_start|>",
            vision_end_token="<|vision_end|>",
            video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        )
        self.kind, config_kind, architecture = KINDS[name]
        self.theirs._calculate_timestamps = lambda *given: Qwen3VLProcessor._calculate_timestamps(
            self.theirs, *given
        )
        ids = dict(
            zip(
                [
                    "image_token_id",
                    "video_token_id",
                    "vision_start_token_id",
                    "vision_end_token_id",
                ],
                tokenizer.convert_tokens_to_ids(TOKENS),
                strict=True,
            )
        )
        config = config_kind(**ids).to_dict()
        config["architectures"] = [f"{architecture}ForConditionalGeneration"]
        image = {"image_processor_type": "Qwen2VLImageProcessor", "size": SIZE}
        image["patch_size"] = 16 if self.is_3 else 14
        (directory / "preprocessor_config.json").write_text(json.dumps(image))
        tokenizer.save_pretrained(directory)
        found = processors_of_model(directory, config)
        self.ours, self.images = found["video"], found["image"]

    def encode(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return found

    def prepare(self, place: int) -> Any:
        frames, height, width = SIDES[place]
        pixels = np.full((frames, height, width, 3), place, np.uint8)
        metadata = {"fps": RATE, "frames_indices": INDICES[place], "do_sample_frames": False}
        return self.ours.prepare(self.ours.open("a video", (pixels, metadata)))

    def expanded(self, prompt: str, items: list[Any]) -> str:
        """Replace the videos of a text with what transformers has; of Qwen 3 the whole mark, as
        transformers 4 and the model's authors do, not the video token only."""
        inputs = {
            "video_grid_thw": np.array([each.grid for each in items]),
            "video_metadata": [
                VideoMetadata(total_num_frames=99, fps=RATE, frames_indices=list(INDICES[place]))
                for place in range(len(items))
            ],
        }
        mark = self.ours.mark if self.is_3 else "<|video_pad|>"
        parts = prompt.split(mark)
        for place in range(len(items)):
            parts[place] += self.kind.replace_video_token(self.theirs, inputs, place)
        return "".join(parts)


@pytest.fixture(params=[*KINDS])
def model(
    request: pytest.FixtureRequest, make_tokenizer: Callable[..., Any], tmp_path: Path
) -> Model:
    return Model(request.param, make_tokenizer(TOKENS), tmp_path)


@pytest.mark.parametrize("form", TEXTS)
def test_prompts_are_expanded_as_transformers_expands_them(model: Model, form: str) -> None:
    items = [model.prepare(place) for place in range(form.count("{}"))]
    prompt = form.format(*[model.ours.mark] * len(items))
    text = model.expanded(prompt, items)
    assert model.ours.expand_text("prompt", prompt, items) == text
    expected = model.encode(text)
    ids = model.ours.expand_ids("prompt", model.encode(prompt), items, model.encode)
    assert ids == expected
    assert model.ours.expand_ids("prompt", expected, items, model.encode) == expected

    runs = model.ours.runs("prompt", expected, items)
    assert [len(each) for each in runs] == [item.grid[0] if model.is_3 else 1 for item in items]
    for item, intervals in zip(items, runs, strict=True):
        assert {end - begin for begin, end in intervals} == {item.num_tokens // len(intervals)}
    token = model.ours.token_id
    positions = [i for each in runs for begin, end in each for i in range(begin, end)]
    assert positions == [i for i, each in enumerate(expected) if each == token]


def test_qwen_3_writes_the_time_before_each_frame(
    make_tokenizer: Callable[..., Any], tmp_path: Path
) -> None:
    model = Model("qwen3", make_tokenizer(TOKENS), tmp_path)
    item = model.prepare(1)  # frames 3, 4, 50, 50
    pads = "<|video_pad|>" * (item.num_tokens // 2)
    assert model.ours.expand_text("prompt", f"a{model.ours.mark}b", [item]) == (
        f"a<0.3 seconds><|vision_start|>{pads}<|vision_end|>"
        f"<4.0 seconds><|vision_start|>{pads}<|vision_end|>b"
    )


def test_images_and_videos_of_a_prompt_do_not_disturb_one_another(
    model: Model, random_image: Callable[..., Image.Image]
) -> None:
    videos = [model.prepare(0), model.prepare(1)]
    pictures = [
        model.images.prepare(random_image(60, 90)),
        model.images.prepare(random_image(9, 9)),
    ]
    image, video = model.images.mark, model.ours.mark
    prompt = f"{image}a {video} b{video}{image}"
    text = model.images.expand_text("prompt", model.expanded(prompt, videos), pictures)
    expected = model.encode(text)
    first = model.images.expand_text("prompt", prompt, pictures)
    assert model.ours.expand_text("prompt", first, videos) == text
    order = [(model.ours, videos), (model.images, pictures)]
    for _ in range(2):
        ids = model.encode(prompt)
        for processor, items in order:
            ids = processor.expand_ids("prompt", ids, items, model.encode)
        assert ids == expected
        order.reverse()
    runs = model.images.runs("prompt", expected, pictures)
    assert [end - begin for ((begin, end),) in runs] == [each.num_tokens for each in pictures]


def test_other_numbers_are_refused_with_both(model: Model) -> None:
    items = [model.prepare(0), model.prepare(0)]
    total = 2 * items[0].num_tokens
    prompt = f"a {model.ours.mark} b"
    with pytest.raises(RequestError, match=r"^prompt 7 has 2 videos, and its text .* 1 times"):
        model.ours.expand_text("prompt 7", prompt, items)
    with pytest.raises(RequestError, match=rf"^prompt 7 has 2 videos: .*{total} tokens"):
        model.ours.expand_ids("prompt 7", model.encode(prompt), items, model.encode)
    with pytest.raises(RequestError, match=r"^prompt 7 has 0 videos, and its text .* 1 times"):
        model.ours.expand_text("prompt 7", prompt, [])
    expanded = model.encode(model.ours.expand_text("prompt", prompt, items[:1]))
    with pytest.raises(RequestError, match=rf"^prompt 7 has 2 videos: .*{total} tokens"):
        model.ours.expand_ids("prompt 7", expanded, items, model.encode)
    with pytest.raises(RequestError, match=f"{total // 2} times, and 2 videos, .* needs {total}"):
        model.ours.runs("prompt 7", expanded, items)
    with pytest.raises(RequestError, match=f"needs {total // 2}"):
        model.ours.runs("prompt 7", expanded[:9], items[:1])


def test_ids_are_told_apart_from_expanded_ones_also_with_one_token(model: Model) -> None:
    """A video of one token is the mark itself in Qwen 2.5."""
    side = 32 if model.is_3 else 28
    frames = np.zeros((2, side, side, 3), np.uint8)
    item = model.ours.prepare(model.ours.open("a video", frames), {"do_resize": False})
    assert item.num_tokens == 1
    prompt = f"a{model.ours.mark}b"
    expected = model.encode(model.ours.expand_text("prompt", prompt, [item]))
    for ids in (model.encode(prompt), expected):
        assert model.ours.expand_ids("prompt", ids, [item], model.encode) == expected


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [*(names[1:] for names in KINDS.values()), (Qwen3_5Config, "Qwen3_5")],
)
def test_defaults_are_those_of_transformers(kind: Any, architecture: str, tmp_path: Path) -> None:
    names = {"architectures": [f"{architecture}ForConditionalGeneration"]}
    whole = kind().to_dict() | names
    found = placeholders_of_model(tmp_path, whole)["video"]
    assert found.token_id == whole["video_token_id"]
    assert placeholders_of_model(tmp_path, names)["video"] == found
    assert placeholders_of_model(tmp_path, names)["image"].token_id == whole["image_token_id"]
    if architecture.startswith("Qwen3"):
        ids = whole["vision_start_token_id"], found.token_id, whole["vision_end_token_id"]
        assert found.replaced_ids == ids
    with pytest.raises(EngineStartError, match="'video_token_id' must be an integer"):
        placeholders_of_model(tmp_path, names | {"video_token_id": "x"})
