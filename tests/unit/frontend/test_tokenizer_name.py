"""The name of the transformers tokenizer, by which programs load it or its model again."""

from __future__ import annotations

import huggingface_hub
import pytest
from support.fakes import FakeEngineClient

from shmllm import LLM
from shmllm.compat.vllm_names import get_tokenizer
from shmllm.frontend import front_end
from shmllm.frontend.model_files import bundled_model


@pytest.fixture
def snapshot(monkeypatch):
    """The directory to which every hub id resolves."""
    directory = bundled_model("tiny")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(directory))
    return directory


def test_a_hub_id_is_the_name(snapshot):
    assert get_tokenizer("org/name").name_or_path == "org/name"
    assert get_tokenizer("name", revision="main").name_or_path == "name"


def test_other_tokenizers_are_named_by_their_directory(snapshot):
    for name in (snapshot, "tiny"):
        assert get_tokenizer(name).name_or_path == str(snapshot)


@pytest.mark.parametrize(
    ("model", "options", "name"),
    [
        ("org/name", {}, "org/name"),
        ("tiny", {"tokenizer": "org/other"}, "org/other"),
        ("org/name", {"tokenizer": "tiny"}, None),
    ],
)
def test_an_llm_names_its_tokenizer(snapshot, monkeypatch, model, options, name):
    monkeypatch.setattr(front_end, "start_engine", lambda *_: FakeEngineClient(1))
    with LLM(model, **options) as llm:
        assert llm.get_tokenizer().name_or_path == (name or str(snapshot))
