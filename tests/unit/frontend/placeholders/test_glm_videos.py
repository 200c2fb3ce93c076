"""Prompts with videos of GLM, whose tokens are those of images, are expanded as transformers'
processors do it. These run without their video processor, which needs torchvision."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import Glm4vConfig, Glm4vMoeConfig, Glm46VConfig, GlmOcrConfig
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor
from transformers.video_utils import VideoMetadata

from shmllm.errors import EngineStartError, RequestError
from shmllm.frontend.items.registry import processors_of_model
from shmllm.frontend.placeholders.registry import placeholders_of_model

IDS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
SIZE = {"shortest_edge": 6272, "longest_edge": 40000}
SIDES = [(4, 60, 70), (3, 100, 50)]
INDICES = [[0, 5, 9, 20], [3, 4, 50]]
RATE = 12.5
KINDS: dict[str, tuple[Any, str, Any, str | None]] = {
    "4.1V": (Glm4vConfig, "Glm4v", Glm4vProcessor, None),
    "4.5V": (Glm4vMoeConfig, "Glm4vMoe", Glm4vProcessor, "Glm4vVideoProcessor"),
    "4.6V": (Glm46VConfig, "Glm46V", Glm46VProcessor, None),
    "OCR": (GlmOcrConfig, "GlmOcr", Glm46VProcessor, None),
    "4.6V with experts": (Glm4vMoeConfig, "Glm4vMoe", Glm46VProcessor, "Glm46VVideoProcessor"),
}
"""The configuration, the architecture, transformers' processor, and what a file names."""


class Model:
    def __init__(self, name: str, tokenizer: Any, directory: Path) -> None:
        self.tokenizer = tokenizer
        config_kind, architecture, kind, video_processor = KINDS[name]
        ids = {field: tokenizer.convert_tokens_to_ids(text) for field, text in IDS.items()}
        config = config_kind(**ids).to_dict()
        config["architectures"] = [f"{architecture}ForConditionalGeneration"]
        image = {"image_processor_type": "Glm4vImageProcessor", "size": SIZE}
        video = {"video_processor_type": video_processor, "size": SIZE}
        (directory / "preprocessor_config.json").write_text(json.dumps(image))
        (directory / "video_preprocessor_config.json").write_text(json.dumps(video))
        tokenizer.save_pretrained(directory)
        found = processors_of_model(directory, config)
        self.ours, self.images = found["video"], found["image"]
        theirs: Any = kind.__new__(kind)
        theirs.image_token, theirs.video_token = "<|image|>", "<|video|>"
        theirs.video_processor = SimpleNamespace(merge_size=2)
        theirs.image_token_id = ids["image_token_id"]
        theirs.video_start_id = ids["video_start_token_id"]
        theirs.video_end_id = ids["video_end_token_id"]
        self.theirs = theirs

    def encode(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return found

    def prepare(self, place: int) -> Any:
        frames, height, width = SIDES[place]
        pixels = np.full((frames, height, width, 3), place, np.uint8)
        metadata = {"fps": RATE, "frames_indices": INDICES[place], "do_sample_frames": False}
        return self.ours.prepare(self.ours.open("a video", (pixels, metadata)))

    def expanded(self, prompt: str, items: list[Any]) -> str:
        """Replace the video tokens of a text with what transformers has."""
        inputs = {
            "video_grid_thw": np.array([each.grid for each in items]),
            "video_metadata": [
                VideoMetadata(total_num_frames=99, fps=RATE, frames_indices=list(INDICES[place]))
                for place in range(len(items))
            ],
        }
        parts = prompt.split("<|video|>")
        for place in range(len(items)):
            parts[place] += self.theirs.replace_video_token(inputs, place)
        return "".join(parts)


@pytest.fixture(params=[*KINDS])
def model(
    request: pytest.FixtureRequest, make_tokenizer: Callable[..., Any], tmp_path: Path
) -> Model:
    return Model(request.param, make_tokenizer([*IDS.values()]), tmp_path)


@pytest.mark.parametrize("form", ["{}", "See {} and\n{}\n\nplease.", "{}{}"])
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
    assert [len(each) for each in runs] == [item.grid[0] for item in items]
    for item, intervals in zip(items, runs, strict=True):
        assert {end - begin for begin, end in intervals} == {item.num_tokens // len(intervals)}


def test_images_and_videos_of_a_prompt_do_not_disturb_one_another(
    model: Model, random_image: Callable[..., Image.Image]
) -> None:
    videos = [model.prepare(0), model.prepare(1)]
    pictures = [model.images.prepare(random_image(*size)) for size in ((60, 90), (9, 9))]
    image, video = model.images.mark, model.ours.mark
    prompt = f"{image}a {video} b{video}{image}"
    text = model.expanded(model.images.expand_text("prompt", prompt, pictures), videos)
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
    kinds = np.array(model.theirs.create_mm_token_type_ids([expected])[0])
    for kind, processor, items in ((1, model.images, pictures), (2, model.ours, videos)):
        runs = processor.runs("prompt", expected, items)
        positions = [i for each in runs for begin, end in each for i in range(begin, end)]
        assert positions == np.flatnonzero(kinds == kind).tolist()


def test_other_numbers_are_refused_with_both(model: Model) -> None:
    items = [model.prepare(0), model.prepare(0)]
    total = 2 * items[0].num_tokens
    prompt = f"a {model.ours.mark} b"
    with pytest.raises(RequestError, match=r"^prompt 7 has 2 videos, and its text .* 1 times"):
        model.ours.expand_text("prompt 7", prompt, items)
    with pytest.raises(RequestError, match=rf"^prompt 7 has 2 videos: .*{total} tokens"):
        model.ours.expand_ids("prompt 7", model.encode(prompt), items, model.encode)
    expanded = model.encode(model.ours.expand_text("prompt", prompt, items[:1]))
    with pytest.raises(RequestError, match=r"0 times, and 1 image, .* needs 4"):
        model.images.runs("prompt 7", expanded, [SimpleNamespace(num_tokens=4)])
    with pytest.raises(RequestError, match=f"{total // 2} times, and 2 videos, .* needs {total}"):
        model.ours.runs("prompt 7", expanded, items)


def test_the_times_of_frames_are_written_behind_them(
    make_tokenizer: Callable[..., Any], tmp_path: Path
) -> None:
    for name, times in (("4.1V", ("0", "4")), ("4.6V", ("0.2 seconds", "4.0 seconds"))):
        directory = tmp_path / name
        directory.mkdir()
        model = Model(name, make_tokenizer([*IDS.values()]), directory)
        item = model.prepare(1)  # frames 3, 4, 50, 50
        pads = "<|image|>" * (item.num_tokens // 2)
        frames = "".join(f"<|begin_of_image|>{pads}<|end_of_image|>{time}" for time in times)
        assert model.ours.expand_text("prompt", f"a{model.ours.mark}b", [item]) == (
            f"a<|begin_of_video|>{frames}<|end_of_video|>b"
        )


@pytest.mark.parametrize(
    ("kind", "architecture"), [names[:2] for names in list(KINDS.values())[:4]]
)
def test_defaults_are_those_of_transformers(kind: Any, architecture: str, tmp_path: Path) -> None:
    names = {"architectures": [f"{architecture}ForConditionalGeneration"]}
    whole = kind().to_dict() | names
    found = placeholders_of_model(tmp_path, whole)["video"]
    assert found.token_id == whole["image_token_id"]
    fields = "video_start_token_id", "video_token_id", "video_end_token_id"
    assert found.replaced_ids == tuple(whole[field] for field in fields)
    assert placeholders_of_model(tmp_path, names)["video"] == found
    with pytest.raises(EngineStartError, match="'video_start_token_id' must be an integer"):
        placeholders_of_model(tmp_path, names | {"video_start_token_id": "x"})
