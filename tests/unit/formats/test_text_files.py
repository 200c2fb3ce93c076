"""Small files of a model's directory are regular ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shmllm.errors import EngineStartError
from shmllm.formats import gguf
from shmllm.formats.pickled_names import pickled_strings
from shmllm.formats.safetensors_header import read_header
from shmllm.formats.text_files import read_json_object, read_text
from shmllm.models.fields import read_json_object as read_fields
from shmllm.models.sentence_files import read_sentence_files


def test_a_text_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("\u00e9", encoding="utf-8")
    assert read_text(tmp_path / "a") == "\u00e9"
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "b")
    with pytest.raises(OSError, match="irectory"):
        read_text(tmp_path)


def test_a_pipe_is_an_error_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "modules.json"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"):
        read_text(pipe)
    for read in (read_json_object, read_fields):
        with pytest.raises(EngineStartError, match="not a regular file"):
            read(pipe)
    with pytest.raises(EngineStartError, match="not a regular file"):
        read_sentence_files(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_the_names_of_tensors_are_not_awaited_from_a_pipe(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(EngineStartError, match="it is not a regular file"):
        read_header(tmp_path / name)
    with pytest.raises(EngineStartError, match="it is not a regular file"):
        gguf.read_header(tmp_path / name)
    assert pickled_strings(tmp_path / name) == frozenset()
