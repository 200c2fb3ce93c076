"""Which adapter a request gets: the given one, or that of its items' modality."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from shmllm.config.items import ItemInfo
from shmllm.errors import EngineStartError, RequestError
from shmllm.frontend.adapters import RequestAdapters, read_default_adapters
from shmllm.params.lora import LoRARequest

DEFAULTS = read_default_adapters({"image": "/of/images", "audio": "/of/sounds"}, enable_lora=True)


def request(*modalities: str) -> Any:
    items = tuple(SimpleNamespace(modality=each) for each in modalities)
    return SimpleNamespace(submitted=SimpleNamespace(lora=None, items=items))


def adapters(
    max_loras: int = 2, of_model: str = "", defaults: Mapping[str, LoRARequest] = DEFAULTS
) -> RequestAdapters:
    items = ItemInfo(modalities=("image", "audio"), sound_adapter=of_model)
    info: Any = SimpleNamespace(max_loras=max_loras, items=items)
    return RequestAdapters(info, defaults)


def names(requests: list[Any]) -> list[str | None]:
    return [each.submitted.lora and each.submitted.lora.lora_name for each in requests]


def test_the_numbers_are_those_of_vllm() -> None:
    found = {name: each.lora_int_id for name, each in DEFAULTS.items()}
    assert found == {"audio": 1, "image": 2}
    assert DEFAULTS["audio"].lora_path == "/of/sounds"
    assert read_default_adapters(None, enable_lora=False) == {}


def test_items_choose_an_adapter_unless_one_is_given(caplog: pytest.LogCaptureFixture) -> None:
    requests = [request(), request("image", "image"), request("audio"), request("video")]
    assert names(adapters().set(requests, None)) == [None, "image", "audio", None]
    own = LoRARequest("own", 9, "/own")
    requests = [request("image"), request("image")]
    assert names(adapters().set(requests, [own, None])) == ["own", "image"]
    with caplog.at_level(logging.WARNING):
        assert names(adapters().set([request("image", "audio")], None)) == [None]
    assert "a prompt with audio and image gets none of the adapters of default_mm" in caplog.text


def test_sounds_have_the_models_own_adapter_unless_another_one_is_named() -> None:
    def paths(found: list[Any]) -> list[str | None]:
        return [each.submitted.lora and each.submitted.lora.lora_path for each in found]

    asked = [request("audio"), request("image"), request()]
    found = adapters(of_model="/model", defaults={}).set(asked, None)
    assert paths(found) == ["/model", None, None]
    found = adapters(of_model="/model").set([request("audio"), request("image")], None)
    assert paths(found) == ["/of/sounds", "/of/images"]
    given = LoRARequest("own", 9, "/own")
    assert paths(adapters(of_model="/model").set([request("audio")], given)) == ["/own"]
    without = adapters(max_loras=0, of_model="/model", defaults={})
    assert paths(without.set([request("image")], None)) == [None]
    with pytest.raises(RequestError, match="for prompts with sounds, in /model: start the engine"):
        without.set([request("audio")], None)


def test_what_is_no_adapter_is_an_error() -> None:
    with pytest.raises(RequestError, match="must be a LoRARequest or a list of them, got 'name'"):
        adapters().set([request()], "name")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="1 prompts and 2 lora_requests"):
        adapters().set([request()], [None, None])
    with pytest.raises(RequestError, match="'own' has no effect: this engine has no adapters"):
        adapters(max_loras=0).set([request()], LoRARequest("own", 9, "/own"))


@pytest.mark.parametrize(
    ("option", "enable_lora", "message"),
    [
        ({"image": "/x"}, False, "default_mm_loras needs enable_lora=True"),
        ({"picture": "/x"}, True, "a mapping from image, audio, video to dir.* 'picture': '/x'"),
        ({"image": 5}, True, "got 'image': 5"),
    ],
)
def test_wrong_options(option: dict[str, Any], enable_lora: bool, message: str) -> None:
    with pytest.raises(EngineStartError, match=message):
        read_default_adapters(option, enable_lora)
