"""Items of conversations: the forms of parts that are videos."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmllm.errors import RequestError
from shmllm.frontend import chat_items
from shmllm.frontend.chat_items import take_items
from shmllm.frontend.items import files

FRAMES = np.zeros((2, 4, 4, 3), np.uint8)
DATA = b"an encoded video"
URL = f"data:video/mp4;base64,{base64.b64encode(DATA).decode()}"


@pytest.fixture(autouse=True)
def bytes_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave files as they are."""
    monkeypatch.setattr(files, "item_of_bytes", lambda modality, name, data: (modality, data))


def messages(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "video", "video": FRAMES}, FRAMES),
        ({"type": "video", "video": (FRAMES, {"fps": 2})}, (FRAMES, {"fps": 2})),
        ({"type": "video_url", "video_url": {"url": URL}}, ("video", DATA)),
        ({"type": "video_url", "video_url": URL}, ("video", DATA)),
        ({"type": "video", "video": URL}, ("video", DATA)),
        ({"type": "video", "url": URL}, ("video", DATA)),
        ({"type": "video", "uuid": "n"}, None),
    ],
)
def test_a_part_that_is_a_video_is_taken(part: Any, expected: Any) -> None:
    text = {"type": "text", "text": "What?"}
    left, given = take_items(messages(part, text), "")
    assert left == messages({"type": "video"}, text)
    (item,) = given.items
    assert (item.modality, item.uuid) == ("video", part.get("uuid"))
    assert item.value is expected or item.value == expected


def test_items_are_in_the_order_of_their_parts() -> None:
    parts = [
        {"type": "video", "video": FRAMES},
        {"type": "image", "image": FRAMES[0]},
        {"type": "video_url", "video_url": {"url": URL}},
    ]
    left, given = take_items(messages(*parts), "")
    kinds = ["video", "image", "video"]
    assert [part["type"] for part in left[0]["content"]] == kinds
    assert [item.modality for item in given.items] == kinds


def test_a_file_is_read_below_the_folder_only(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(DATA)
    part = {"type": "video_url", "video_url": {"url": f"file://{tmp_path}/a.mp4"}}
    (item,) = take_items(messages(part), str(tmp_path))[1].items
    assert item.value == ("video", DATA)
    for folder in ("", str(tmp_path / "other")):
        with pytest.raises(RequestError):
            take_items(messages(part), folder)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "video"}, r"messages\[0\]\.content\[0\] has no video: give it as 'video'"),
        ({"type": "video_url", "video_url": {}}, "has no video: give it as 'video_url'"),
        ({"type": "video", "video": FRAMES, "uuid": 3}, "'uuid' must be a str, got 3"),
        ({"type": "video_embeds"}, "has no video: give it as 'video_embeds'"),
        (
            {"type": "video", "video": URL.replace("video/mp4", "image/png")},
            r"^messages\[0\]\.content\[0\]",
        ),
    ],
)
def test_parts_that_are_no_videos_are_refused(part: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        take_items(messages(part), "")


def test_every_kind_of_video_part_is_listed() -> None:
    assert {kind for kind, what in chat_items._KINDS.items() if what == "video"} == {
        "video",
        "video_url",
        "video_embeds",
    }
