"""Images of prompts: what users may give, limits, names of images, and the items made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.fakes import info

from shmllm.config.items import ItemInfo
from shmllm.errors import RequestError
from shmllm.frontend import item_sizes, prompt_items
from shmllm.frontend.given_items import GivenItem, GivenItems, given_items
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.items.ready import ReadyItem
from shmllm.frontend.prompt_items import ItemOptions, PromptItems
from shmllm.params.items import Item

MOST_EMBEDS = 8


class Processor:
    """Makes one tile of an image, and counts how often."""

    known_overrides = frozenset({"a", "b", "tokens"})
    checked: Any = None

    def __init__(self) -> None:
        self.num_prepared = 0

    def check(self, overrides: Any) -> None:
        self.checked = dict(overrides)

    def among(self, count: int) -> dict[str, Any]:
        return {"tokens": 1} if count == 4 else {}

    def open(self, name: str, value: Any) -> Any:
        return value

    def size(self, picture: Any) -> Any:
        return picture.size

    def identity(self, picture: Any, overrides: Any, name: str) -> bytes:
        return (picture.tobytes()[:4] + repr(sorted(overrides.items())).encode()).ljust(32)[:32]

    def prepare(self, picture: Any, overrides: Any, name: str) -> PreparedItem:
        self.num_prepared += 1
        pixels = np.full((1, 2, 2, 3), picture.getpixel((0, 0))[0], np.uint8)
        return PreparedItem(pixels, (1, 1, 1), overrides.get("tokens", 2))

    def runs(self, name: str, ids: Any, images: list[PreparedItem]) -> list[Any]:
        starts = np.cumsum([0, *(each.num_tokens for each in images)]).tolist()
        return [
            ((start, start + each.num_tokens),) for start, each in zip(starts, images, strict=False)
        ]


class Items(PromptItems):
    """Those of a model without files."""

    def _read_processors(self) -> dict[Any, Any]:
        return {"image": Processor()}


def make(cache_bytes: int = 1000, **options: Any) -> PromptItems:
    engine = replace(
        info(),
        items=ItemInfo(modalities=("image",), most_embeds=MOST_EMBEDS, cache_bytes=cache_bytes),
    )
    return Items(engine, ItemOptions(**options))


def picture(value: int) -> Any:
    return Image.new("RGB", (4, 4), (value, 0, 0))


def ready(images: PromptItems, *given: Any, uuids: Any = None, **overrides: Any) -> list[Any]:
    names = uuids or [None] * len(given)
    return images.ready(
        "the prompt",
        GivenItems(
            [GivenItem("image", *each) for each in zip(given, names, strict=True)], overrides
        ),
    )


def value_of(image: ReadyItem) -> int:
    return int(image.prepared.data[0, 0, 0, 0])


def test_the_number_of_images_may_change_how_each_is_prepared() -> None:
    def counts(images: PromptItems, number: int, **overrides: Any) -> list[int]:
        given = ready(images, *map(picture, range(number)), **overrides)
        return [each.prepared.num_tokens for each in given]

    assert [counts(make(), number) for number in (1, 3, 4)] == [[2], [2] * 3, [1] * 4]
    assert counts(make(), 4, tokens=5) == [5] * 4
    assert counts(make(overrides={"tokens": 3}), 4) == [3] * 4
    with pytest.raises(RequestError, match="the model takes no audio clips"):
        make().overrides_among("audio", 4)


@pytest.mark.parametrize(
    ("prompt", "count", "uuids"),
    [
        ({}, 0, []),
        ({"multi_modal_data": None}, 0, []),
        ({"multi_modal_data": {"image": None, "video": None}}, 0, []),
        ({"multi_modal_data": {"image": []}, "multi_modal_uuids": {"image": []}}, 0, []),
        ({"mm_processor_kwargs": {"a": 1}}, 0, []),
        ({"multi_modal_data": {"image": "x"}}, 1, [None]),
        ({"multi_modal_data": {"image": ("x", "y")}}, 2, [None, None]),
        ({"multi_modal_data": {"image": "x"}, "multi_modal_uuids": {"image": "n"}}, 1, ["n"]),
        ({"multi_modal_uuids": {"image": ["n", "m"]}}, 2, ["n", "m"]),
        (
            {
                "multi_modal_data": {"image": ["x", None]},
                "multi_modal_uuids": {"image": [None, "m"]},
            },
            2,
            [None, "m"],
        ),
    ],
)
def test_what_a_prompt_has_of_images(prompt: Any, count: int, uuids: list[Any]) -> None:
    given = given_items("the prompt", prompt)
    found = (0, []) if given is None else (len(given.items), [each.uuid for each in given.items])
    assert found == (count, uuids)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"multi_modal_data": ["x"]}, "'multi_modal_data' must be a dict"),
        ({"multi_modal_data": np.zeros((2, 2, 3))}, "'multi_modal_data' must be a dict"),
        ({"multi_modal_data": {"sound": "x"}}, "has 'sound'; supported are image, audio, video"),
        ({"multi_modal_uuids": {"smell": "x"}}, "has 'smell'; supported are image"),
        ({"multi_modal_data": {"image": "x"}, "mm_processor_kwargs": [1]}, "must be a dict"),
        (
            {"multi_modal_data": {"image": "x"}, "multi_modal_uuids": {"image": ["a", "b"]}},
            "has 1 image and 2 uuids",
        ),
        (
            {"multi_modal_data": {"image": "x"}, "multi_modal_uuids": {"image": 7}},
            "a uuid must be a str or None",
        ),
    ],
)
def test_malformed_images_of_a_prompt(prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        given_items("the prompt", prompt)


@pytest.mark.parametrize("limit", [1, {"count": 1, "width": 5}])
def test_a_limit_of_images(limit: Any) -> None:
    images = make(limits={"image": limit})
    assert len(ready(images, picture(1))) == 1
    with pytest.raises(RequestError, match="has 2 images; limit_mm_per_prompt allows 1"):
        ready(images, picture(1), picture(2))


@pytest.mark.parametrize("limit", [-1, "1", True, {"count": None}])
def test_a_limit_that_is_none(limit: Any) -> None:
    with pytest.raises(RequestError, match="limit_mm_per_prompt must be a number"):
        make(limits={"image": limit})


def test_an_image_is_prepared_once_for_each_way() -> None:
    images = make(overrides={"a": 1})
    processor: Any = images._processors["image"]
    for _ in range(2):
        ready(images, picture(1))
        ready(images, picture(1), b=2)
        ready(images, picture(1), a=1)
    assert processor.num_prepared == 2
    images.clear()
    ready(images, picture(1))
    assert processor.num_prepared == 3


def test_a_name_stands_for_an_image() -> None:
    images = make()
    (first,) = ready(images, picture(1), uuids=["n"])
    assert ready(images, None, uuids=["n"]) == [first]
    (other,) = ready(images, picture(2), uuids=["m"])
    assert (value_of(first), value_of(other)) == (1, 2)
    assert first.identity != other.identity
    with pytest.raises(RequestError, match="image 1 is None, and no image with the uuid 'n'"):
        ready(images, None, uuids=["n"], tokens=3)  # prepared in another way
    images.clear()
    with pytest.raises(RequestError, match="no image with the uuid 'n' is kept"):
        ready(images, None, uuids=["n"])
    with pytest.raises(RequestError, match="image 1 is None"):
        ready(images, None)


def test_a_name_of_an_image_of_another_size_is_another_image() -> None:
    images = make()
    (first,) = ready(images, picture(1), uuids=["n"])
    (second,) = ready(images, Image.new("RGB", (5, 4), (2, 0, 0)), uuids=["n"])
    assert first.identity != second.identity
    assert ready(images, None, uuids=["n"]) == [second]


def test_names_are_those_of_one_front_end() -> None:
    (one,), (other,) = (ready(make(), picture(1), uuids=["n"]) for _ in range(2))
    assert one.identity != other.identity


def test_the_oldest_names_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_items, "MOST_UUIDS", 2)
    images = make()
    for name, value in (("a", 1), ("b", 2), ("a", 1), ("c", 3)):
        ready(images, picture(value), uuids=[name])
    assert [value_of(ready(images, None, uuids=[name])[0]) for name in "ac"] == [1, 3]
    with pytest.raises(RequestError, match="no image with the uuid 'b' is kept"):
        ready(images, None, uuids=["b"])


def test_items_have_the_places_of_their_embeddings() -> None:
    images = make()
    found = ready(images, picture(1), picture(2))
    items = images.items("the prompt", [0] * 4, found)
    assert [item.spans for item in items] == [((0, 2),), ((2, 4),)]
    assert [item.identity for item in items] == [each.identity for each in found]


def test_an_image_with_too_many_embeddings_is_refused() -> None:
    images = make()
    found = ready(images, picture(1), tokens=MOST_EMBEDS + 1)
    with pytest.raises(RequestError, match="image 1 has 9 embeddings, more than the 8"):
        images.items("the prompt", [0] * 9, found)


@pytest.mark.parametrize(
    ("length", "advice"),
    [(9, "raise max_num_batched_tokens"), (8, "raise max_model_len, which is 8, and kv_cache_")],
)
def test_a_refusal_names_the_option_that_is_the_bound(length: int, advice: str) -> None:
    engine = replace(
        info(),
        items=ItemInfo(modalities=("image",), most_embeds=MOST_EMBEDS, longest_span=6),
        max_model_len=length,
    )
    prepared = PreparedItem(np.zeros((1, 1, 9, 3), np.uint8), (1, 1, 9), 9)
    item = Item(bytes(32), ((0, 9),), prepared.grid, prepared.data, "image")
    with pytest.raises(RequestError, match=advice):
        item_sizes.check_sizes("the prompt", [("image", prepared)], engine)
    with pytest.raises(RequestError, match=advice):
        item_sizes.check_spans("the prompt", [item], engine)


def test_an_item_with_too_many_bytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_sizes, "MOST_ITEM_BYTES", 11)
    images = make()
    found = ready(images, picture(1))
    with pytest.raises(RequestError, match="image 1 becomes 12 bytes, more than 11"):
        images.items("the prompt", [0] * 4, found)


def test_an_engine_without_images_refuses_them() -> None:
    with pytest.raises(RequestError, match="the model takes no images"):
        ready(PromptItems(info()), picture(1))


class PartsProcessor(Processor):
    """Makes two parts of an image, of one and of several embeddings."""

    def prepare(self, picture: Any, overrides: Any, name: str) -> PreparedItem:
        first = super().prepare(picture, overrides, name)
        data = np.full((1, 3, 1, 3), 7, np.uint8)
        return PreparedItem.of_parts([PreparedItem(data, (1, 1, 2), 1), first], (2, 1, 1))


def test_an_image_in_parts_is_several_items_of_the_engine() -> None:
    images = make()
    images._processors["image"] = PartsProcessor()  # type: ignore[assignment]
    found = ready(images, picture(1), picture(2), picture(1))
    assert [each.prepared.num_tokens for each in found] == [3, 3, 3]
    items = images.items("the prompt", [0] * 9, found)
    assert [each.num_embeds for each in items] == [1, 2] * 3
    assert [each.grid for each in items] == [(1, 1, 2), (1, 1, 1)] * 3
    assert [each.data.shape for each in items] == [(1, 3, 1, 3), (1, 2, 2, 3)] * 3
    identities = [each.identity for each in items]
    assert identities[:2] == identities[4:]
    assert len(set(identities)) == 4
    assert {len(each) for each in identities} == {32}
    large = ready(images, picture(1), tokens=MOST_EMBEDS)
    assert len(images.items("the prompt", [0] * 9, large)) == 2
    larger = ready(images, picture(1), tokens=MOST_EMBEDS + 1)
    with pytest.raises(RequestError, match="image 1 has 9 embeddings, more than the 8"):
        images.items("the prompt", [0] * 10, larger)


class VideoProcessor(Processor):
    """Knows fields that images do not have."""

    known_overrides = frozenset({"b", "tokens", "fps"})

    def size(self, picture: Any) -> Any:
        return picture.shape

    def identity(self, picture: Any, overrides: Any, name: str) -> bytes:
        return (b"v" + repr(sorted(overrides.items())).encode()).ljust(32)[:32]

    def prepare(self, picture: Any, overrides: Any, name: str) -> PreparedItem:
        self.num_prepared += 1
        return PreparedItem(picture, (1, 1, 1), 2, overrides.get("fps", 1.0), (0.5,))


def make_with_videos(**options: Any) -> PromptItems:
    images = make(**options)
    images._processors["video"] = VideoProcessor()  # type: ignore[assignment]
    return images


def test_overrides_of_videos_do_not_disturb_images_of_the_same_prompt() -> None:
    images = make_with_videos(overrides={"a": 1})
    frames = np.zeros((2, 4, 4, 3), np.uint8)
    given = given_items(
        "the prompt",
        {
            "multi_modal_data": {"image": picture(1), "video": frames},
            "mm_processor_kwargs": {"fps": 4.0, "b": 2, "unknown": 3},
        },
    )
    assert given is not None
    image, video = images.ready("the prompt", given)
    assert (
        image.identity
        == picture(1).tobytes()[:4].ljust(4)
        + (repr([("a", 1), ("b", 2), ("unknown", 3)]).encode().ljust(28)[:28])
    )
    assert (
        video.identity
        == b"v" + (repr([("b", 2), ("fps", 4.0), ("unknown", 3)]).encode().ljust(31)[:31])
    )
    (item,) = (
        each
        for each in images.items("the prompt", [0] * 9, [image, video])
        if each.modality == "video"
    )
    assert item.frame_seconds == 4.0


FRAME = np.zeros((4, 4, 3), np.uint8)


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (np.stack([FRAME] * 3), 1),
        ([np.stack([FRAME] * 3)] * 2, 2),
        ([FRAME, FRAME, FRAME], 1),
        ([Image.new("RGB", (4, 4))] * 3, 1),
        ([[FRAME, FRAME], [FRAME]], 2),
        ((np.stack([FRAME] * 3), {"fps": 2}), 1),
        ([([FRAME] * 3, {"fps": 2}), (FRAME[None], {"fps": 2})], 2),
        (b"a file", 1),
        ([b"a file", b"another"], 2),
        ([], 0),
    ],
)
def test_one_video_is_told_from_several(value: Any, count: int) -> None:
    given = given_items("the prompt", {"multi_modal_data": {"video": value}})
    assert (0 if given is None else len(given.items)) == count


def test_videos_and_images_are_counted_apart() -> None:
    images = make_with_videos(limits={"video": 1})
    given = [GivenItem("image", picture(1)), GivenItem("video", FRAME[None])]
    images.ready("the prompt", GivenItems([*given, given[0]]))
    with pytest.raises(RequestError, match="has 2 videos; limit_mm_per_prompt allows 1"):
        images.ready("the prompt", GivenItems([*given, given[1]]))
    with pytest.raises(RequestError, match="the prompt: the model takes no videos"):
        make().ready("the prompt", GivenItems(given))


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ([0.0, 0.5], 1),
        ([*np.zeros(3, np.float32)], 1),
        ([*np.zeros(3, np.int16)], 1),
        ([np.zeros(3, np.float32)], 1),
        ([np.zeros(3, np.float32), (np.zeros(2), 8000)], 2),
    ],
)
def test_one_sound_is_told_from_several(value: Any, count: int) -> None:
    given = given_items("the prompt", {"multi_modal_data": {"audio": value}})
    assert given is not None
    assert len(given.items) == count


def test_a_model_is_checked_with_the_overrides_of_its_engine() -> None:
    processor: Any = make(overrides={"a": 1})._processors["image"]
    assert processor.checked == {"a": 1}
    assert Items(info())._processors == {}
