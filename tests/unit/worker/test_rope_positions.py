"""Positions on three axes, compared with those of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Glm4vConfig,
    Glm4vModel,
    Glm4vMoeConfig,
    Glm4vMoeModel,
    GlmOcrConfig,
    GlmOcrModel,
    HunYuanVLConfig,
    HunYuanVLModel,
    PaddleOCRVLConfig,
    PaddleOCRVLModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLModel,
    Qwen2_5OmniThinkerConfig,
    Qwen2VLConfig,
    Qwen2VLModel,
    Qwen3_5Config,
    Qwen3_5Model,
    Qwen3OmniMoeThinkerConfig,
    Qwen3VLConfig,
    Qwen3VLModel,
    Qwen3VLMoeConfig,
    Qwen3VLMoeModel,
)
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerModel
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerModel

from shmllm.core.plan import NewRequest, StepPlan
from shmllm.models.mixer_specs import WITHIN_ITEMS
from shmllm.models.rope_config import VideoTimes
from shmllm.params.items import Item
from shmllm.params.sampling import SamplingParams
from shmllm.worker.batch import InputBatch
from shmllm.worker.grid_positions import GridPositions
from shmllm.worker.rope_positions import PlacedGrid, RopePositions

MERGE = 2
TEXT = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
VISION = {"depth": 1, "hidden_size": 8, "num_heads": 1}
KINDS: dict[str, tuple[Any, Any, dict[str, int]]] = {
    "Qwen2-VL": (Qwen2VLConfig, Qwen2VLModel, {"embed_dim": 8}),
    "Qwen2.5-VL": (Qwen2_5_VLConfig, Qwen2_5_VLModel, {"intermediate_size": 8}),
    "Qwen3-VL": (
        Qwen3VLConfig,
        Qwen3VLModel,
        {"intermediate_size": 8, "num_position_embeddings": 16},
    ),
    "Qwen3.5": (
        Qwen3_5Config,
        Qwen3_5Model,
        {"intermediate_size": 8, "num_position_embeddings": 16},
    ),
    "GLM-4.1V": (Glm4vConfig, Glm4vModel, {"intermediate_size": 8}),
    "GLM-4.5V": (Glm4vMoeConfig, Glm4vMoeModel, {"intermediate_size": 8}),
    "GLM-OCR": (GlmOcrConfig, GlmOcrModel, {"intermediate_size": 8}),
    "PaddleOCR-VL": (PaddleOCRVLConfig, PaddleOCRVLModel, {"num_attention_heads": 1}),
    "Qwen3-VL with experts": (
        Qwen3VLMoeConfig,
        Qwen3VLMoeModel,
        {"intermediate_size": 8, "num_position_embeddings": 16},
    ),
}
PROMPTS: dict[str, list[int | tuple[int, int]]] = {
    # numbers of tokens of text, and rows and columns of images
    "an image": [5, (3, 4), 6],
    "an image at the beginning": [(2, 7), 3],
    "an image at the end": [4, (7, 2)],
    "a square, a row and a column": [2, (4, 4), 1, (1, 9), 2, (9, 1), 3],
    "one token": [3, (1, 1), 3],
    "neighbours": [3, (2, 3), (5, 2), 4],
}


@pytest.fixture(scope="module", params=[*KINDS])
def reference(request: pytest.FixtureRequest) -> Any:
    """A model of transformers without memory, which computes positions."""
    config_kind, kind, sizes = KINDS[request.param]
    vision = VISION | sizes | {"spatial_merge_size": MERGE}
    with torch.device("meta"):
        return kind(config_kind(text_config=TEXT, vision_config=vision))


def wanted_of(reference: Any, parts: list[int | tuple[int, int]]) -> tuple[np.ndarray, int]:
    """Return transformers' positions of a prompt's tokens, (3, T), and what it adds to the index of
    a token behind it. To tell neighbours apart, every other image is a video of one frame."""
    kinds: list[int] = []
    grids: dict[int, list[list[int]]] = {1: [], 2: []}
    for place, part in enumerate(parts):
        if isinstance(part, int):
            kinds += [0] * part
        else:
            kind = 1 + place % 2
            grids[kind].append([1, MERGE * part[0], MERGE * part[1]])
            kinds += [kind] * (part[0] * part[1])
    types = torch.tensor([kinds])
    images, videos = (torch.tensor(grid) if grid else None for grid in grids.values())
    positions, deltas = reference.get_rope_index(
        torch.zeros_like(types), types, image_grid_thw=images, video_grid_thw=videos
    )
    return positions[:, 0].numpy(), int(deltas[0, 0])


def items_of(parts: list[int | tuple[int, int]]) -> list[PlacedGrid]:
    items, begin = [], 0
    for part in parts:
        if isinstance(part, int):
            begin += part
        else:
            items.append(PlacedGrid(begin, 1, *part))
            begin += part[0] * part[1]
    return items


def test_they_equal_those_of_transformers_in_any_chunks(reference: Any) -> None:
    """Chunks begin and end inside images, and those of several requests share a step."""
    known = RopePositions(8)
    wanted = []
    for row, parts in enumerate(PROMPTS.values()):
        prompt, delta = wanted_of(reference, parts)
        further = np.arange(prompt.shape[1], prompt.shape[1] + 9) + delta
        wanted.append(np.concatenate((prompt, np.broadcast_to(further, (3, 9))), 1))
        known.update(row, items_of(parts), ())
    generator = np.random.default_rng(4)
    for size in (1, 3, 7, 100):
        done = np.zeros(len(wanted), np.int64)
        while any(end < each.shape[1] for end, each in zip(done, wanted, strict=True)):
            rows = generator.permutation(len(wanted))
            ends = [min(done[row] + size, wanted[row].shape[1]) for row in rows]
            spans = [np.arange(done[row], end) for row, end in zip(rows, ends, strict=True)]
            found = known.fill(
                np.repeat(rows, [len(span) for span in spans]), np.concatenate(spans)
            )
            parts = [wanted[row][:, span] for row, span in zip(rows, spans, strict=True)]
            assert found.tolist() == np.concatenate(parts, 1).tolist()
            done[rows] = ends


SECONDS = 0.37
VIDEOS: dict[str, list[int | tuple[int, int, int, float]]] = {
    # numbers of tokens of text, and frames, rows, columns and seconds between frames of videos
    "slow, times exceed the text behind": [3, (4, 2, 3, 5.0), 6],
    "slow, at the end": [3, (3, 2, 3, 20.0)],
    "fast, all frames have one time": [2, (5, 4, 3, 0.01), 4],
    "times that are rounded": [2, (9, 2, 2, SECONDS), 30],
    "a slow one before a fast one": [1, (3, 2, 2, 40.0), 5, (2, 3, 1, 0.5), 2],
    "a fast one before a slow one": [1, (3, 2, 2, 0.5), 5, (2, 3, 1, 40.0), 2],
    "one frame": [4, (1, 3, 3, 7.0), 1],
}


@pytest.mark.parametrize("reference", ["Qwen2-VL", "Qwen2.5-VL"], indirect=True)
@pytest.mark.parametrize("name", VIDEOS)
def test_videos_of_qwen_2_and_2_5_equal_transformers(name: str, reference: Any) -> None:
    """Tokens behind a prompt go on behind its last position, as in transformers' `generate`. In
    Qwen 2 a frame is one position, whatever its time."""
    per_second = getattr(reference.config.vision_config, "tokens_per_second", None)
    parts = VIDEOS[name]
    kinds: list[int] = []
    placed, grids, seconds = [], [], []
    for part in parts:
        if isinstance(part, int):
            kinds += [0] * part
            continue
        frames, rows, columns, each = part
        interval = per_second * each if per_second else 1.0
        placed.append(PlacedGrid(len(kinds), frames, rows, columns, interval))
        grids.append([frames, MERGE * rows, MERGE * columns])
        seconds.append(each)
        kinds += [2] * (frames * rows * columns)
    types = torch.tensor([kinds])
    expected, _ = reference.get_rope_index(
        torch.zeros_like(types),
        types,
        video_grid_thw=torch.tensor(grids),
        second_per_grid_ts=torch.tensor(seconds),
    )
    known, indices = RopePositions(1), np.arange(len(kinds) + 3)
    known.update(0, placed, ())
    found = known.fill(np.zeros_like(indices), indices)
    assert found[:, : len(kinds)].tolist() == expected[:, 0].tolist()
    if kinds[-1] == 0:
        behind = [int(expected[0, 0, -1]) + place for place in (1, 2, 3)]
        assert found[:, len(kinds) :].tolist() == [behind] * 3


OMNI: dict[str, list[int | tuple[int, int, int, float]]] = VIDEOS | {
    "sounds, of one number": [3, (5, 0, 0, 0.0), 2, (1, 0, 0, 0.0), 4],
    "a sound behind a slow video": [2, (3, 2, 2, 40.0), 4, (6, 0, 0, 0.0), 3],
    "a sound before images and videos": [2, (7, 0, 0, 0.0), 2, (1, 3, 4, 0.0), 2, (2, 2, 1, 9.0)],
    "wider than its times": [2, (2, 1, 7, 0.2), 3],
    "longer than it is wide": [2, (9, 1, 2, 0.5), 3],
}
"""As VIDEOS, of parts with a time 0 that are images, or sounds if they have no rows either."""


@pytest.fixture(
    scope="module",
    params=[
        (Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerModel),
        (Qwen3OmniMoeThinkerConfig, Qwen3OmniMoeThinkerModel),
    ],
    ids=["Qwen2.5-Omni", "Qwen3-Omni"],
)
def omni(request: pytest.FixtureRequest) -> Any:
    config_kind, kind = request.param
    own = {"intermediate_size": 8, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    vision = VISION | own if kind is Qwen3OmniMoeThinkerModel else VISION | {"intermediate_size": 8}
    config = config_kind(
        text_config=TEXT,
        vision_config=vision | {"spatial_merge_size": MERGE},
        audio_config={"d_model": 8, "encoder_layers": 1, "encoder_attention_heads": 1},
        vision_start_token_id=OMNI_BEGIN,
        position_id_per_seconds=OMNI_PER_SECOND,
    )
    with torch.device("meta"):
        return kind(config)


OMNI_BEGIN, OMNI_END, OMNI_PER_SECOND = 151652, 151653, 3


@pytest.mark.parametrize("name", OMNI)
def test_positions_of_qwen_omni_equal_transformers(name: str, omni: Any) -> None:
    """An item lies between two tokens of text. Behind a video also times count, whose fractions
    transformers keeps in Qwen 3."""
    is_3 = omni.config.model_type.startswith("qwen3")
    ids: list[int] = []
    placed, images, videos, seconds, sounds = [], [], [], [], []
    for part in OMNI[name]:
        if isinstance(part, int):
            ids += [5] * part
            continue
        frames, rows, columns, each = part
        config, grid = omni.config, [frames, MERGE * rows, MERGE * columns]
        if not rows:
            token, marks, count = config.audio_token_id, (151647, 151648), frames
            sounds.append(8 * frames if is_3 else 4 * frames)
        else:
            marks, count = (OMNI_BEGIN, OMNI_END), frames * rows * columns
            token = config.video_token_id if each else config.image_token_id
            (videos if each else images).append(grid)
            seconds += [each] if each else []
            begin = len(ids) + 1
            interval, factor = (each, float(OMNI_PER_SECOND)) if each else (1.0, 1.0)
            placed.append(
                PlacedGrid(begin, frames, rows, columns, interval, factor, moves_text=True)
            )
        ids += [marks[0], *[token] * count, marks[1]]
    tensor = torch.tensor([ids])
    expected, deltas = omni.get_rope_index(
        tensor,
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor(videos) if videos else None,
        attention_mask=torch.ones_like(tensor),
        audio_seqlens=torch.tensor(sounds) if sounds else None,
        second_per_grids=torch.tensor(seconds) if seconds else None,
    )
    known, indices = RopePositions(1), np.arange(len(ids) + 2)
    known.update(0, placed, ())
    found = known.fill(np.zeros_like(indices), indices)
    rounded, delta = expected[:, 0].double().floor(), float(deltas[0, 0]) // 1
    assert found[:, : len(ids)].tolist() == rounded.tolist()
    assert (found[:, -1] - indices[-1]).tolist() == [delta] * 3


def test_a_batch_places_text_behind_the_times_of_videos_that_are_aligned() -> None:
    """And sounds as text."""
    sound = Item(bytes(32), ((0, 2),), (8, 1, 1), None, "audio")
    options: Any = {"patches_per_side": 2, "video_times": VideoTimes(2.0, is_aligned=True)}
    batch = InputBatch(1, 32, 32, 100, **options)
    request = replace(with_item(16, VIDEO), items=(sound, VIDEO))
    batch.update(plan := plan_of((0, 0, 16), new=(request,)))
    time, row, column = batch.inputs(plan).on_axes(3).tolist()
    assert time == [0, 1, *[2] * 4, *[5] * 4, *[8] * 4, 9, 10]
    assert row == [0, 1, *[2, 2, 3, 3] * 3, 9, 10]
    assert column == [0, 1, *[2, 3] * 6, 9, 10]


def test_aligned_times_have_the_roundings_of_transformers() -> None:
    draw = np.random.default_rng(0)
    differs = False
    for _ in range(300):
        seconds, tokens = 2 / int(draw.integers(1, 31)), int(draw.choice([2, 3, 13, 25]))
        item = replace(VIDEO, spans=((0, 40),), grid=(40, 2, 2), frame_seconds=seconds)
        times = VideoTimes(tokens, is_aligned=True)
        batch = InputBatch(1, 64, 32, 100, patches_per_side=2, video_times=times)
        batch.update(plan := plan_of((0, 0, 40), new=(with_item(40, item),)))
        each = torch.tensor([seconds])[0]
        expected = (torch.arange(40) * each.float() * tokens).long()
        assert batch.inputs(plan).on_axes(3)[0].tolist() == expected.tolist()
        differs |= expected.tolist() != (torch.arange(40) * (tokens * each)).long().tolist()
    assert differs, "the order of the products matters"


@pytest.mark.parametrize("reference", ["Qwen3-VL"], indirect=True)
def test_frames_of_qwen_3_are_images_behind_their_times(reference: Any) -> None:
    kinds: list[int] = [0] * 4
    placed = []
    for video in ((3, 2, 4), (2, 5, 1)):
        for _ in range(video[0]):
            kinds += [0] * 6
            placed.append(PlacedGrid(len(kinds), 1, *video[1:]))
            kinds += [2] * (video[1] * video[2])
    kinds += [0] * 2
    types = torch.tensor([kinds])
    expected, deltas = reference.get_rope_index(
        torch.zeros_like(types), types, video_grid_thw=torch.tensor([[3, 4, 8], [2, 10, 2]])
    )
    known, indices = RopePositions(1), np.arange(len(kinds) + 2)
    known.update(0, placed, ())
    found = known.fill(np.zeros_like(indices), indices)
    assert found[:, : len(kinds)].tolist() == expected[:, 0].tolist()
    assert (found[:, -1] - indices[-1]).tolist() == [int(deltas[0, 0])] * 3


def test_text_alone_has_three_equal_positions_without_a_copy() -> None:
    known, positions = RopePositions(4), np.arange(6)
    found = known.fill(np.zeros(6, np.int64), positions)
    assert found.tolist() == [positions.tolist()] * 3
    assert np.shares_memory(found, positions)


def test_rows_without_images_stay_as_they_are() -> None:
    known = RopePositions(4)
    known.update(2, [PlacedGrid(0, 1, 2, 3)], ())
    rows = np.array([1, 2, 1, 2])
    assert known.fill(rows, np.array([4, 4, 9, 9])).tolist() == [
        [4, 0, 9, 6],
        [4, 1, 9, 6],
        [4, 1, 9, 6],
    ]
    known.update(2, (), ())
    assert known.fill(rows, np.array([4, 4, 9, 9])).tolist() == [[4, 4, 9, 9]] * 3


def request_of(row: int, length: int) -> NewRequest:
    return NewRequest(row, [5] * length, [[1 + row]], SamplingParams(), 0, 0, ())


def plan_of(*work: tuple[int, int, int], new: tuple[NewRequest, ...] = ()) -> StepPlan:
    """Make a plan of (row, start, count); each request samples."""
    rows, starts, counts = (list(column) for column in zip(*work, strict=True))
    samples, num_tokens = list(range(len(rows))), sum(counts)
    plan = StepPlan(1, rows=rows, starts=starts, counts=counts, samples=samples)
    plan.new_requests, plan.num_tokens = list(new), num_tokens
    return plan


def test_a_batch_fills_them_also_in_repeated_steps() -> None:
    """The last token of row 0's prompt belongs to an image, and the step behind it repeats."""
    batch = InputBatch(2, 32, 32, 100, patches_per_side=1)
    assert batch.rope_positions is not None
    new = request_of(0, 8), request_of(1, 3)
    batch.update(plan_of((0, 0, 7), (1, 0, 2), new=new))
    batch.rope_positions.update(0, [PlacedGrid(2, 1, 2, 3)], ())
    found = []
    for step in range(3):
        plan = plan_of((0, 7 + step, 1), (1, 2 + step, 1))
        plan.is_repeat = step > 0
        batch.append(inputs := batch.inputs(plan), np.array([6, 7]))
        assert inputs.rope_positions is not None
        found.append(inputs.rope_positions.tolist())
    assert found == [[[2, 2], [3, 2], [4, 2]], [[5, 3]] * 3, [[6, 4]] * 3]


def test_a_new_request_of_a_row_has_no_images_of_the_former() -> None:
    batch = InputBatch(1, 32, 32, 100, patches_per_side=1)
    batch.update(plan_of((0, 0, 8), new=(request_of(0, 8),)))
    assert batch.rope_positions is not None
    batch.rope_positions.update(0, [PlacedGrid(2, 1, 2, 3)], ())
    batch.update(plan := plan_of((0, 0, 4), new=(request_of(0, 4),)))
    assert batch.inputs(plan).on_axes(3).tolist() == [[0, 1, 2, 3]] * 3


VIDEO = Item(bytes(32), ((2, 14),), (3, 4, 4), None, "video", 1.5)
FRAMES = Item(bytes(32), ((2, 6), (8, 12), (14, 18)), (3, 4, 4), None, "video", 1.5)


def with_item(length: int, item: Item) -> NewRequest:
    return replace(request_of(0, length), items=(item,), num_prompt_tokens=length)


def test_a_batch_places_videos_by_the_time_between_their_frames() -> None:
    batch = InputBatch(1, 32, 32, 100, patches_per_side=2, video_times=VideoTimes(2.0))
    batch.update(plan := plan_of((0, 0, 16), new=(with_item(16, VIDEO),)))
    time, row, column = batch.inputs(plan).on_axes(3).tolist()
    assert time == [0, 1, *[2] * 4, *[5] * 4, *[8] * 4, 4, 5]
    assert row == [0, 1, *[2, 2, 3, 3] * 3, 4, 5]
    assert column == [0, 1, *[2, 3] * 6, 4, 5]


def test_times_have_the_roundings_of_transformers() -> None:
    """Those of `get_vision_position_ids`, of seconds that a tensor has in float32."""
    draw = np.random.default_rng(0)
    for _ in range(300):
        used, total, rate = (
            draw.integers(2, 60),
            draw.integers(60, 900),
            draw.choice([24, 25, 29.97]),
        )
        seconds, tokens = float(2 / (used / total * rate)), int(draw.choice([2, 3, 25]))
        item = replace(VIDEO, spans=((0, 40),), grid=(40, 2, 2), frame_seconds=seconds)
        batch = InputBatch(1, 64, 32, 100, patches_per_side=2, video_times=VideoTimes(tokens))
        batch.update(plan := plan_of((0, 0, 40), new=(with_item(40, item),)))
        expected = (torch.arange(40) * (tokens * torch.tensor([seconds])[0])).long()
        assert batch.inputs(plan).on_axes(3)[0].tolist() == expected.tolist()


def test_without_time_a_frame_is_one_position() -> None:
    batch = InputBatch(1, 32, 32, 100, patches_per_side=2)
    batch.update(plan := plan_of((0, 0, 16), new=(with_item(16, VIDEO),)))
    time, row, _ = batch.inputs(plan).on_axes(3).tolist()
    assert time == [0, 1, *[2] * 4, *[3] * 4, *[4] * 4, 4, 5]
    assert row == [0, 1, *[2, 2, 3, 3] * 3, 4, 5]


def test_a_batch_places_frames_between_texts_as_images() -> None:
    batch = InputBatch(1, 32, 32, 100, patches_per_side=2)
    batch.update(plan := plan_of((0, 0, 19), new=(with_item(19, FRAMES),)))
    time, row, column = batch.inputs(plan).on_axes(3).tolist()
    assert time == [0, 1, *[2] * 4, 4, 5, *[6] * 4, 8, 9, *[10] * 4, 12]
    assert row == [0, 1, 2, 2, 3, 3, 4, 5, 6, 6, 7, 7, 8, 9, 10, 10, 11, 11, 12]
    assert column == [0, 1, 2, 3, 2, 3, 4, 5, 6, 7, 6, 7, 8, 9, 10, 11, 10, 11, 12]


def test_a_batch_of_a_model_without_axes_has_none() -> None:
    batch = InputBatch(1, 32, 32, 100)
    batch.update(plan := plan_of((0, 0, 4), new=(request_of(0, 4),)))
    inputs = batch.inputs(plan)
    assert inputs.rope_positions is None
    assert inputs.on_axes(3).tolist() == [[0, 1, 2, 3]] * 3


def test_tokens_attend_up_to_the_ends_of_their_items() -> None:
    batch = InputBatch(2, 32, 32, 100)
    batch.update(plan := plan_of((0, 1, 5), (1, 0, 2), new=(request_of(0, 9), request_of(1, 2))))
    inputs = batch.inputs(plan)
    assert inputs.ends_of_keys(WITHIN_ITEMS).tolist() == [2, 3, 4, 5, 6, 1, 2]
    assert not inputs.looks_ahead
    inputs = replace(inputs, item_ends=np.array([2, 5, 5, 5, 6, 1, 2]))
    assert inputs.ends_of_keys(WITHIN_ITEMS).tolist() == [2, 5, 5, 5, 6, 1, 2]
    assert inputs.looks_ahead
    beyond = replace(inputs, item_ends=np.array([2, 8, 8, 8, 8, 4, 4]))
    assert beyond.ends_of_keys(WITHIN_ITEMS).tolist() == [2, 6, 6, 6, 6, 2, 2], "of those known"
    causal = replace(inputs, item_ends=inputs.positions + 1)
    assert not causal.looks_ahead


@pytest.mark.parametrize("sections", [[2, 3, 3], [2, 2, 2, 2]])
@pytest.mark.parametrize("size", [1, 5, 100])
def test_those_of_hunyuan_ocr_are_places_in_images(sections: list[int], size: int) -> None:
    """In any chunks, and where several requests share a step."""
    ropes = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    text = TEXT | {"head_dim": 16, "rope_parameters": ropes, "pad_token_id": 0}
    vision = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    with torch.device("meta"):
        model = HunYuanVLModel(HunYuanVLConfig(text_config=text, vision_config=vision))
    sides = [(2, 3), (1, 1), (4, 2)]
    kinds, items = [0] * 5, []
    for rows, columns in sides:
        items.append(PlacedGrid(len(kinds), 1, rows, columns))
        kinds += [1] * (rows * (columns + 1) + 2) + [0] * 2
    types = torch.tensor([kinds])
    grids = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in sides])
    expected, deltas = model.get_rope_index(torch.zeros_like(types), types, grids)
    assert deltas.tolist() == [[0]]  # what follows a prompt counts on
    known = GridPositions(len(sections))
    known.update(1, items, ())
    for begin in range(0, len(kinds) + 3, size):
        span = np.arange(begin, min(begin + size, len(kinds) + 3))
        alike = np.broadcast_to(span, (len(sections), len(span)))
        found = known.fill(np.repeat([1, 0], len(span)), np.tile(span, 2))
        inside = span < len(kinds)
        wanted = np.concatenate((expected[:, 0, span[inside]], alike[:, ~inside]), 1)
        assert found[:, : len(span)].tolist() == wanted.tolist()
        assert found[:, len(span) :].tolist() == alike.tolist()
    known.update(1, [], ())
    assert known.fill(np.array([1]), np.array([7])).tolist() == [[7]] * len(sections)
