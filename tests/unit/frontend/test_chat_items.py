"""Sounds are taken out of conversations in all forms that users give them."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from shmllm.errors import RequestError
from shmllm.frontend.audio.opening import Sound
from shmllm.frontend.chat_items import take_items
from shmllm.frontend.given_items import GivenItem

WAVE = (np.sin(np.arange(400) * 0.2) * 16000).astype(np.int16)
WHERE = "messages[0].content[1]"


def wav() -> bytes:
    file = io.BytesIO()
    soundfile.write(file, WAVE, 8000, format="WAV", subtype="PCM_16")
    return file.getvalue()


DATA = base64.b64encode(wav()).decode()
DATA_URL = f"data:audio/wav;base64,{DATA}"


def conversation(part: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]


def taken(part: Any, folder: str = "") -> GivenItem:
    """The item of a part, which leaves a short one at its place."""
    messages = conversation(part)
    found, given = take_items(messages, folder)
    assert found == conversation({"type": "audio", "audio": ""})
    assert messages == conversation(part)
    (item,) = given.items
    assert item.modality == "audio"
    return item


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}},
        {"type": "input_audio", "input_audio": DATA},
        {"type": "audio_url", "audio_url": {"url": DATA_URL}},
        {"type": "audio_url", "audio_url": DATA_URL},
        {"type": "audio", "audio": DATA_URL},
        {"type": "audio", "url": DATA_URL},
        {"input_audio": {"data": DATA}},
        {"audio_url": DATA_URL},
        {"type": None, "audio_url": {"url": DATA_URL}},
        {"audio": DATA_URL, "text": "no text"},
    ],
)
@pytest.mark.parametrize("uuid", [None, "a name"])
def test_encoded_sounds_are_opened(part: dict[str, Any], uuid: str | None) -> None:
    item = taken(part | ({"uuid": uuid} if uuid else {}))
    assert isinstance(item.value, Sound)
    assert item.value.rate == 8000
    assert np.array_equal(item.value.samples, WAVE.astype(np.float32) / 32768)
    assert item.uuid == uuid


@pytest.mark.parametrize("value", [WAVE, (WAVE, 8000), [0.5, 0.25], wav()])
def test_samples_and_bytes_stay_what_they_are(value: Any) -> None:
    assert taken({"type": "audio", "audio": value}).value is value


@pytest.mark.parametrize("kind", ["audio_url", "audio"])
def test_files_below_the_folder_are_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a sound.wav"
    path.write_bytes(wav())
    item = taken({"type": kind, kind: path.as_uri(), "uuid": "u"}, str(tmp_path))
    assert np.array_equal(item.value.samples, WAVE.astype(np.float32) / 32768)
    assert item.uuid == "u"
    with pytest.raises(RequestError, match=r"content\[1\]: .*'allowed_local_media_path'"):
        take_items(conversation({"type": kind, kind: path.as_uri()}), "")


@pytest.mark.parametrize("kind", ["input_audio", "audio_url", "audio"])
def test_a_uuid_alone_names_a_sound_that_is_known(kind: str) -> None:
    for part in (
        {"type": kind, "uuid": "u"},
        {"type": kind, kind: None, "uuid": "u"},
        {kind: None, "uuid": "u"},
    ):
        assert taken(part) == GivenItem("audio", None, "u")


def test_sounds_keep_their_order_beside_other_items() -> None:
    parts = [
        {"type": "audio", "audio": WAVE},
        {"type": "text", "text": "and"},
        {"type": "image", "image": "", "uuid": "i"} | {"image": WAVE},
        {"type": "input_audio", "input_audio": {"data": DATA}},
    ]
    messages = [{"role": "user", "content": parts[:2]}, {"role": "user", "content": parts[2:]}]
    found, given = take_items(messages, "")
    kinds = [part["type"] for message in found for part in message["content"]]
    assert kinds == ["audio", "text", "image", "audio"]
    assert [item.modality for item in given.items] == ["audio", "image", "audio"]
    assert given.items[0].value is WAVE


def test_the_image_of_an_input_image_is_its_image_url() -> None:
    file = io.BytesIO()
    Image.new("RGB", (2, 3)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    for part in ({"type": "input_image", "image_url": url}, {"image_url": url}):
        (item,) = take_items(conversation(part), "")[1].items
        assert (item.modality, item.value.size) == ("image", (2, 3))


def test_texts_beside_items_may_have_no_type() -> None:
    found, given = take_items(
        [{"role": "user", "content": ["a", {"text": "b"}, {"audio": WAVE}]}], ""
    )
    assert found == [
        {"role": "user", "content": ["a", {"text": "b"}, {"type": "audio", "audio": ""}]}
    ]
    assert len(given.items) == 1


def test_conversations_without_items_stay_the_same_object() -> None:
    messages = conversation({"type": "text", "text": "b"})
    found, given = take_items(messages, "")
    assert found is messages
    assert not given


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "audio"}, " has no audio: give it as 'audio'"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, " has no audio: give it as"),
        ({"type": "audio", "audio": WAVE, "uuid": 3}, ": 'uuid' must be a str, got 3"),
        ({"type": "audio_embeds"}, " has no audio: give it as 'audio_embeds'"),
        ({"type": "input_audio", "input_audio": {"data": "ä"}}, " is not valid base64: "),
        ({"type": "input_audio", "input_audio": {"data": ""}}, " is empty (0 bytes)"),
        ({"type": "input_audio", "input_audio": {"data": "YWJj"}}, " has an unknown format"),
        ({"type": "audio_url", "audio_url": "https://a/b.wav"}, ": 'https://a/b.wav' is refused"),
        ({"type": "audio_url", "audio_url": "a.wav"}, ": 'a.wav' must be a URL that begins with"),
        (
            {"type": "audio_url", "audio_url": {"url": f"data:image/png;base64,{DATA}"}},
            ": a data URL must begin with 'data:audio/...;base64,'",
        ),
    ],
)
def test_what_is_no_sound_is_refused_with_its_place(part: Any, message: str) -> None:
    with pytest.raises(RequestError) as info:
        take_items(conversation(part), "")
    assert str(info.value).startswith(WHERE + message)
