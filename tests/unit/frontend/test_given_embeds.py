"""The forms in which users give embeddings in place of items."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shmllm.errors import RequestError
from shmllm.frontend.chat_items import take_items
from shmllm.frontend.given_embeds import GivenEmbeds, find_embeds
from shmllm.frontend.given_items import given_items
from shmllm.frontend.items.processor import ItemProcessor
from shmllm.frontend.placeholders.llava import LlavaPlaceholder
from shmllm.frontend.placeholders.paligemma import PaliGemmaPlaceholder
from shmllm.frontend.placeholders.qwen_vl import QwenVLPlaceholder
from shmllm.params.items import Modality

ROWS = torch.arange(60, dtype=torch.float32).reshape(15, 4)


def found(data: Any, modality: Modality = "image") -> list[tuple[Any, Any, float]] | None:
    embeds = find_embeds("the prompt", modality, data)
    if embeds is None:
        return None
    return [(np.asarray(each.rows).tolist(), each.grid, each.frame_seconds) for each in embeds]


def test_what_is_no_table_of_embeddings() -> None:
    for data in (None, [ROWS], ROWS, np.zeros((3, 8, 8), np.uint8), {"array": [1.0]}, b"x", "x"):
        assert found(data) is None


def test_an_array_of_three_axes_has_an_item_in_each_row() -> None:
    expected = [(each, None, 1.0) for each in ROWS.reshape(3, 5, 4).tolist()]
    assert found(ROWS.reshape(3, 5, 4)) == expected
    assert found(ROWS.reshape(3, 5, 4).numpy()) == expected
    assert found({"image_embeds": ROWS.reshape(3, 5, 4)}) == expected
    assert found({"audio_embeds": list(ROWS.reshape(3, 5, 4))}, "audio") == expected


def test_grids_divide_embeddings_that_follow_one_another() -> None:
    grids = torch.tensor([[1, 4, 6], [1, 4, 4], [1, 2, 10]])
    expected = [
        (ROWS[:6].tolist(), (1, 4, 6), 1.0),
        (ROWS[6:10].tolist(), (1, 4, 4), 1.0),
        (ROWS[10:].tolist(), (1, 2, 10), 1.0),
    ]
    assert found({"image_embeds": ROWS, "image_grid_thw": grids}) == expected
    videos = {"video_embeds": ROWS, "video_grid_thw": grids.tolist()}
    seconds = found(videos | {"second_per_grid_ts": torch.tensor([0.5, 1, 2])}, "video")
    assert [each[2] for each in seconds or ()] == [0.5, 1.0, 2.0]
    assert found({"image_embeds": ROWS[:6], "image_grid_thw": [1, 4, 6]}) == expected[:1]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"image_embeds": ROWS, "image_sizes": [[1, 2]]}, r"has \['image_sizes'\] beside it; know"),
        ({"image_embeds": ROWS, "second_per_grid_ts": [1]}, "'second_per_grid_ts'. beside it"),
        ({"image_embeds": ROWS, "image_grid_thw": [[1, 4]]}, "must be whole numbers of at least 1"),
        ({"image_embeds": ROWS, "image_grid_thw": [[1, 0, 4]]}, "must be whole numbers"),
        ({"image_embeds": ROWS, "image_grid_thw": [[1, 2, 2.5]]}, "must be whole numbers"),
        ({"image_embeds": ROWS, "image_grid_thw": "abc"}, "must be whole numbers"),
        ({"image_embeds": ROWS, "image_grid_thw": [[1, 2, 2], [1, 1, 3]]}, "15 emb.* do not divi"),
        ({"image_embeds": [ROWS], "image_grid_thw": [[1, 2, 2]] * 2}, "1 items, 2 grids and 1 tim"),
    ],
)
def test_a_table_that_does_not_suit_itself(data: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        given_items("the prompt", {"multi_modal_data": {"image": data}})


def test_embeddings_are_items_of_a_prompt() -> None:
    prompt = {"multi_modal_data": {"image": ROWS.reshape(3, 5, 4)}}
    given = given_items("the prompt", prompt | {"multi_modal_uuids": {"image": ["a", "b", None]}})
    assert given is not None
    assert [each.uuid for each in given.items] == ["a", "b", None]
    assert all(isinstance(each.value, GivenEmbeds) for each in given.items)


@pytest.mark.parametrize("modality", ["image", "audio", "video"])
def test_embeddings_are_parts_of_conversations(modality: Modality) -> None:
    kind = f"{modality}_embeds"
    for part in ({"type": kind, kind: ROWS, "uuid": "a"}, {kind: {kind: ROWS}, "uuid": "a"}):
        messages, given = take_items([{"role": "user", "content": [part]}], "")
        (item,) = given.items
        assert (item.modality, item.uuid) == (modality, "a")
        assert item.value.rows is ROWS
        assert messages[0]["content"][0]["type"] == modality
    part = {"type": kind, kind: ROWS.reshape(3, 5, 4)}
    with pytest.raises(RequestError, match="has 3 items: give each in a part of its own"):
        take_items([{"role": "user", "content": [part]}], "")


class Processor(ItemProcessor[Any]):
    """Takes embeddings only."""

    of_model = known_overrides = open = size = identity = prepare = None  # type: ignore[assignment]


def processor(kind: type[Any], **fields: Any) -> Any:
    shared = {"mark": "<i>", "replaced": "<i>", "replaced_ids": (1,), "token": "<i>", "token_id": 1}
    return Processor(kind(**shared, side=None, **fields))


def test_embeddings_are_copied() -> None:
    rows = ROWS.clone()
    item = processor(LlavaPlaceholder, tokens=99).take_embeds("x", GivenEmbeds(rows), 4)
    rows.zero_()
    assert item.data.tolist() == ROWS.tolist()
    assert (item.num_tokens, item.grid, item.is_embeds) == (15, (1, 1, 1), True)
    for dtype in (torch.bfloat16, torch.float64):
        other = GivenEmbeds(ROWS.to(dtype))
        same = processor(LlavaPlaceholder, tokens=99).take_embeds("x", other, 4)
        assert same.data.tolist() == ROWS.tolist()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            GivenEmbeds(ROWS),
            r"the model needs the grid of embeddings: pass \{\"image_embeds\": ...",
        ),
        (GivenEmbeds(ROWS, (1, 4, 4)), r"x has 15 embeddings, and its grid \[1, 4, 4\] 4"),
        (GivenEmbeds(ROWS.int(), (1, 6, 10)), "'image_embeds' must be floating numbers of shape"),
        (GivenEmbeds(ROWS[:, :3], (1, 6, 10)), r"of shape \[tokens, 4\], got .*\[15, 3\]"),
        (GivenEmbeds(ROWS / 0, (1, 6, 10)), "'image_embeds' has values that are not finite"),
        (GivenEmbeds("abc"), "'image_embeds' must be a torch tensor or a numpy array, got str"),
        (GivenEmbeds(ROWS[:0], (1, 6, 10)), "x has no embeddings"),
    ],
)
def test_embeddings_that_are_refused(given: GivenEmbeds, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        processor(QwenVLPlaceholder, patch_size=14, merge_size=2).take_embeds("x", given, 4)


def test_embeddings_of_models_whose_prompts_need_more_or_less() -> None:
    with pytest.raises(RequestError, match="'image_embeds' cannot be given: pass the image"):
        processor(PaliGemmaPlaceholder, tokens=4, begin="<b>").take_embeds(
            "x", GivenEmbeds(ROWS), 4
        )
    given = GivenEmbeds(ROWS, (1, 3, 5))
    with pytest.raises(RequestError, match="the model needs no 'image_grid_thw': leave it out"):
        processor(LlavaPlaceholder, tokens=15).take_embeds("x", given, 4)
